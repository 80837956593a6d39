"""Mixtures of experts whose weights servers hold: all experts compute for every row, whichever the router chose.

Servers get the same numbers of masked rows whatever a router chose. The first product makes of each row what all
experts make of it; the client keeps what the chosen ones made. These values, gated and times the router's weights,
are inputs of the second product, whose weight has the columns of all experts, beside zeros for those not chosen. All
are masked alike.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from private_llm.assisted.fixed_point import MOST_INPUTS
from private_llm_hf.client.assisted_layers import HoldsWeights, Products, TakesWeights, WeightElsewhere, check_grad
from private_llm_hf.client.assisted_rows import RowCounts, Sides
from private_llm_hf.client.product_servers import rows_at_once
from private_llm_hf.models.norms import CANNOT

_FITS = 1 << 30
"""Bytes of all experts of a model, in float32, up to which "auto" leaves them at the client."""


@dataclass(frozen=True)
class ExpertSizes:
    """Of transformers' experts: weights [count, outer, hidden] and [count, out, inner]; outer: 2 inner if gated."""

    first: str
    count: int
    hidden: int
    outer: int
    inner: int
    out: int

    @classmethod
    def of(cls, module: nn.Module) -> "ExpertSizes | None":
        """None for other modules, and for experts with a norm of their own after the second product."""
        held, flags = module._parameters, vars(module)
        first = "gate_up_proj" if flags.get("has_gate", True) else "up_proj"
        names = {first, "down_proj", *((f"{first}_bias", "down_proj_bias") if flags.get("has_bias") else ())}
        if "is_transposed" not in flags or flags.get("has_post_expert_norm") or held.keys() != names:
            return None
        weights = [module.get_parameter(name) for name in (first, "down_proj")]
        if {each.dim() for each in weights} != {3}:
            return None
        (count, outer, hidden), (_, out, inner) = ((w.mT if flags["is_transposed"] else w).shape for w in weights)
        return cls(first, count, hidden, outer, inner, out)

    @property
    def groups(self) -> list[slice]:
        """Experts whose products travel together: all, unless they are too many inputs for one."""
        size = max(1, MOST_INPUTS // self.inner)
        return [slice(at, min(at + size, self.count)) for at in range(0, self.count, size)]

    def sides(self) -> list[Sides]:
        """Outputs and inputs of the products, the first of all groups before the second."""
        counts = [group.stop - group.start for group in self.groups]
        return [(n * self.outer, self.hidden) for n in counts] + [(self.out, n * self.inner) for n in counts]


class AssistedExperts(TakesWeights):
    """In front of a class of experts: its gate and biases here, the products of all experts at the servers.

    Bytes a row: 5 (hidden + count inner) to the last server, 5 (count outer + out) from each; 4 for 8-bit weights.
    """

    _sizes: ExpertSizes
    _products: list[Products]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Rows [M, hidden], experts [M, k] and their weights to [M, out]. Raises as `AssistedLinear.forward`."""
        check_grad(hidden_states)
        if not hidden_states.numel():
            return hidden_states.new_empty(len(hidden_states), self._sizes.out)
        count = len(self._sizes.groups)
        first, second = self._products[:count], self._products[count:]
        chosen = self._in_parts(first, self._first, hidden_states, top_k_index) * top_k_weights.unsqueeze(-1)
        made = self._in_parts(second, self._second, chosen, top_k_index)
        bias: Tensor | None = self._parameters.get("down_proj_bias")
        if bias is not None:
            made = made + (bias[top_k_index] * top_k_weights.unsqueeze(-1)).sum(1)
        return made.to(hidden_states.dtype)

    @staticmethod
    def _in_parts(
        products: list[Products], step: Callable[[list[Products], Tensor, Tensor], Tensor], x: Tensor, index: Tensor
    ) -> Tensor:  # fmt: skip
        """As many rows as an exchange has at a time: with all experts a long prompt would take much memory."""
        rows = min(rows_at_once(each.inputs, each.outputs) for each in products)
        return torch.cat([step(products, *part) for part in zip(x.split(rows), index.split(rows), strict=True)])

    def _first(self, products: list[Products], x: Tensor, index: Tensor) -> Tensor:
        """What the chosen experts make before their second product, [M, k, inner]."""
        made = torch.cat([each.part(0, x) for each in products], dim=1).view(len(x), self._sizes.count, -1)
        own = made.gather(1, index.unsqueeze(-1).expand(-1, -1, self._sizes.outer)).flatten(0, 1)
        bias = self._parameters.get(f"{self._sizes.first}_bias")
        if bias is not None:
            own = own + bias[index.flatten()].to(own.dtype)
        gated: Tensor = self._apply_gate(own) if vars(self).get("has_gate", True) else self.act_fn(own)  # type: ignore[operator]
        return gated.view(*index.shape, -1)

    def _second(self, products: list[Products], x: Tensor, index: Tensor) -> Tensor:
        """The sum of what the chosen experts make, [M, out]."""
        wide = x.new_zeros(len(x), self._sizes.count, self._sizes.inner)
        wide.scatter_add_(1, index.unsqueeze(-1).expand_as(x), x)
        parts = [each.part(0, wide[:, g].flatten(1)) for each, g in zip(products, self._sizes.groups, strict=True)]
        return torch.stack(parts).sum(0)

    def take(self, own: str, weight: Tensor) -> None:
        """A weight of all experts, as the class holds it."""
        matrices, groups, first = weight.mT if self.is_transposed else weight, self._sizes.groups, self._sizes.first
        for number, group in enumerate(groups):
            part = matrices[group]
            if own == first:
                self._products[number].take(0, part.flatten(0, 1))
            else:
                self._products[len(groups) + number].take(0, part.transpose(0, 1).flatten(1))


_CLASSES: dict[type[nn.Module], type[AssistedExperts]] = {}


def _assist(experts: nn.Module, sizes: ExpertSizes, name: str, made: Callable[[str, list[Sides]], Products]) -> None:
    kind = type(experts)
    if kind not in _CLASSES:
        body = {"__module__": __name__, "__doc__": f"{kind.__name__} under protocol 'assisted'."}
        _CLASSES[kind] = type(f"Assisted{kind.__name__}", (AssistedExperts, kind), body)
    experts.__class__ = _CLASSES[kind]
    names, groups = (sizes.first, "down_proj"), sizes.groups
    spans = [""] if len(groups) == 1 else [f"[{each.start}:{each.stop}]" for each in groups]
    full = [f"{name}.{own}{span}" for own in names for span in spans]
    experts._sizes, experts.elsewhere = sizes, frozenset(names)  # type: ignore[assignment]
    experts._products = [made(each, [sides]) for each, sides in zip(full, sizes.sides(), strict=True)]  # type: ignore[assignment]
    for own in names:
        experts._parameters[own] = WeightElsewhere.of(experts.get_parameter(own), name)


def assist_experts(
    model: nn.Module, experts: Mapping[str, ExpertSizes], servers: HoldsWeights, rows: RowCounts
) -> None:  # fmt: skip
    """Let servers hold the weights of these experts (`experts_at_servers`)."""
    for name, sizes in experts.items():
        _assist(model.get_submodule(name), sizes, name, lambda full, sides: Products(servers, rows, full, sides))


def experts_at_servers(model: nn.Module, where: str) -> dict[str, ExpertSizes]:
    """The experts of a model whose weights servers hold, by name. where: `PrivateConfig.experts`.

    Those of transformers' classes for which a trial gives what the class itself computes; others stay at the client.
    """
    tried: dict[object, bool] = {}
    found: dict[str, ExpertSizes] = {}
    for name, module in model.named_modules():
        sizes = None if where == "client" else ExpertSizes.of(module)
        if sizes is not None:
            kind = type(module), sizes
            tried[kind] = tried[kind] if kind in tried else _computes_the_same(module, sizes)
            found |= {name: sizes} if tried[kind] else {}
    held = sum(each.count * each.inner * each.out + each.count * each.outer * each.hidden for each in found.values())
    return {} if where == "auto" and 4 * held <= _FITS else found


class _Here(Products):
    """A product that is computed here."""

    def __init__(self, name: str, sides: list[Sides]) -> None:
        super().__init__(None, None, name, sides)  # type: ignore[arg-type]
        self._weight = torch.empty(0)

    def take(self, member: int, weight: Tensor) -> None:
        self._weight = weight

    def part(self, member: int, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight)


_TRIAL_ROWS = 5


def _computes_the_same(module: nn.Module, sizes: ExpertSizes) -> bool:
    """Whether the class's own code gives what `AssistedExperts` gives, at small sizes, for rows from 0.05 to 500."""
    inner, outer, count = 4, 4 * (sizes.outer // sizes.inner), min(4, sizes.count)
    hidden = {sizes.inner: inner, sizes.outer: outer}.get(sizes.hidden, 6)
    small = ExpertSizes(sizes.first, count, hidden, outer, inner, hidden)
    known = {sizes.inner: inner, sizes.outer: outer, sizes.hidden: hidden}
    shapes = {
        sizes.first: (count, outer, hidden), f"{sizes.first}_bias": (count, outer),
        "down_proj": (count, hidden, inner), "down_proj_bias": (count, hidden),
    }  # fmt: skip

    def weight(name: str, start: int) -> nn.Parameter:
        made = _numbers(shapes[name], start)
        turned = made.dim() == 3 and module.is_transposed
        return nn.Parameter(made.mT.contiguous() if turned else made, requires_grad=False)

    def copied() -> Any:  # noqa: ANN401 - a module of any class
        made = copy.copy(module)
        numbers = {key: known.get(value, value) for key, value in vars(module).items() if type(value) is int}
        vars(made).update({**numbers, "num_experts": module.num_experts})
        made._parameters = {name: weight(name, start) for start, name in enumerate(module._parameters)}
        return made

    x = _numbers((_TRIAL_ROWS, hidden), 7) * 5 * 10.0 ** torch.arange(-2, 3).unsqueeze(-1)
    index = torch.arange(2 * _TRIAL_ROWS).view(_TRIAL_ROWS, 2) % count
    given = x, index, _numbers((_TRIAL_ROWS, 2), 9)
    try:
        theirs, ours = copied(), copied()
        weights = dict(ours._parameters)
        _assist(ours, small, "trial", _Here)
        for name in ours.elsewhere:
            ours.take(name, weights[name])
        with torch.no_grad():
            want, got = inspect.unwrap(type(module).forward)(theirs, *given), ours(*given)
    except CANNOT:
        return False
    return bool(((want - got).abs().amax(1) <= 1e-4 * want.abs().amax(1)).all())


def _numbers(shape: tuple[int, ...], start: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(1 + start, 1 + start + count).mul(1.7).sin().view(shape)
