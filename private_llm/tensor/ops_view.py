"""Rules that move elements and compute nothing: applied to every part of the share. All are local.

Sums and means; local for few entries (a mean carries its 1/n in the fractional bits until the next product).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.tensor.dispatch import TorchArg, implements
from private_llm.tensor.means import mean_of
from private_llm.tensor.secret import SecretTensor


def _register(method: Callable[..., Tensor], *ops: object) -> None:
    def rule(x: SecretTensor, *args: TorchArg, **kwargs: TorchArg) -> SecretTensor:
        return x.viewed(lambda part: method(part, *args, **kwargs))

    rule.__name__ = method.__name__
    implements(*ops)(rule)


# `view` becomes `reshape`: parts need not be contiguous where the outer tensor says so.
_register(Tensor.reshape, Tensor.reshape, torch.reshape)
_register(Tensor.transpose, Tensor.transpose, torch.transpose, torch.swapaxes, Tensor.swapaxes)
_register(Tensor.permute, Tensor.permute, torch.permute)
_register(Tensor.t, Tensor.t, torch.t, Tensor.T.__get__)  # type: ignore[attr-defined]
_register(Tensor.unsqueeze, Tensor.unsqueeze, torch.unsqueeze)
_register(Tensor.squeeze, Tensor.squeeze, torch.squeeze)
_register(Tensor.flatten, Tensor.flatten, torch.flatten)
_register(Tensor.unflatten, Tensor.unflatten, torch.unflatten)
_register(Tensor.expand, Tensor.expand)
_register(Tensor.broadcast_to, Tensor.broadcast_to, torch.broadcast_to)
_register(Tensor.repeat, Tensor.repeat)
_register(Tensor.tile, Tensor.tile, torch.tile)
_register(Tensor.narrow, Tensor.narrow, torch.narrow)
_register(Tensor.select, Tensor.select, torch.select)
_register(Tensor.movedim, Tensor.movedim, torch.movedim)
_register(Tensor.flip, Tensor.flip, torch.flip)
_register(Tensor.roll, Tensor.roll, torch.roll)
_register(Tensor.diagonal, Tensor.diagonal, torch.diagonal)
_register(Tensor.tril, Tensor.tril, torch.tril)
_register(Tensor.triu, Tensor.triu, torch.triu)


@implements(Tensor.mT.__get__)  # type: ignore[attr-defined]
def matrix_transpose(x: SecretTensor, *_: object) -> SecretTensor:
    """Swap the last two dimensions. Local, as all here."""
    return x.viewed(lambda part: part.transpose(-1, -2))


@implements(Tensor.view)
def view(x: SecretTensor, *shape: TorchArg) -> SecretTensor:
    """Another shape. Raises UnsupportedOp for a dtype instead of a shape."""
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise UnsupportedOp("view of a secret tensor as another dtype")
    return x.viewed(lambda part: part.reshape(*shape))


@implements(Tensor.view_as, Tensor.reshape_as)
def view_as(x: SecretTensor, other: Tensor) -> SecretTensor:
    """The shape of another tensor."""
    shape = other.shape
    return x.viewed(lambda part: part.reshape(shape))


@implements(Tensor.expand_as)
def expand_as(x: SecretTensor, other: Tensor) -> SecretTensor:
    """Broadcast to the shape of another tensor."""
    shape = other.shape
    return x.viewed(lambda part: part.expand(shape))


@implements(Tensor.detach, torch.detach)
def detach(x: SecretTensor) -> SecretTensor:
    """The same shares in a new object."""
    return x.viewed(lambda part: part)


def _pieces(x: SecretTensor, cut: Callable[[Tensor], Sequence[Tensor]]) -> tuple[SecretTensor, ...]:
    pieces = zip(*(cut(part) for part in x.value(masked=True).share.parts), strict=True)
    if x.hidden is None:
        return tuple(x.view_of_parts(parts) for parts in pieces)
    return tuple(x.view_of_parts(parts, hidden) for parts, hidden in zip(pieces, cut(x.hidden), strict=True))


@implements(Tensor.chunk, torch.chunk)
def chunk(x: SecretTensor, chunks: int, dim: int = 0) -> tuple[SecretTensor, ...]:
    """`chunks` pieces (or fewer) along a dimension, as torch.chunk. Local."""
    return _pieces(x, lambda part: part.chunk(chunks, dim))


@implements(Tensor.split, torch.split, torch.functional.split)
def split(x: SecretTensor, split_size: int | list[int], dim: int = 0) -> tuple[SecretTensor, ...]:
    """Pieces of `split_size` (or of these sizes) along a dimension. Local."""
    return _pieces(x, lambda part: torch.split(part, split_size, dim))


@implements(Tensor.unbind, torch.unbind)
def unbind(x: SecretTensor, dim: int = 0) -> tuple[SecretTensor, ...]:
    """Slices along a dimension, which disappears."""
    return _pieces(x, lambda part: part.unbind(dim))


@implements(Tensor.__iter__)
def iterate(x: SecretTensor) -> TorchArg:
    """Slices along the first dimension."""
    return iter(unbind(x))


@implements(torch.nn.functional.pad)
def pad(x: SecretTensor, pad: TorchArg, mode: str = "constant", value: float | None = None) -> SecretTensor:
    """Zeros around. Raises UnsupportedOp for another mode or value, and for entries that stand for minus infinity."""
    if mode != "constant" or value:
        raise UnsupportedOp(f"pad of a secret tensor with mode {mode!r}, value {value!r}; want zeros")
    out = x.viewed(lambda part: torch.nn.functional.pad(part, pad))
    out.value(full=True)
    return out


Dims = int | Sequence[int] | None


def _dims(x: SecretTensor, dim: Dims) -> list[int]:
    every = range(x.ndim) if dim is None or (not isinstance(dim, int) and not dim) else dim
    return [every % max(1, x.ndim)] if isinstance(every, int) else sorted(d % x.ndim for d in every)


@implements(torch.sum, Tensor.sum)
def total(
    x: SecretTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> SecretTensor:
    """Sum over dimensions; local.

    The sum must stay below the limit of a product (2^26 with 18 fractional bits, 64-bit ring). An operand with more
    than twice the session's fractional bits is truncated first (1 round).
    """
    value = x.value(full=True) if x.value(full=True).frac <= 2 * x.session.frac else x.to_fixed()
    return SecretTensor(value.sum(_dims(x, dim), keepdim))


@implements(torch.mean, Tensor.mean)
def mean(x: SecretTensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> SecretTensor:
    """Mean over dimensions, up to any number of entries (means.py): in rows of 2^f, then over these rows.

    Local for a power of two or at most 16 entries (18 fractional bits, 64-bit ring), else 1 truncation of the means;
    beyond 2^f entries one of each row's sum. Error: means.py.
    """
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    width = min(count, 1 << x.session.frac)
    outer = [size for d, size in enumerate(x.shape) if d not in dims]

    def rows(part: Tensor) -> Tensor:
        flat = part.movedim(dims, list(range(-len(dims), 0))).reshape(*outer, count)
        padded = torch.nn.functional.pad(flat, (0, -count % max(1, width)))
        return padded.reshape(*outer, -1, width).sum(-1, dtype=part.dtype)

    def over_rows(part: Tensor) -> Tensor:
        return part.sum(-1, dtype=part.dtype)

    made = mean_of(x, rows, over_rows, (width, -(-count // max(1, width))), max(1, count))
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
    return SecretTensor(made.view(lambda part: part.reshape(shape)) if keepdim else made)
