"""Products with public values that do not truncate yet: the scale moves into the fractional bits.

A power of two costs nothing and loses nothing (value = ring / 2^frac, so only `frac` changes). Any other
factor is held as an integer of at most `CONSTANT_BITS` bits times a power of two; the product keeps the
extra fractional bits until some rule needs an operand without them (`SecretTensor.to_operand()`), which then
truncates once. So RoPE (x cos + rotated(x) sin) truncates once per tensor, not twice, and `q * head_dim**-0.5`
for a head size that is a power of four never does.
"""

import math
from collections import OrderedDict
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels.trace_hook import this_thread
from private_llm.protocols.session import Session
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SLACK, SecretTensor, same_session

CONSTANT_BITS = 16  # bits of a public factor: relative error at most 2^-16 (scalars), absolute error 2^-17 (tensors)

_CACHED = 16


def dyadic(factor: float, bits: int) -> tuple[int, int]:
    """(n, e), factor ~ n * 2^e, n odd or 0, |n| < 2^bits: relative error <= 2^-bits. Raises DomainError if infinite."""
    if not math.isfinite(factor):
        raise DomainError(f"a secret tensor meets the constant {factor}; want a finite number")
    mantissa, exponent = math.frexp(factor)
    n, exponent = round(mantissa * (1 << bits)), exponent - bits
    while n and n % 2 == 0:
        n, exponent = n // 2, exponent + 1
    return (n, exponent) if n else (0, 0)


def _scalar(session: Session, factor: float) -> tuple[int, int]:
    """(n, e) with factor ~ n * 2^e; in a small ring n has no more bits after the point than a weight."""
    _, exponent = math.frexp(factor) if math.isfinite(factor) else (0.0, 0)
    n, e = dyadic(factor, CONSTANT_BITS)
    if session.ring.bits == 32 and abs(n) != 1:
        n, e = dyadic(factor, max(1, session.frac + exponent))
    return (n, e) if -e <= session.ring.value_bits else (0, 0)  # the product is below one unit


def times_scalar(x: SecretTensor, factor: float) -> Fixed:
    """x * factor, truncating at most what an earlier product left over (1 round); local where it left nothing.

    Relative error 2^-16 of the factor (64-bit ring). Holds for |x| < 2^(ring bits - 2 - 2 f) and a product below it, f
    >= 16 (64 bits) fractional bits; with fewer, for |x| < 2^(46 - f). Raises DomainError for NaN and infinities.
    """
    n, exponent = _scalar(x.session, factor)
    value = x.value(full=True) if abs(n) == 1 else x.to_operand()
    if exponent > 0:
        surplus = min(exponent, max(0, value.frac - x.session.frac))  # moves the point, the elements stay as they are
        value = value.with_share(value.share, value.frac - surplus)
        n, exponent = n << (exponent - surplus), 0
    if n != 1:
        value = value.scale_int(n)
    return Fixed(value.session, value.share, value.frac - exponent) if exponent else value


def times_public(x: SecretTensor, factor: Tensor) -> Fixed:
    """x * public tensor (rope tables, masks), broadcasting; integers and booleans are exact.

    Real numbers have 16 bits after the point (error 2^-17), which the result has on top of those of x: local, but for
    what an earlier product left. In a 32-bit ring they have the session's; 1 round.
    """
    if factor.numel() == 1 and factor.dim() <= x.ndim:
        product = SecretTensor(times_scalar(x, float(factor)))
        return product.viewed(lambda part: part.expand(torch.broadcast_shapes(part.shape, factor.shape))).value(
            full=True
        )
    value = x.to_operand()
    real_bits = CONSTANT_BITS if value.session.ring.bits == 64 else value.session.frac  # there as many as a weight
    bits = real_bits if factor.is_floating_point() else 0
    out = value.with_share(value.proto.mul_public(value.share, encoded(value, factor, bits)), value.frac + bits)
    return out if value.session.ring.bits == 64 else out.rescale(value.session.frac)


_encodings: WeakKeyDictionary[Session, OrderedDict[tuple[object, ...], tuple[Tensor, Tensor]]] = WeakKeyDictionary()


def encoded(x: Fixed, values: Tensor, bits: int) -> Tensor:
    """Ring elements of public values, with `bits` fractional bits, on the device of x.

    The last 16 of a session are kept: every layer of a model meets the same few public tensors (rope tables, masks). An
    entry keeps its source alive, whose address is in its key. Raises DomainError for values that the ring cannot hold.
    """
    hook, make = this_thread.hook, partial(_encoded, x, values, bits)
    return make() if hook is None else hook.encoded(values, bits, make)


def _encoded(x: Fixed, values: Tensor, bits: int) -> Tensor:
    """`encoded`, unwatched."""
    where = x.share.parts[0].device
    key = _key(values, 0, values.shape, values.stride(), bits, where)
    recent = _encodings.setdefault(x.session, OrderedDict())
    found = recent.get(key)
    if found is None or values.is_inference():
        found = (values, x.session.ring.encode(values, bits).to(where))
        recent[key] = found
        if len(recent) > _CACHED:
            recent.popitem(last=False)
    else:
        recent.move_to_end(key)
    return found[1]


def _key(
    values: Tensor, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], bits: int, where: torch.device
) -> tuple[object, ...]:  # fmt: skip
    """Equal for equal views of a tensor that lives and is unchanged; offset: from its first element."""
    version = None if values.is_inference() else values._version
    return values.data_ptr() + offset * values.itemsize, shape, stride, values.dtype, version, bits, where


def encode_public(x: Fixed, values: Tensor, view: tuple[int, tuple[int, ...], tuple[int, ...], int, int]) -> Tensor:
    """`encoded` for a view of public values: (any number, shape, strides, offset, fractional bits)."""
    _, shape, stride, offset, bits = view
    if this_thread.hook is None and not values.is_inference():
        key = _key(values, offset, shape, stride, bits, x.share.parts[0].device)
        recent = _encodings.get(x.session)
        if recent is not None and key in recent:  # without a view: each layer asks for each table
            return recent[key][1]
    return encoded(x, values.as_strided(shape, stride, int(values.storage_offset()) + offset), bits)


def aligned(x: SecretTensor, y: SecretTensor, narrow: bool = False) -> tuple[Fixed, Fixed]:
    """Both operands of a sum: as they are when their fractional bits agree, else without (many) surplus bits.

    narrow: the sum has the size of a narrow operand; else this is made whole first, since the other may be larger. An
    other one with more fractional bits (a bias) is cut to those of a narrow operand, less than two units off: local.

    Beside a coarse one the other is cut to its bits, for good: a residual stream whose values have become massive. Each
    cut is one truncation, 1 round. Raises DomainError for secrets of two sessions.
    """
    same_session(x, y)
    a, b = (x.value(), y.value()) if narrow else (x.value(full=True), y.value(full=True))
    if a.frac == b.frac:
        return a, b
    if x.coarse or y.coarse:
        frac = min(a.frac, b.frac)
        return x.coarsen(frac), y.coarsen(frac)
    if narrow and a.width is not None and a.frac < b.frac:
        return a, b.local_truncate(a.frac, (b.session.ring.bits if b.width is None else b.width) - (b.frac - a.frac))
    if max(a.frac, b.frac) > x.session.frac + SLACK:
        return x.to_operand(), y.to_operand()
    return a, b
