"""What a hand-spelled norm computes, found by trying it: model families differ in class names, not in formulas.

A copy of the module gets random weights and random rows, and its results are compared with the formulas that private
norms know. A module that computes anything else is none of them, whatever it is called.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from private_llm.nn.modules import PrivateLayerNorm, PrivateRMSNorm

_WIDTH = 16  # entries of the rows that a norm without weights is tried on

_SIZES = (3.0, 3.0, 1.0, 0.05, 0.01, 0.002)  # rows so small that what is added to the variance shows

_TOLERANCE = 1e-4  # relative: families round in different places

_USUAL = (1e-5, 1e-6)  # what a family may add to the variance without saying so

_PYTORCH_S = (nn.LayerNorm.forward, nn.RMSNorm.forward, nn.Module.forward)

CANNOT = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError)  # of modules that cannot run so


@dataclass(frozen=True)
class Norm:
    """A norm over the last dimension: of the root mean square, or of mean and variance; `offset` goes to its weight."""

    kind: Literal["rms", "layer"]
    eps: float
    offset: float

    def private(self, module: nn.Module) -> nn.Module:
        """The private module with the weights of `module`."""
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if self.kind == "rms":
            return PrivateRMSNorm(weight, self.eps, self.offset)
        return PrivateLayerNorm(weight, bias, self.eps, self.offset)

    def plain(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The formula itself."""
        if self.kind == "rms":
            out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        else:
            out = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        out = out if weight is None else out * (weight + self.offset)
        return out if bias is None else out + bias


class FoldedNorm(nn.Module):
    """A norm without weight and bias, in whose place parties put theirs. taken: weights that it lost to no layer."""

    def __init__(self, norm: Norm, taken: int) -> None:
        super().__init__()
        self.norm, self.taken = norm, taken

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise [.., H]; same shape."""
        return self.norm.plain(hidden_states, None, None)


def spelled_norm(module: nn.Module) -> Norm | None:
    """The norm that a module computes, spelled by hand or by PyTorch; None for another module."""
    if type(module) in (nn.LayerNorm, nn.RMSNorm) and len(module.normalized_shape) == 1:  # type: ignore[arg-type]
        eps = torch.finfo(torch.float32).eps if module.eps is None else float(module.eps)  # type: ignore[arg-type]
        return Norm("layer" if isinstance(module, nn.LayerNorm) else "rms", eps, 0.0)
    return norm_of(module)


def norm_of(module: nn.Module) -> Norm | None:
    """The norm that a module spells by hand, or None: it is another module, or one that PyTorch spells."""
    if isinstance(module, FoldedNorm):
        return module.norm
    if type(module).forward in _PYTORCH_S or isinstance(module, nn.GroupNorm) or any(True for _ in module.children()):
        return None
    held = {name: value for name, value in module._parameters.items() if value is not None}
    sizes = {tuple(value.shape) for value in held.values()}
    if not set(held) <= {"weight", "bias"} or len(sizes) > 1 or any(len(size) != 1 for size in sizes):
        return None
    width = next(iter(sizes))[0] if sizes else _width(module)
    if width is None or width < 2:
        return None
    random = np.random.default_rng(width)
    made = {name: torch.from_numpy(random.uniform(0.5, 1.5, width)).float() for name in held}
    rows = torch.from_numpy(random.normal(0.01, 1.0, (len(_SIZES), width))).float() * torch.tensor(_SIZES)[:, None]
    found = next(tried(module, lambda name, _: made[name], (rows,)), None)
    if not isinstance(found, Tensor) or found.shape != rows.shape or not found.is_floating_point():
        return None
    for norm in _candidates(module):
        wanted = norm.plain(rows, made.get("weight"), made.get("bias"))
        if torch.allclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
            return norm
    return None


def _width(module: nn.Module) -> int | None:
    stated = getattr(module, "normalized_shape", None)
    if isinstance(stated, tuple | list | torch.Size):
        return int(stated[0]) if len(stated) == 1 else None
    return _WIDTH if _own_numbers(module) else None


def tried(
    module: nn.Module, weights: Callable[[str, Tensor], Tensor], *calls: tuple[Tensor, ...],
    **settings: object,
) -> Iterator[object]:  # fmt: skip
    """What a copy of a module makes of each argument. weights: other values by name and value. settings: attributes."""
    copied = copy.copy(module)
    copied._modules = {name: copy.copy(child) for name, child in module._modules.items()}
    for holder in (copied, *copied.children()):
        holder._parameters = {
            name: None if value is None else nn.Parameter(weights(name, value), requires_grad=False)
            for name, value in holder._parameters.items()
        }
    vars(copied).update(settings)
    forward: Callable[..., object] = type(module).forward.__get__(copied)
    for given in calls:
        try:
            with torch.no_grad():
                made = forward(*(value.clone() for value in given))
        except CANNOT:
            continue
        yield made


def _candidates(module: nn.Module) -> Iterator[Norm]:
    for eps in (*_own_numbers(module), *_USUAL):
        for kind in ("rms", "layer"):
            for offset in (0.0, 1.0):
                yield Norm(kind, eps, offset)


def _own_numbers(module: nn.Module) -> list[float]:
    """Numbers of a module that may be what is added to the variance."""
    return [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 0.1]
