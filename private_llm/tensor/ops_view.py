"""Rules that move elements and compute nothing: applied to every part of the share. All are local.

Sums and means; local for few entries (a mean carries its 1/n in the fractional bits until the next product). Means
hold wherever the mean does: sums are divided by powers of two before they can leave the ring.

With f fractional bits, values up to V = 2^(ring bits - 2 - 2 f) have room for a product, 2^f of them for a truncation.

1. an operand with surplus bits that leave too little room is truncated first;
2. more than 2^f entries are added in two steps, with a division by a power of two between them;
3. 1 / count has at most f bits after the point. Where that is too coarse, the sum is divided by a power of two first
   (one truncation of the results), so that a factor near 1 remains.

A power of two moves into the fractional bits and costs nothing. Error of 1 / count, relative: 2^-14 in a 64-bit ring
(18 fractional bits), 2^-f or 2^-9 in a 32-bit ring; and a few units of the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.tensor.dispatch import TorchArg, implements
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.scale import CONSTANT_BITS, dyadic, encoded
from private_llm.tensor.secret import SecretTensor


def _moved(method: Callable[..., Tensor], *ops: object) -> None:
    """Each part goes through `method`, with the other arguments of the call."""
    implements(*ops)(lambda x, *args, **kwargs: x.viewed(lambda part: method(part, *args, **kwargs)))


for _name in (
    "reshape", "transpose", "swapaxes", "permute", "t", "unsqueeze", "squeeze", "flatten", "unflatten", "expand",
    "broadcast_to", "repeat", "tile", "narrow", "select", "movedim", "flip", "roll", "diagonal", "tril", "triu",
):  # fmt: skip
    _moved(getattr(Tensor, _name), *(getattr(home, _name) for home in (Tensor, torch) if hasattr(home, _name)))
_moved(Tensor.t, Tensor.T.__get__)  # type: ignore[attr-defined]
_moved(lambda part, *_: part.transpose(-1, -2), Tensor.mT.__get__)  # type: ignore[attr-defined]
_moved(lambda part, other: part.reshape(other.shape), Tensor.view_as, Tensor.reshape_as)
_moved(lambda part, other: part.expand(other.shape), Tensor.expand_as)


@implements(Tensor.view)
def view(x: SecretTensor, *shape: TorchArg) -> SecretTensor:
    """`reshape`, for parts need not lie as the outer tensor says. Raises UnsupportedOp for a dtype."""
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        raise UnsupportedOp("view of a secret tensor as another dtype")
    return x.viewed(lambda part: part.reshape(*shape))


def _cut(method: Callable[..., Sequence[Tensor]], *ops: object) -> None:
    """Pieces of a secret, as `method` cuts its parts. Local."""

    def rule(x: SecretTensor, *args: TorchArg, **kwargs: TorchArg) -> tuple[SecretTensor, ...]:
        pieces = zip(*(method(part, *args, **kwargs) for part in x.value(masked=True).share.parts), strict=True)
        if x.hidden is None:
            return tuple(x.view_of_parts(parts) for parts in pieces)
        hidden = method(x.hidden, *args, **kwargs)
        return tuple(x.view_of_parts(parts, mask) for parts, mask in zip(pieces, hidden, strict=True))

    implements(*ops)(rule)


_cut(torch.chunk, Tensor.chunk, torch.chunk)
_cut(Tensor.split, Tensor.split)
_cut(torch.split, torch.split, torch.functional.split)
_cut(torch.unbind, Tensor.unbind, torch.unbind)
implements(Tensor.__iter__)(lambda x: iter(torch.unbind(x)))


@implements(torch.nn.functional.pad)
def pad(x: SecretTensor, pad: TorchArg, mode: str = "constant", value: float | None = None) -> SecretTensor:
    """Zeros around. Raises UnsupportedOp for another mode or value, and for entries that stand for minus infinity."""
    if mode != "constant" or value:
        raise UnsupportedOp(f"pad of a secret tensor with mode {mode!r}, value {value!r}; want zeros")
    out = x.viewed(lambda part: torch.nn.functional.pad(part, pad))
    out.value(full=True)
    return out


# -- sums and means ---------------------------------------------------------------------------------------------
Partial = Callable[[Tensor], Tensor]  # sums over a part of the entries; linear


def mean_of(x: SecretTensor, first: Partial, then: Partial, sizes: tuple[int, int], counts: int | Tensor) -> Fixed:
    """then(first(x)) / counts, where `first` and `then` add at most `sizes` entries each.

    `counts` is a number or a tensor that broadcasts to the result. Local up to 2^f entries (f fractional bits; a
    truncation of its results, 1 round, if `counts` is no small number or power of two). Beyond, one truncation of each
    sum of `first`; beyond 2^f entries in one step, one of every entry.
    """
    steps = [max(0, size - 1).bit_length() for size in sizes]
    value = x.value(full=True) if sum(steps) <= _room(x.value(full=True)) else x.to_fixed()
    if sum(steps) <= _room(value):
        return divided(value.view(lambda part: then(first(part))), counts)
    before = [max(0, bits - _room(value)) for bits in steps]
    between = steps[0] - before[0]
    value = _shifted(_shifted(value, before[0]).view(first), between)
    value = _shifted(value, before[1]).view(then)
    return divided(value, counts / 2.0 ** (before[0] + between + before[1]))


def divided(total: Fixed, counts: float | Tensor) -> Fixed:
    """Sums to means, total / counts; counts are positive numbers, or a tensor of them that broadcasts.

    A power of two is exact and local. Another factor is local while counts < 2^(room - 14) (room - 8 in a 32-bit ring),
    room = 2 f - frac bits, else 1 truncation of the results; errors as in the header. More fractional bits come out.
    """
    session = total.session
    largest = float(counts.max()) if isinstance(counts, Tensor) else float(counts)
    octave = max(0, math.frexp(largest)[1] - 1)
    if not isinstance(counts, Tensor) and math.frexp(largest)[0] == 0.5:
        return total.with_share(total.share, total.frac + math.frexp(largest)[1] - 1)
    room = _room(total)
    if largest >= 2.0 ** (room - (14 if session.ring.bits == 64 else 8)):
        total, room = _shifted(total, octave), session.frac
    else:
        octave = 0
    if isinstance(counts, Tensor):
        bits = min(CONSTANT_BITS, room)
        factors = encoded(total, 2.0**octave / counts.double(), bits)
        out = total.with_share(total.proto.mul_public(total.share, factors), total.frac + bits)
        return out if session.ring.bits == 64 else out.rescale(session.frac)
    factor = 2.0**octave / counts
    n, exponent = dyadic(factor, max(1, min(CONSTANT_BITS, room + math.frexp(factor)[1])))
    return total.with_share(total.scale_int(n).share, total.frac - exponent)


def _room(x: Fixed) -> int:
    """How many times a value of x may double before it leaves no room for a truncation."""
    return 2 * x.session.frac - x.frac


def _shifted(x: Fixed, bits: int) -> Fixed:
    """x / 2^bits with the session's fractional bits: one truncation, none for bits = 0."""
    return x.with_share(x.share, x.frac + bits).rescale(x.session.frac) if bits else x


