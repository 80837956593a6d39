"""Batch normalisation at load: folded by the model owner into the layer before it, before anything is shared.

In inference y = (x - mean) / sqrt(var + eps) * gain + shift is one factor and one addend per channel. After a
convolution or linear layer both go into its weights, W' = factor * W and b' = factor * (b - mean) + shift, and the
norm costs nothing. Elsewhere the parties get factor and addend: one product per element. Either way statistics never
leave the owner, and the parties know from the public structure alone which case is which.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from private_llm.errors import PatchMismatch
from private_llm_hf.checkpoint.weights import STATISTICS, Sink
from private_llm_hf.models.architectures import table
from private_llm_hf.vision.network import Network

_VECTORS = ("weight", "bias", *STATISTICS)


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

    def inputs(self, known: set[str]) -> list[str]:
        """The weights that have to be there, of those that a checkpoint holds."""
        names = [f"{self.norm}.{vector}" for vector in _VECTORS]
        if self.before is not None:
            names += [f"{self.before}.weight", f"{self.before}.bias"]
        return [name for name in names if name in known]

    def apply(self, held: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The weights that the parties get, in float64."""
        one, zero = torch.ones(self.channels, dtype=torch.float64), torch.zeros(self.channels, dtype=torch.float64)
        gain, shift, mean, var = (
            held[f"{self.norm}.{vector}"].to(torch.float64) if f"{self.norm}.{vector}" in held else default
            for vector, default in zip(_VECTORS, (one, zero, zero, one), strict=True)
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
    """Replace every batch norm of a module tree (structure only; weights follow through `Folder`).

    Raises PatchMismatch for norms without running statistics.
    """
    layers = _layers_before(model)
    folds = []
    for name, norm in list(model.named_modules()):
        if not isinstance(norm, _BatchNorm):
            continue
        if norm.running_mean is None or norm.running_var is None:
            raise PatchMismatch(f"{name}: a batch norm without running statistics normalises by the batch; no rule")
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


def _takes_up(layer: nn.Module, norm: nn.Module) -> bool:
    """Whether a layer's weights can hold a norm: one output per channel."""
    if not isinstance(layer, nn.Conv2d | nn.Linear) or not isinstance(norm, _BatchNorm):
        return False
    return norm.num_features == (layer.out_channels if isinstance(layer, nn.Conv2d) else layer.out_features)


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
    return {norm: layer for norm, layer in found.items() if _takes_up(modules[layer], modules[norm])}


class Folder:
    """A sink before a sink: holds the few tensors of a norm and its layer until all have come, then passes on."""

    def __init__(self, folds: tuple[Fold, ...], known: set[str], sink: Sink) -> None:
        self._sink = sink
        self._needs = {fold: fold.inputs(known) for fold in folds}
        self._fold = {name: fold for fold, names in self._needs.items() for name in names}
        self._held: dict[Fold, dict[str, Tensor]] = {}

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Take one tensor of the checkpoint."""
        fold = self._fold.get(name)
        if fold is None:
            self._sink(name, tensor)
            return
        held = self._held.setdefault(fold, {})
        held[name] = tensor.detach().cpu()
        if len(held) == len(self._needs[fold]):
            del self._held[fold]
            for made, value in fold.apply(held):
                self._sink(made, value)
