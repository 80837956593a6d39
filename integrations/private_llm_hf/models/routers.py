"""Routers of mixtures of experts: which k experts a token goes to, and with which weights; all of it secret.

Scores are a softmax or sigmoids of a linear layer; k are chosen by score, or by score plus a learned correction, among
all or among the best groups; weights are the scores of those chosen, maybe divided by their sum, times a number. Which
of these a module spells is found by trying it; one that computes anything else is no router.
"""

import contextlib
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from private_llm.approx.normalise import reciprocal
from private_llm.errors import PlaintextLeak, UnsupportedOp
from private_llm.exact.ranks import Groups, among_largest, among_largest_of_groups
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.models.norms import CANNOT, tried

_ROWS, _WIDTH = 32, 16  # tokens that a router is tried on, and their size
_TOLERANCE = 1e-4

LEAST_SUM = 2.0**-8  # of chosen scores that weights are divided by, where nothing else bounds it; smaller count as more


@dataclass(frozen=True)
class Routing:
    """Scores of all experts, k of them chosen; `normal`: divided by their sum; times `scale`. corrected: what the
    learned correction is added to before the choice. groups: only the best are chosen from.
    """

    k: int
    normal: bool
    scale: float
    score: Literal["softmax", "sigmoid"] = "softmax"
    corrected: Literal["", "scores", "logits"] = ""
    groups: Groups | None = None

    def plain(self, logits: Tensor, correction: Tensor | None) -> Tensor:
        """The formula itself: weights of all experts, [T, n] as the logits."""
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        choice = logits if self.corrected == "logits" else scores
        choice = choice + correction if self.corrected and correction is not None else choice
        if self.groups is not None:
            parts = choice.unflatten(-1, (self.groups.count, -1))
            kept = parts.topk(self.groups.best, dim=-1)[0].sum(-1).topk(self.groups.kept, dim=-1)[1]
            away = torch.ones(parts.shape[:-1], dtype=torch.bool).scatter_(-1, kept, False)
            choice = parts.masked_fill(away.unsqueeze(-1), float("-inf")).flatten(-2)
        index = choice.topk(self.k, dim=-1)[1]
        values = scores.gather(-1, index)
        values = values / values.sum(-1, keepdim=True) if self.normal else values
        return torch.zeros_like(scores).scatter_(-1, index, values * self.scale)

    def chosen(self, choice: Fixed) -> Fixed:
        """Secret zeros and ones [T, n]."""
        if self.groups is None:
            return among_largest(choice, self.k)
        return among_largest_of_groups(choice, self.k, self.groups)

    def sums(self, count: int) -> tuple[float, float]:
        """Between which numbers the sum of the chosen scores of `count` lies."""
        if self.score == "sigmoid":
            return LEAST_SUM, 1.01 * self.k
        if self.corrected:
            return LEAST_SUM, 1.01
        return 0.99 * (self.k if self.groups is None else 1) / count, 1.01  # the best group holds the largest


@dataclass(frozen=True)
class RouterParts:
    """A router's weights. linear: its linear child, or "" for its own `weight` (and `bias`). correction: the name of
    its own one, or of a child that adds one; "": none, or the caller gives it.
    """

    linear: str
    correction: str