AnyDims = int | Sequence[int] | None


def _dims(x: SecretTensor, dim: AnyDims) -> list[int]:
    every = range(x.ndim) if dim is None or (not isinstance(dim, int) and not dim) else dim
    return [every % max(1, x.ndim)] if isinstance(every, int) else sorted(d % x.ndim for d in every)


@implements(torch.sum, Tensor.sum)
def total(
    x: SecretTensor, dim: AnyDims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> SecretTensor:
    """Sum over dimensions; local.

    The sum must stay below the limit of a product (2^26 with 18 fractional bits, 64-bit ring). An operand with more
    than twice the session's fractional bits is truncated first (1 round).
    """
    value = x.value(full=True) if x.value(full=True).frac <= 2 * x.session.frac else x.to_fixed()
    return SecretTensor(value.sum(_dims(x, dim), keepdim))


@implements(torch.mean, Tensor.mean)
def mean(
    x: SecretTensor, dim: AnyDims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> SecretTensor:
    """Mean over dimensions, up to any number of entries (see the header): in rows of 2^f, then over these rows.

    Local for a power of two or at most 16 entries (18 fractional bits, 64-bit ring), else 1 truncation of the means;
    beyond 2^f entries one of each row's sum. Error: see the header.
    """
    dims = _dims(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    width = min(count, 1 << x.session.frac)
    outer = [size for d, size in enumerate(x.shape) if d not in dims]

    def rows(part: Tensor) -> Tensor:
        flat = part.movedim(dims, list(range(-len(dims), 0))).reshape(*outer, count)
        padded = torch.nn.functional.pad(flat, (0, -count % max(1, width)))
        return padded.reshape(*outer, -1, width).sum(-1, dtype=part.dtype)

    sizes = width, -(-count // max(1, width))
    made = mean_of(x, rows, lambda part: part.sum(-1, dtype=part.dtype), sizes, max(1, count))
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
    return SecretTensor(made.view(lambda part: part.reshape(shape)) if keepdim else made)
