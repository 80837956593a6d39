"""Where a model can be sparse: its feed-forward and attention blocks, found by one run of the model.

A run notes every linear layer and every activation with what it received and returned. Inside numbered layers, a
feed-forward block is an activation whose input is the output of a linear layer (FC1, gate), with the linear layers of
the same input and width that ran beside it (up), and the next layer that takes its width (FC2, down). An attention
block is the outermost module below the layer whose class is called attention; the first linear layer that ran inside it
received the block's input (q, or q, k and v in one), the last one projects the heads. So names of modules do not
matter. Blocks that fuse gate and up into one layer, and experts that are no modules, are not found.
"""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from private_llm.errors import PatchMismatch, refuse_unknown
from private_llm_hf.checkpoint.sample_inputs import evaluating
from private_llm_hf.sparsity.settings import Kind

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
_NO_ACTIVATION = (nn.Dropout, nn.Identity)


@dataclass(frozen=True)
class Site:
    """One feed-forward or attention block. Names are those of modules.

    name: of the first reader, unique in a model. layer: number of the layer in its stack. width: of the block's input.
    units: neurons or heads. readers: linear layers that receive the input (FC1; gate, up; q, k, v). writer: the linear
    layer after the units (FC2, down, the output projection). activation: of neurons, None for heads.
    """

    name: str
    kind: Kind
    layer: int
    width: int
    units: int
    readers: tuple[str, ...]
    writer: str
    activation: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "readers": list(self.readers)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Site":
        """Raises ConfigError for unknown keys, TypeError for missing ones."""
        refuse_unknown(values, cls.__dataclass_fields__, "site: ")
        return cls(**{**values, "readers": tuple(values["readers"])})


@dataclass(frozen=True)
class _LeafCall:
    """One call of a leaf: what it is, what it received and returned (kept, so that identity means something)."""

    what: Literal["linear", "activation"]
    name: str
    received: Tensor
    returned: Tensor


def find_sites(
    model: PreTrainedModel, inputs: Mapping[str, Any], kinds: tuple[Kind, ...] = ("ffn", "heads")
) -> list[Site]:
    """All sites of these kinds as they run, in one call with `inputs` (short ones do); not of activations without
    zeros. Raises PatchMismatch if there are none of a kind.
    """
    calls = _watch(model, inputs)
    found: list[Site] = []
    if "ffn" in kinds:
        found += _feed_forward(model, calls)
    if "heads" in kinds:
        found += _attention(model, calls)
    order = {call.name: place for place, call in reversed(list(enumerate(calls)))}
    return sorted(found, key=lambda site: order[site.name])