class PrivateRouter(nn.Module):
    """Secret weights of all experts for each token: scores, one choice of the k largest, one quotient."""

    def __init__(self, original: nn.Module, routing: Routing, parts: RouterParts) -> None:
        super().__init__()
        self.routing, self.parts = routing, parts
        for name, value in original.named_parameters(recurse=False):
            self.register_parameter(name, value)
        for name, child in original.named_children():
            self.add_module(name, child)

    def forward(self, hidden_states: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Secret tokens [.., H] to logits and weights, each [T, n], secret, weights zero where not chosen; and [T, k]
        in place of an index, of which experts read the shape.

        correction: [n], of routers that do not hold it. Sigmoids and the correction decide with the sigmoid's error of
        1e-4: of two experts closer than twice that, either may be chosen. Raises PlaintextLeak for plain tokens,
        UnsupportedOp without the correction.
        """
        if not isinstance(hidden_states, SecretTensor):
            raise PlaintextLeak("a private router got a plain tensor; its input must be secret")
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.parts.linear:
            logits: Tensor = self.get_submodule(self.parts.linear)(tokens)
        else:
            logits = F.linear(tokens, self.get_parameter("weight"), self._parameters.get("bias"))
        scores = logits.softmax(-1) if self.routing.score == "softmax" else torch.sigmoid(logits)
        chosen = self.routing.chosen(secret(self._choice(logits, scores, correction)).to_operand())
        held = secret(scores).to_operand().mul(chosen)
        low, high = self.routing.sums(logits.shape[-1])
        if self.routing.normal and low < high * 0.98:
            held = held.mul(reciprocal(held.sum(-1, keepdim=True), low, high))
        weights: Tensor = SecretTensor(held)
        weights = weights if self.routing.scale == 1.0 else weights * self.routing.scale
        return logits, weights, weights[:, : self.routing.k]

    def _choice(self, logits: Tensor, scores: Tensor, given: Tensor | None) -> Tensor:
        """What decides: logits, which scores grow with, unless scores are added to something or to each other."""
        if not self.routing.corrected:
            groups = self.routing.groups
            return logits if groups is None or groups.best == 1 else scores
        choice = logits if self.routing.corrected == "logits" else scores
        if self.parts.correction in self._modules:
            made: Tensor = self.get_submodule(self.parts.correction)(choice)
            return made
        correction = self._parameters[self.parts.correction] if self.parts.correction else given
        if correction is None:
            raise UnsupportedOp("a private router got no correction; its experts are chosen by score and correction")
        return choice + correction

    def extra_repr(self) -> str:
        """What is public of it."""
        return repr(self.routing)


def secret(x: Tensor) -> SecretTensor:
    """What a router or an expert made. Raises PlaintextLeak if it is plain."""
    if not isinstance(x, SecretTensor):
        raise PlaintextLeak("what a private router or expert made became plain")
    return x


# -- what a module is -----------------------------------------------------------------------------------------------
def router_of(module: nn.Module) -> tuple[Routing, RouterParts] | None:
    """The routing that a module spells, found by trying it on random tokens, and its parts; None if it has none."""
    k = getattr(module, "top_k", None)
    parts = _parts(module)
    if parts is None or type(k) is not int:
        return None
    linear = module.get_submodule(parts.linear)
    weight, bias = linear._parameters["weight"], linear._parameters.get("bias")
    count = 0 if weight is None else weight.shape[0]
    if not 0 < k <= count:
        return None
    random = np.random.default_rng(count)
    matrix, rows, offset, correction = (
        torch.from_numpy(random.normal(mean, size, shape)).float()
        for mean, size, shape in (
            (0.0, 0.5, (count, _WIDTH)), (0.0, 1.0, (_ROWS, _WIDTH)), (0.0, 0.5, count), (-0.5, 0.5, count),
        )
    )  # fmt: skip
    found = _weights(module, matrix, offset, rows, correction)
    if found is None:
        return None
    logits = F.linear(rows, matrix, None if bias is None else offset)
    for routing in _candidates(module, k, count):
        if torch.allclose(found, routing.plain(logits, correction), rtol=_TOLERANCE, atol=_TOLERANCE):
            return routing, parts
    return None


def _parts(module: nn.Module) -> RouterParts | None:
    """Where the weights are: one matrix, maybe with a bias, maybe one more vector; None for anything else."""
    held = dict(module.named_parameters())
    matrices = [name for name, value in held.items() if value.ndim == 2 and value.shape[0] > 1]
    if len(matrices) != 1 or len(dict(module.named_children())) > 2:
        return None
    linear, _, own = matrices[0].rpartition(".")
    child = module._modules.get(linear)
    plain = isinstance(child, nn.Linear) and type(child).forward is nn.Linear.forward
    if own != "weight" or (linear and not plain):
        return None
    count = held.pop(matrices[0]).shape[0]
    held.pop(f"{linear}.bias" if linear else "bias", None)
    if len(held) > 1 or any(value.numel() != count for value in held.values()):
        return None
    path = next(iter(held), "")
    if any(name not in (linear, path.partition(".")[0]) for name, _ in module.named_children()):
        return None
    return RouterParts(linear, path.partition(".")[0])


def _weights(module: nn.Module, matrix: Tensor, bias: Tensor, rows: Tensor, correction: Tensor) -> Tensor | None:
    """Weights of all experts [T, n] that a router with these weights gives; None if it gives something else."""

    def random(name: str, value: Tensor) -> Tensor:
        made = matrix if value.ndim == 2 and value.shape[0] > 1 else bias if name == "bias" else correction
        return made if value.ndim == made.ndim else made.view(value.shape)

    taken = inspect.signature(type(module).forward).parameters.values()
    more = (correction,)[: sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in taken) - 2]
    sizes = {name: _WIDTH for name in ("hidden_dim", "hidden_size") if name in vars(module)}
    for made in tried(module, random, (rows, *more), (rows.unsqueeze(0), *more), **sizes):
        if isinstance(made, tuple) and len(made) == 3 and all(isinstance(value, Tensor) for value in made):
            with contextlib.suppress(*CANNOT):
                return torch.zeros(len(rows), len(correction)).scatter_(-1, made[2], made[1].float())
    return None


def _candidates(module: nn.Module, k: int, count: int) -> Iterator[Routing]:
    scales = {1.0, *(float(v) for n, v in vars(module).items() if "scal" in n and isinstance(v, float | int))}
    scores: tuple[Literal["softmax", "sigmoid"], ...] = ("softmax", "sigmoid")
    corrected: tuple[Literal["", "scores", "logits"], ...] = ("", "scores", "logits")
    ways = itertools.product(_groups(module, k, count), scores, corrected, (True, False), sorted(scales))
    for groups, score, what, normal, scale in ways:
        yield Routing(k, normal, scale, score, what, groups)


def _groups(module: nn.Module, k: int, count: int) -> Iterator[Groups | None]:
    yield None
    groups, kept = getattr(module, "num_group", None), getattr(module, "topk_group", None)
    if type(groups) is not int or type(kept) is not int or groups < 2 or count % groups or not 0 < kept < groups:
        return
    for best in (1, 2):
        if best <= count // groups and k <= kept * (count // groups):
            yield Groups(groups, kept, best)
