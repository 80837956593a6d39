"""`Fixed`: a share with its fractional bits and session; the arithmetic that approximations are written in.

Products are truncated back to the session's fractional bits (or `frac=`) in the same protocol step.
A value must keep |v| * 2^(frac_x + frac_y) < 2^(ring bits - 2) before that truncation.
Costs below are bytes over all links in trio, 64-bit ring, 18 fractional bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels.forms import MATMUL
from private_llm.net.ledger import Cost
from private_llm.protocols.one_step import Pieces, PiecesShape
from private_llm.protocols.prices import Prices
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.session import Session
from private_llm.protocols.share import BitShare, BitWidths, Share
from private_llm.ranges import REACH, Ranges
from private_llm.ring.ring import Ring

SEEN = 5
"""Bits that a product's elements need above its size: a sign, one for a division, and three for the check of ranges.

Modulo 32 times its size, a product of any size comes out within the size with probability 1/16: the check sees others.
"""

READ_BITS = 16  # most fractional bits of results that products alone read; activations miss ten times its rounding


@dataclass(frozen=True, slots=True, eq=False)
class Fixed:
    """A secret real tensor: value = ring element / 2^frac. All methods are local unless they say otherwise.

    Bytes and rounds: trio, 64-bit ring, 18 fractional bits (`PrivateConfig.frac_bits`); formulas for others stand
    beside the primitives. Before a truncation |ring element| < 2^(ring bits - 2); debug sessions find garbage.

    width: how many of the ring's lowest bits are right, where others are not (products with `width`); None: all are.
    The value fits them: |ring element| < 2^(width-2). It goes along with what is made of the value: sums, products with
    integers, choices by bits, comparisons of at most as many bits, products whose size is known. What needs the whole
    ring makes the others right first (`restore_high_bits`: 1 round).
    """

    session: Session
    share: Share
    frac: int
    width: int | None = None

    @property
    def proto(self) -> Protocol:
        """The protocol end that computes; in a session of several devices, on the one where this share lies."""
        protocol = self.session.protocol
        return protocol.on(self.share.parts[0].device) if protocol.placed else protocol

    @property
    def form(self) -> tuple[int, int | None]:
        """`frac` and `width`: what is public beside the shape."""
        return self.frac, self.width

    @property
    def shape(self) -> torch.Size:
        """Logical shape, public."""
        return self.share.parts[0].shape

    def numel(self) -> int:
        """Number of elements, public."""
        return self.share.parts[0].numel()

    def with_share(self, share: Share, frac: int | None = None) -> Fixed:
        """Another share with `frac` fractional bits (default: these); another `frac` alone moves the point."""
        return Fixed(self.session, share, self.frac if frac is None else frac, self.width)

    def view(self, reorder: Callable[[Tensor], Tensor]) -> Fixed:
        """A linear function of one part (reshape, sum, ...) on every part; keeps `frac`; others give garbage."""
        return Fixed(self.session, Share(tuple(map(reorder, self.share.parts))), self.frac, self.width)

    def __getitem__(self, index: Any) -> Fixed:  # noqa: ANN401 - what indexes a tensor
        """The same index of every part. Local."""
        return self.view(lambda part: part[index])

    def restore_high_bits(self) -> Fixed:
        """All bits right: local if they are, else 1 round, (64 + 3 (64 - width)) / 8 bytes an element at `width`."""
        if self.width is None:
            return self
        bits = self.session.ring.bits
        return Fixed(self.session, self.proto.truncate(self.share, 0, BitWidths(self.width, bits)), self.frac)

    def right_in(self, bits: int | None) -> Fixed:
        """The same value, right in its lowest `bits` (None: all) at least: local, or `restore_high_bits`."""
        return self if self.width is None or (bits is not None and bits <= self.width) else self.restore_high_bits()

    def min_width_with(self, other: Fixed) -> Fixed:
        """This value, said to be right in no more bits than `other` is: what has entries or terms of both. Local."""
        if other.width is None or (self.width is not None and self.width <= other.width):
            return self
        return Fixed(self.session, self.share, self.frac, other.width)

    def local_truncate(self, frac: int, width: int) -> Fixed:
        """The same value with fewer fractional bits, less than two units away from it, in its lowest `width` bits.

        Local. Raises DomainError for bits that are not right or not there, UnsupportedOp without `local_truncate`.
        """
        right = (self.session.ring.bits if self.width is None else self.width) - (self.frac - frac)
        if frac > self.frac or width > right:
            raise DomainError(
                f"local_truncate: got {frac} fractional bits of {width}; want {self.frac} of {right} at most"
            )
        return Fixed(self.session, self.proto.local_truncate(self.share, self.frac - frac), frac, width)

    # -- scale ------------------------------------------------------------------------------------------
    def encode(self, value: float | Tensor, frac: int) -> int | Tensor:
        """Public real constants as ring elements with `frac` bits, rounded: an int for a number, a tensor for a tensor.

        Raises DomainError where |value| * 2^frac reaches 2^(ring bits - 2), and for NaN or infinities in a tensor.
        """
        if isinstance(value, Tensor):
            return self.session.ring.encode(value, frac).to(self.share.parts[0].device)
        return _encoded((value,), frac, self.session.ring)[0]

    def finer(self, frac: int) -> Fixed:
        """The same value with more fractional bits, for which the ring must have room. Raises DomainError for fewer."""
        if frac < self.frac:
            raise DomainError(f"finer: got {frac} bits; want at least {self.frac} (use `coarser`, which communicates)")
        if frac == self.frac:
            return self
        made, bits = self.proto.mul_public(self.share, 1 << (frac - self.frac)), self.session.ring.bits
        right = bits if self.width is None else self.width + frac - self.frac
        return Fixed(self.session, made, frac, right if right < bits else None)

    def coarser(self, frac: int, width: int | None = None) -> Fixed:
        """The same value with fewer fractional bits, rounded down (or one unit more): one truncation.

        width: bits of the result that are read (default: as many as are right now).

        1 round, 8 bytes and 3 bits for each bit dropped an element; with r bits read, r bits in place of the 8 bytes
        and 3 (64 - r) bits less. Raises DomainError for more bits than there are.
        """
        if frac == self.frac:
            return self
        bits = self.session.ring.bits
        right = bits if self.width is None else self.width
        wanted = right if width is None or not narrows(self.session) else min(width, right)
        widths = None if wanted == right == bits else BitWidths(right, wanted)
        made = self.proto.truncate(self.share, self.frac - frac, widths)
        return Fixed(self.session, made, frac, None if widths is None else wanted)

    def rescale(self, frac: int) -> Fixed:
        """The same value with exactly `frac` bits: `finer`, which is local, or `coarser`, which costs 1 round."""
        return self if frac == self.frac else self.finer(frac) if frac > self.frac else self.coarser(frac)

    def stack(self, other: Fixed) -> Fixed:
        """Both, of equal shape and fractional bits, on a new first dimension [2, ..], for one step. Local."""
        pairs = zip(self.share.parts, other.share.parts, strict=True)
        return self.min_width_with(other).with_share(Share(tuple(torch.stack(pair) for pair in pairs)))

    # -- sums --------------------------------------------------------------------------------------------
    def _aligned(self, other: Fixed) -> tuple[Fixed, Fixed]:
        if self.frac == other.frac:
            return self, other
        frac = max(self.frac, other.frac)
        return self.finer(frac), other.finer(frac)

    def __add__(self, other: Fixed | float | Tensor) -> Fixed:
        if isinstance(other, Fixed):
            x, y = self._aligned(other)
            return x.min_width_with(y).with_share(x.proto.add(x.share, y.share))
        return self.with_share(self.proto.add_public(self.share, self.encode(other, self.frac)))

    __radd__ = __add__

    def __neg__(self) -> Fixed:
        return self.with_share(self.proto.neg(self.share))

    def __sub__(self, other: Fixed | float | Tensor) -> Fixed:
        if isinstance(other, Fixed):
            x, y = self._aligned(other)
            return x.min_width_with(y).with_share(x.proto.sub(x.share, y.share))
        return self + (-other)

    def __rsub__(self, other: float | Tensor) -> Fixed:
        return (-self) + other

    def sum(self, dim: int | Sequence[int], keepdim: bool = False) -> Fixed:
        """Sum over dimensions; same `frac`. Local, unchecked: it must fit the ring, a fourth before truncation."""
        dims = [dim] if isinstance(dim, int) else list(dim)
        return self.view(lambda part: part.sum(dim=dims, keepdim=keepdim, dtype=part.dtype))

    # -- products ------------------------------------------------------------------------------------------
    def scale_int(self, factor: int | Tensor) -> Fixed:
        """Times public integers (broadcasting): no truncation, same `frac`. Local."""
        return self.with_share(self.proto.mul_public(self.share, factor))

    def scale(self, factor: float | Tensor, frac: int | None = None) -> Fixed:
        """Times public reals held with the session's fractional bits: one truncation to `frac` bits.

        1 round, 14.75 bytes an element. Broadcasts. Raises DomainError for a constant that the ring cannot hold, and
        for a `frac` above self.frac and the session's together.
        """
        bits = self.session.frac
        out = bits if frac is None else frac
        raw = self.proto.mul_public(self.restore_high_bits().share, self.encode(factor, bits))
        return Fixed(self.session, self.proto.truncate(raw, self.frac + bits - out), out)

    def mul(
        self, other: Fixed, frac: int | None = None, below: int | None = None, width: int | None = None
    ) -> Fixed:  # fmt: skip
        """Elementwise product with broadcasting and `frac` bits (default: the session's): one protocol product.

        below: |product| < 2^below, so that factors need not be right in more bits than that takes. width: bits of the
        result that are read; the others need not be right where the protocol saves something by that.

        Truncation included: 2 rounds, 30.75 bytes an output; 1 round and 24 bytes where no bit is dropped. With a
        `width` of r, or factors of k bits, (2 k + r + 3 n) / 8 bytes, n = max(0, r + bits dropped - k), and 1 round
        with n = 0: r = 50, k = 64 are 23.75. Raises DomainError for a `frac` above the sum of both.
        """
        out = self.session.frac if frac is None else frac
        x, y, shift, widths = self._factors(other, out, below, width)
        return _product(x, x.proto.mul(x.share, y.share, shift, widths), out, y, widths)

    def _factors(
        self, other: Fixed, out: int, below: int | None, width: int | None
    ) -> tuple[Fixed, Fixed, int, BitWidths | None]:
        """Both factors with the bits that their product needs, the bits that it drops, and how narrow it is."""
        x, y, bits, shift = self, other, self.session.ring.bits, self.frac + other.frac - out
        wanted = bits if width is None or not narrows(self.session) else min(width, bits)
        right = min(x.width or bits, y.width or bits)
        enough = bits if below is None else max(below + x.frac + y.frac + SEEN, shift + 3)
        if shift == 0 and wanted <= right < bits:
            return x, y, 0, None
        if shift <= 0 or right < min(enough, wanted + shift):
            x = self.restore_high_bits()
            y, right = x if other is self else other.restore_high_bits(), bits
        if shift <= 0 or wanted == right == bits:
            return x, y, shift, None
        return x, y, shift, BitWidths(min(right, wanted + shift), wanted)

    def __mul__(self, other: Fixed | float | Tensor) -> Fixed:
        return self.mul(other) if isinstance(other, Fixed) else self.scale(other)

    __rmul__ = __mul__

    def matmul(
        self, other: Fixed, frac: int | None = None, select: Tensor | None = None, below: int | None = None,
        width: int | None = None,
    ) -> Fixed:  # fmt: skip
        """Matrix product [..., M, K] x [..., K, N], truncation included; cost of `mul` an output, whatever K is.

        With `select` (flat positions) only these outputs, 1-D; see `Protocol.bilinear`. below, width: as for `mul`.
        Raises DomainError for shapes that do not fit, and as `mul`.
        """
        out = self.session.frac if frac is None else frac
        x, y, shift, widths = self._factors(other, out, below, width)
        return _product(x, x.proto.bilinear(MATMUL, x.share, y.share, shift, select, widths), out, y, widths)

    def poly(self, coefficients: Sequence[float], frac: int | None = None, bits: int | None = None) -> Fixed:
        """c0 + c1 x + c2 x^2 (+ c3 x^3) in one protocol step; the leading coefficient carries `bits` fractional bits.

        Needs degree * self.frac + bits plus the integer bits of the value below ring bits - 2. 2 rounds; 45.5 bytes an
        element for degree 2, 60.25 for degree 3. Raises DomainError for another degree (not under plain).
        """
        out = self.session.frac if frac is None else frac
        bits = self.session.frac if bits is None else bits
        degree = len(coefficients) - 1
        ints = [round(c * 2.0 ** (bits + (degree - i) * self.frac)) for i, c in enumerate(coefficients)]
        shift = degree * self.frac + bits - out
        return Fixed(self.session, self.proto.poly(self.restore_high_bits().share, ints, shift), out)

    # -- comparisons -----------------------------------------------------------------------------------------
    def less_than(self, thresholds: Sequence[float], bits: int | None = None, low: int = 0) -> BitShare:
        """Rows of bits [x < threshold_k] for the flattened x, [thresholds, numel]: one comparison for all rows.

        `bits` and `low` bound the adder as in `Protocol.msb`: x - threshold must fit `bits` bits, and where x lies less
        than 2^(low - frac) above a threshold the bit may be 1. Thresholds are rounded to `frac` bits. 4 rounds and
        40.75 bytes an element for 64 bits, 22.25 for each further threshold; up to 32 elements meet several thresholds
        as one vector, since vectors take whole words. Values that are right in fewer bits are restored first. Raises
        DomainError as `Protocol.msb`.
        """
        x, offsets = self.right_in(bits), _offsets(tuple(thresholds), self.frac)
        if len(offsets) == 1 or not 0 < x.numel() <= _FEW:
            return x.proto.msb(x.share, offsets, bits, low)
        return _side_by_side(x, offsets, bits, low)

    def select(
        self, bits: BitShare, weights: Sequence[int], constants: Sequence[float], frac: int | None = None
    ) -> Fixed:
        """sum over rows of bit_k * (weights_k * x + constants_k), in the shape of x: one step.

        The result has `frac` fractional bits (default: those of x). 1 round and 16 bytes an element, 8 for each row, 8
        more for each with a weight (with a `width` as many bits for each 8 bytes); bits that are dropped add a
        truncation (2 rounds). Raises DomainError for constants that the ring cannot hold, or that are not one for each
        row, and for bits of another number of elements than x.
        """
        out = self.frac if frac is None else frac
        x = self.restore_high_bits() if self.frac > out else self
        constants = _encoded(tuple(constants), self.frac, self.session.ring)
        raw = self.proto.inject(bits, x.share, tuple(weights), constants, self.frac - out, x.width)
        shape = self.shape
        return x.with_share(raw.map(lambda part: part.reshape(shape)), out)

    def __repr__(self) -> str:
        return f"Fixed(shape={tuple(self.shape)}, frac={self.frac}, {self.session!r})"


def narrows(session: Session) -> bool:
    """Whether this protocol's products may leave bits that nobody reads: trio and dealer, 64-bit ring. Public."""
    return "local_truncate" in session.protocol.primitives and session.ring.bits == 64


@dataclass(frozen=True, slots=True)
class ModuleBits:
    """What a session's ranges tell of a module, in bits; None where nothing is known. Public.

    frac: fractional bits that results keep, the session's at most. read_frac: those of what may be read by products
    alone. output: results are below 2^output. read, read_values: bits above the point that are read of results, and of
    attention's values, by products that are made of so many bits and the check of ranges; None: all.
    """

    ranges: Ranges
    frac: int | None
    read_frac: int
    output: int | None
    read: int | None
    read_values: int | None

    def width(self, frac: int, values: bool = False) -> int | None:
        """How many of the lowest bits of results (or values) with `frac` fractional bits are read; None: all."""
        read = self.read_values if values else self.read
        return None if read is None or read + frac >= 64 else read + frac


def module_bits(session: Session, count: int = 0) -> ModuleBits:
    """Those of the running module for results of `count` elements; found once, for a layer asks at every step. Public
    and local.
    """
    numerics = session.numerics
    keys = "piecewise" in session.protocol.primitives and by_keys(session, count)
    key = session.protocol.module, numerics.shared_ranges, keys
    found: ModuleBits | None = numerics.module_bits.get(key)
    if found is None or found.ranges is not numerics.ranges:
        frac, output, read, value = map(session.exponent, ("frac", "output", "read", "value"))
        read_frac = session.frac if read is None else fewest_frac(session, count)
        read = read if _reads_less(session, count) else None
        widths = [None if read is None else max(read, size or 0) + SEEN for size in (output, value)]
        kept = None if frac is None else min(frac, session.frac)
        found = numerics.module_bits[key] = ModuleBits(numerics.ranges, kept, read_frac, output, *widths)
    return found


def fewest_frac(session: Session, count: int) -> int:
    """Fractional bits of `count` elements that products alone read: the session's, READ_BITS at most where that saves
    bytes. Public.
    """
    return min(session.frac, READ_BITS) if _reads_less(session, count) else session.frac


def _reads_less(session: Session, count: int) -> bool:
    """Whether `count` results that products alone read may have fewer bits here. Public."""
    return narrows(session) and not by_keys(session, count) and session.config.approximations == "ours"


def by_keys(session: Session, count: int) -> bool:
    """Whether functions of `count` elements run by comparison keys, which multiply by whole arguments: those for which
    a ReLU would. Public and local.
    """
    protocol, ring = session.protocol, session.ring
    if "piecewise" not in protocol.primitives:
        return False
    bits = min(ring.bits, session.frac + REACH + 1)
    return protocol.takes_keys(count, PiecesShape(1, 1, bits), step_price, ring, count, bits, 1, 0, 1)


def _product(x: Fixed, share: Share, frac: int, y: Fixed, widths: BitWidths | None) -> Fixed:
    """A product's share as a value, with as many bits as are right."""
    bits = x.session.ring.bits
    right = min(x.width or bits, y.width or bits) if widths is None else widths.needed_out
    return Fixed(x.session, share, frac, right if right < bits else None)


def arithmetic(session: Session, bits: BitShare, constants: Sequence[float], frac: int) -> Fixed:
    """sum over rows of bit_k * constants_k as a 1-D secret [count] with `frac` bits (bit to arithmetic).

    1 round, 16 bytes an element and 8 for each row. Raises DomainError unless there is one constant for each row.
    """
    encoded = [session.ring.constant(round(c * (1 << frac))) for c in constants]
    return Fixed(session, session.protocol.inject(bits, None, encoded, encoded), frac)


def negative(x: Fixed, bits: int | None = None, width: int | None = None) -> Fixed:
    """The sign as a number, 1 where x < 0, else 0: x of any shape to [x.numel()], no fractional bits. Exact.

    bits: -2^(bits-1) <= ring element < 2^(bits-1), default the whole ring, in which nothing is out of range. width:
    bits of the result that are read (default: all). 65 bytes an element and 5 rounds for 64 bits (trio); by comparison
    keys, where those are the way to go, 4 kB and 1 round. Raises DomainError unless 2 <= bits <= ring bits.
    """
    ring, bits = x.session.ring, x.session.ring.bits if bits is None else bits
    x, count = x.right_in(bits), x.numel()
    low = width if narrows(x.session) else None
    if not x.proto.takes_keys(count, PiecesShape(1, 1, bits), sign_price, ring, count, bits, low):
        made = x.proto.inject(x.less_than([0.0], bits=bits), None, (1,), (1,), low=low)
        return Fixed(x.session, made, 0, low)
    (made,) = x.proto.piecewise(x.share.map(lambda part: part.reshape(-1)), Pieces((0,), (((1, 0),),), ((0, 0),), bits))
    return Fixed(x.session, made, 0)


_FEW = 32  # elements that leave half of a word of bits empty, or more


def _side_by_side(x: Fixed, offsets: tuple[int, ...], bits: int | None, low: int) -> BitShare:
    """`less_than` of few elements: a copy of them for each threshold, in lanes of its own of one vector."""
    count, rows, lanes = x.numel(), len(offsets), _lanes(x.numel())
    copies = x.share.map(
        lambda part: torch.nn.functional.pad(part.reshape(-1), (0, lanes - count)).expand(rows, lanes).reshape(-1)
    )
    constants, shifts = _lane_constants(offsets, lanes, x.session.ring, copies.parts[0].device)
    found = x.proto.msb(x.proto.add_public(copies, constants), (0,), bits, low)
    parts = ((part.view(-1, 1) >> shifts).view(-1, 1)[:rows] for part in found.parts)
    return BitShare(tuple(parts), count)


def _lanes(count: int) -> int:
    """The least power of two that holds `count` >= 1 elements."""
    return 1 << (count - 1).bit_length()


@lru_cache(maxsize=1024)
def _lane_constants(offsets: tuple[int, ...], lanes: int, ring: Ring, device: torch.device) -> tuple[Tensor, Tensor]:
    """What each copy gets added, and where in a word each begins; never written to."""
    column = torch.tensor([[ring.constant(offset)] for offset in offsets], dtype=ring.dtype, device=device)
    return column.expand(-1, lanes).reshape(-1), torch.arange(0, 64, lanes, device=device)


def less_than_price(prices: Prices, count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
    """Of `Fixed.less_than` by a circuit, for values of `bits` bits."""
    if thresholds == 1 or not 0 < count <= _FEW:
        return prices.msb(count, bits, thresholds, low)
    return prices.msb(thresholds * _lanes(count), bits, 1, low)


def sign_price(prices: Prices, ring: Ring, count: int, bits: int, low: int | None) -> Cost:
    """Of `negative` by a circuit."""
    return prices.msb(count, bits) + prices.inject(ring, count, 1, 0, 0, low)


def step_price(
    prices: Prices, ring: Ring, count: int, bits: int, rows: int = 1, low: int = 0, weighted: int = 0
) -> Cost:  # fmt: skip
    """Of comparisons with `rows` thresholds and an injection of `weighted` numbers."""
    return less_than_price(prices, count, bits, rows, low) + prices.inject(ring, count, rows, weighted, 0)


@lru_cache(maxsize=1024)
def _encoded(values: tuple[float, ...], frac: int, ring: Ring) -> tuple[int, ...]:
    """Public real constants with `frac` fractional bits. Raises DomainError for one that the ring cannot hold."""
    scaled = tuple(round(value * (1 << frac)) for value in values)
    for value, made in zip(values, scaled, strict=True):
        if abs(made) >= 1 << (ring.bits - 2):
            raise DomainError(f"constant {value:g} does not fit the ring with {frac} fractional bits")
    return scaled


@lru_cache(maxsize=1024)
def _offsets(thresholds: tuple[float, ...], frac: int) -> tuple[int, ...]:
    """What is added to a value with `frac` fractional bits so that it is negative below each threshold."""
    return tuple(-round(threshold * (1 << frac)) for threshold in thresholds)
