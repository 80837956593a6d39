"""Norms that the model owner folds into layers before anything is shared, weight by weight, as they are streamed.

A norm before linear layers: with n(x) the normalised rows, g = weight + offset and h the norm's bias,

    W (g * n(x) + h) + b  =  (W diag(g)) n(x) + (W h + b)

so that one secret element times another is saved. A norm is folded into all of its readers or into none
(checkpoint/norm_readers.py), which a model's description says (`Folded`). Layers get a bias where the norm has one.

A batch norm in inference is one factor and one addend per channel, y = (x - mean) / sqrt(var + eps) * gain + shift.
Both go into the layer before it, W' = factor * W and b' = factor * (b - mean) + shift; without one, the parties get
factor and addend: one product per element. Statistics never leave the owner; public structure says which.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers.pytorch_utils import Conv1D

from private_llm.errors import DomainError, PatchMismatch
from private_llm_hf.checkpoint.weights import STATISTICS, Sink
from private_llm_hf.models.architectures import table
from private_llm_hf.models.norms import FoldedNorm, spelled_norm
from private_llm_hf.vision.network import Network

Folded = Mapping[str, Sequence[str]]  # names of the layers that hold the weight of a norm, by the norm's name

NONE_FOLDED: Folded = MappingProxyType({})

_VECTORS = ("weight", "bias")
_STATED = (*_VECTORS, *STATISTICS)
_ROWS = 1024  # rows of a weight that are multiplied with a norm's bias at once


@dataclass(frozen=True)
class NormFold:
    """One layer that takes up a norm. turned: its weight is [inputs, outputs], as GPT-2's."""

    norm: str
    layer: str
    offset: float
    turned: bool

    @property
    def inputs(self) -> set[str]:
        """The weights that have to be there, of those that a checkpoint holds."""
        return {f"{path}.{own}" for path in (self.norm, self.layer) for own in _VECTORS}

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
    """Take these norms' weights out (values follow through `Folder`). Raises PatchMismatch where a fold cannot be."""
    folds: list[NormFold] = []
    modules = dict(model.named_modules())
    for name, readers in folded.items():
        module = modules.get(name)
        norm = None if module is None else spelled_norm(module)
        weight = getattr(module, "weight", None)
        if module is None or norm is None or weight is None or not readers:
            raise PatchMismatch(f"folded norms: the model lacks norm '{name[:80]}' with a weight; share it again")
        taken = sum(value.numel() for value in module.parameters())
        for reader in readers:
            layer = modules.get(reader)
            if any(fold.layer == reader for fold in folds) or _inputs(layer) != len(weight):
                raise PatchMismatch(f"folded norms: layer '{reader[:80]}' cannot take up '{name}'; share it again")
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


# -- batch norms -------------------------------------------------------------------------------------------------------
class FoldedBatchNorm(nn.Identity):
    """What is left of a norm whose work the layer before it does."""


class PrivateBatchNorm(nn.Module):
    """x * weight + bias per channel (dimension 1), where no layer could take the norm up."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, device="meta"), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels, device="meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Any [B, C, ...]."""
        shape = (1, -1, *[1] * (x.ndim - 2))
        return x * self.weight.reshape(shape) + self.bias.reshape(shape)


@dataclass(frozen=True)
class Fold:
    """One norm: its name, its eps, its number of channels, and the layer that takes it up (None: no layer does)."""

    norm: str
    eps: float
    channels: int
    before: str | None

    @property
    def inputs(self) -> set[str]:
        """The weights that have to be there, of those that a checkpoint holds."""
        layer = () if self.before is None else (f"{self.before}.weight", f"{self.before}.bias")
        return {*(f"{self.norm}.{vector}" for vector in _STATED), *layer}

    def apply(self, held: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The weights that the parties get, in float64."""
        one, zero = torch.ones(self.channels, dtype=torch.float64), torch.zeros(self.channels, dtype=torch.float64)
        gain, shift, mean, var = (
            held[f"{self.norm}.{vector}"].to(torch.float64) if f"{self.norm}.{vector}" in held else default
            for vector, default in zip(_STATED, (one, zero, zero, one), strict=True)
        )
        factor = gain / torch.sqrt(var + self.eps)
        if self.before is None:
            yield f"{self.norm}.weight", factor
            yield f"{self.norm}.bias", shift - factor * mean
            return
        weight = held[f"{self.before}.weight"].to(torch.float64)
        bias = held.get(f"{self.before}.bias", zero).to(torch.float64)
        yield f"{self.before}.weight", weight * factor.reshape(-1, *[1] * (weight.ndim - 1))
        yield f"{self.before}.bias", factor * (bias - mean) + shift


def fold_batch_norms(model: nn.Module) -> tuple[Fold, ...]:
    """Replace all batch norms (weights follow through `Folder`). Raises PatchMismatch for those without statistics."""
    layers = _layers_before(model)
    folds = []
    for name, norm in list(model.named_modules()):
        if not isinstance(norm, _BatchNorm):
            continue
        if norm.running_mean is None or norm.running_var is None:
            raise PatchMismatch(f"{name}: a batch norm without running statistics; want track_running_stats=True")
        before = layers.get(name)
        if before is not None:
            layer = model.get_submodule(before)
            if layer.bias is None:
                layer.bias = nn.Parameter(torch.empty(norm.num_features, device="meta"), requires_grad=False)
        folds.append(Fold(name, norm.eps, norm.num_features, before))
        parent, _, own = name.rpartition(".")
        made = FoldedBatchNorm() if before is not None else PrivateBatchNorm(norm.num_features)
        setattr(model.get_submodule(parent), own, made)
    return tuple(folds)


def _layers_before(model: nn.Module) -> dict[str, str]:
    """Norms and the layers whose outputs they normalise: from a network's steps, or by the families' naming."""
    if isinstance(model, Network):
        found = model.layers_before()
    else:
        found = {}
        for names, pair in table("batch_norms").items():
            layer, norm = pair.split()
            for path, module in model.named_modules():
                if re.fullmatch(names, type(module).__name__) and norm in module._modules:
                    found[f"{path}.{norm}" if path else norm] = f"{path}.{layer}" if path else layer
    modules = dict(model.named_modules())
    outputs = {name: module.out_channels for name, module in modules.items() if isinstance(module, nn.Conv2d)}
    outputs |= {name: module.out_features for name, module in modules.items() if isinstance(module, nn.Linear)}
    channels = {name: module.num_features for name, module in modules.items() if isinstance(module, _BatchNorm)}
    return {norm: layer for norm, layer in found.items() if channels.get(norm, 0) == outputs.get(layer)}


# -- weights on their way ----------------------------------------------------------------------------------------------
class Folder:
    """A sink before a sink: of `known` weights it holds those of each fold till all have come, and passes results."""

    def __init__(self, folds: Sequence[Fold | NormFold], known: set[str], sink: Sink) -> None:
        self._sink = sink
        self._vectors = {f"{fold.norm}.{own}" for fold in folds if isinstance(fold, NormFold) for own in _VECTORS}
        self._needs = {fold: fold.inputs & known for fold in folds}
        self._waiting: dict[str, list[Fold | NormFold]] = {}
        for fold, names in self._needs.items():
            for name in names:
                self._waiting.setdefault(name, []).append(fold)
        self._held: dict[str, Tensor] = {}

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
                for made, value in fold.apply(self._held):
                    self._sink(made, value)
                for own in needs - self._vectors:  # a norm's vectors go into several layers
                    del self._held[own]