def activations_of(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[tuple[Site, nn.Module]]:
    """Every feed-forward block with its activation. Raises PatchMismatch where one module serves several layers."""
    return [(site, model.get_submodule(str(site.activation))) for site in _blocks(model, _watch(model, inputs))]


def _watch(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[_LeafCall]:
    """Calls of linear layers and of whatever may be an activation, in order, in one run without gradients."""
    calls: list[_LeafCall] = []

    def hook(name: str, what: Literal["linear", "activation"]) -> Any:  # noqa: ANN401 - a hook
        def note(_: nn.Module, received: tuple[Any, ...], returned: Any) -> None:  # noqa: ANN401
            if received and isinstance(received[0], Tensor) and isinstance(returned, Tensor):
                calls.append(_LeafCall(what, name, received[0], returned))

        return note

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | Conv1D):
                stack.callback(module.register_forward_hook(hook(name, "linear")).remove)
            elif _may_activate(module):
                stack.callback(module.register_forward_hook(hook(name, "activation")).remove)
        stack.enter_context(evaluating(model))
        model(**inputs)
    return calls


def _may_activate(module: nn.Module) -> bool:
    leaf = not any(True for _ in module.children())
    weightless = not any(True for _ in module.parameters()) and not any(True for _ in module.buffers())
    return leaf and weightless and not isinstance(module, _NO_ACTIVATION)


def _feed_forward(model: PreTrainedModel, calls: list[_LeafCall]) -> list[Site]:
    blocks = _blocks(model, calls)
    sparse = [site for site in blocks if zeroes(model.get_submodule(str(site.activation)))]
    if not sparse:
        names = sorted({type(model.get_submodule(str(site.activation))).__name__ for site in blocks})
        raise PatchMismatch(
            f"{type(model).__name__}: no feed-forward block whose activation makes exact zeros (found: "
            f"{', '.join(names) or 'no activation after a linear layer'}); want ReLU or one of its relatives: "
            "scripts/relufy.py of the repository swaps GELU and SiLU for one and tunes the model"
        )
    return sparse


def _blocks(model: PreTrainedModel, calls: list[_LeafCall]) -> list[Site]:
    found: dict[str, Site] = {}
    makers = {id(call.returned): call for call in calls if call.what == "linear"}
    for place, call in enumerate(calls):
        first = makers.get(id(call.received))
        if call.what != "activation" or first is None or _layer(call.name) is None or first.name in found:
            continue
        units = call.returned.shape[-1]
        beside = [
            other.name
            for other in calls
            if other.what == "linear"
            and other.received is first.received
            and other.returned.shape[-1] == units
            and _attention_above(model, other.name) is None  # parallel blocks read the same input
        ]
        after = (
            other.name
            for other in calls[place:]
            if other.what == "linear" and other.received.shape[-1] == units and other.received is not first.received
        )
        writer = next(after, None)
        if writer is None or _layer(writer) != _layer(first.name):
            continue
        readers = (first.name, *(name for name in dict.fromkeys(beside) if name != first.name))
        found[first.name] = Site(
            first.name, "ffn", _layer(first.name) or 0, first.received.shape[-1], units, readers, writer, call.name
        )
    shared = [site.activation for site in found.values()]
    twice = sorted({str(name) for name in shared if shared.count(name) > 1})
    if twice:
        raise PatchMismatch(
            f"{type(model).__name__}: the activation {', '.join(twice)} serves several linear layers, so its zeros "
            "cannot be told apart; give every layer a module of its own"
        )
    return list(found.values())


def _attention(model: PreTrainedModel, calls: list[_LeafCall]) -> list[Site]:
    groups: dict[str, list[_LeafCall]] = {}
    for call in calls:
        inside = _attention_above(model, call.name) if call.what == "linear" else None
        if inside is not None:
            groups.setdefault(inside, []).append(call)
    found = []
    for group in groups.values():
        first, last = group[0], group[-1]
        width, heads = last.received.shape[-1], _heads(model, first.name)
        if not isinstance(heads, int) or first.name == last.name or width % heads:
            continue
        readers = [call.name for call in group if call.received is first.received and call.name != last.name]
        layer = _layer(first.name) or 0
        names = tuple(dict.fromkeys(readers))
        found.append(Site(first.name, "heads", layer, first.received.shape[-1], heads, names, last.name))
    if not found:
        raise PatchMismatch(
            f"{type(model).__name__}: no attention block with linear layers before and after its heads; "
            "ask for kinds=('ffn',)"
        )
    return found


def _heads(model: PreTrainedModel, name: str) -> object:
    """How many heads the attention module of this layer says it has, or else the configuration."""
    module = model.get_submodule(name.rpartition(".")[0])
    said = (getattr(module, own, None) for own in ("num_attention_heads", "num_heads", "n_heads"))
    found = next((count for count in said if isinstance(count, int)), None)
    return getattr(model.config, "num_attention_heads", None) if found is None else found


def _layer(name: str) -> int | None:
    """The number of the layer that a module lies in."""
    found = _NUMBER.search(name)
    return int(found.group(1)) if found else None


def _attention_above(model: PreTrainedModel, name: str) -> str | None:
    """The outermost module of a numbered layer that holds this one and whose class is called attention."""
    found = _NUMBER.search(name)
    parts = name.split(".")
    if found is None:
        return None
    for end in range(name[: found.end()].count(".") + 2, len(parts)):
        path = ".".join(parts[:end])
        if "attention" in type(model.get_submodule(path)).__name__.lower():
            return path
    return None


# -- Activations that make exact zeros, and the two that transformers has no name for ---------------------------------
class ShiftedReLU(nn.Module):
    """relu(x - shift) (Mirzadeh et al., *ReLU Strikes Back*, section 5.3): sparser than ReLU from the start."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        """Element by element."""
        return (x - self.shift).relu()

    def extra_repr(self) -> str:
        """The shift."""
        return f"shift={self.shift}"


class ReLULinear(nn.Linear):
    """A linear layer with a ReLU after it, dReLU's up projection; weights have the names of the layer it replaces."""

    def forward(self, x: Tensor) -> Tensor:
        """relu(x W^T + b)."""
        return super().forward(x).relu()

    @classmethod
    def of(cls, layer: nn.Linear) -> "ReLULinear":
        """With the same parameters, not copies of them."""
        made = cls(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        made.weight, made.bias = layer.weight, layer.bias
        return made


def zeroes(activation: nn.Module) -> bool:
    """Whether an activation is exactly zero from -8 to -1, as ReLU and its relatives are and GELU and SiLU are not."""
    with torch.no_grad():
        return not bool(activation(torch.linspace(-8.0, -1.0, 29)).any())
