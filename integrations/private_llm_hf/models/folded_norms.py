"""Norms without a weight of their own: the model owner puts it into the linear layers that read the norm.

With n(x) the normalised rows, g = weight + offset and h the norm's bias,

    W (g * n(x) + h) + b  =  (W diag(g)) n(x) + (W h + b)

so that a norm's second product, one secret element times another, is none. Which layers read which norms is part of a
model's description (`Folded`): a norm is folded into all of its readers or into none (checkpoint/norm_readers.py).
Layers without a bias get one where the norm has one. Weights are folded one by one, as they are streamed: what waits
are a norm's vectors, and the layers that come before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from private_llm.errors import DomainError, PatchMismatch
from private_llm_hf.checkpoint.weights import Sink
from private_llm_hf.models.norms import FoldedNorm, spelled_norm

Folded = Mapping[str, Sequence[str]]
"""Names of the layers that hold the weight of a norm, by the norm's name."""

NONE_FOLDED: Folded = MappingProxyType({})

_VECTORS = ("weight", "bias")
_ROWS = 1024
"""Rows of a weight that are multiplied with a norm's bias at once."""


@dataclass(frozen=True)
class NormFold:
    """One layer that takes up a norm. turned: its weight is [inputs, outputs], as GPT-2's."""

    norm: str
    layer: str
    offset: float
    turned: bool

    def apply(self, held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The layer's weights as the parties get them: at least in float32, sums in float64."""
        weight, shift = held[f"{self.layer}.weight"], held.get(f"{self.norm}.bias")
        factor = (held[f"{self.norm}.weight"].double() + self.offset).to(torch.promote_types(weight.dtype, torch.float))
        yield f"{self.layer}.weight", weight * (factor[:, None] if self.turned else factor)
        bias = held.get(f"{self.layer}.bias")
        if shift is not None:
            rows = (weight.t() if self.turned else weight).split(_ROWS)
            moved = torch.cat([part.double() @ shift.double() for part in rows])
            bias = moved if bias is None else moved + bias.double()
        if bias is not None:
            yield f"{self.layer}.bias", bias


def fold_norms(model: nn.Module, folded: Folded) -> tuple[NormFold, ...]:
    """Take the weights of these norms out of a module tree (structure only; values follow through `NormFolder`).

    Raises PatchMismatch for what is no norm with a weight, and for layers that cannot take it up.
    """
    folds: list[NormFold] = []
    modules = dict(model.named_modules())
    for name, readers in folded.items():
        module = modules.get(name)
        norm = None if module is None else spelled_norm(module)
        weight = getattr(module, "weight", None)
        if module is None or norm is None or weight is None or not readers:
            raise PatchMismatch(f"folded norms: '{name[:80]}' is no norm with a weight in this {type(model).__name__}")
        taken = sum(value.numel() for value in module.parameters())
        for reader in readers:
            layer = modules.get(reader)
            if any(fold.layer == reader for fold in folds) or _inputs(layer) != len(weight):
                raise PatchMismatch(f"folded norms: '{reader[:80]}' is no layer that could take up '{name}'")
            if isinstance(layer, nn.Linear) and layer.bias is None and getattr(module, "bias", None) is not None:
                layer.bias = nn.Parameter(torch.empty(layer.out_features, device="meta"), requires_grad=False)
                taken -= layer.out_features
            folds.append(NormFold(name, reader, norm.offset, isinstance(layer, Conv1D)))
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, FoldedNorm(norm, taken))
    return tuple(folds)


def _inputs(layer: nn.Module | None) -> int:
    """Entries of the rows that a layer takes, 0 for what is no linear layer."""
    if isinstance(layer, nn.Linear):
        return layer.in_features
    return len(layer.weight) if isinstance(layer, Conv1D) else 0


class NormFolder:
    """A sink before a sink: passes on the weights of layers with those of the norms that they read in them.

    known: the weights that come.
    """

    def __init__(self, folds: Sequence[NormFold], known: set[str], sink: Sink) -> None:
        self._sink = sink
        self._vectors = {f"{fold.norm}.{own}" for fold in folds for own in _VECTORS} & known
        self._held: dict[str, Tensor] = {}
        self._needs: dict[NormFold, set[str]] = {}
        self._waiting: dict[str, list[NormFold]] = {}
        for fold in folds:
            names = {f"{path}.{own}" for path in (fold.norm, fold.layer) for own in _VECTORS} & known
            self._needs[fold] = names
            for name in names:
                self._waiting.setdefault(name, []).append(fold)

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Take one tensor of the checkpoint. Raises DomainError for a norm's vector with NaN or infinity."""
        if name in self._vectors and not bool(torch.isfinite(tensor).all()):
            raise DomainError(f"weight '{name}': it holds NaN or infinity; want finite numbers")
        folds = self._waiting.pop(name, None)
        if folds is None:
            self._sink(name, tensor)
            return
        self._held[name] = tensor.detach().cpu()
        for fold in folds:
            needs = self._needs[fold]
            if needs <= self._held.keys():
                for made, value in fold.apply({need: self._held[need] for need in needs}):
                    self._sink(made, value)
                for own in needs - self._vectors:
                    del self._held[own]
