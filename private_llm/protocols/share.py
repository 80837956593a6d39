"""What one party holds: of secret values ring components (`Share`) and bitsliced words (`BitShare`), and secret orders;
and public facts of what is computed with them.

`p` stands for pi(x)[i] = x[p[i]], so the permutation p after q is q[p]. A secret permutation is a product of
sub-permutations; a party holds those that it knows, and None for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import DomainError, ProtocolAbort
from private_llm.kernels.forms import BilinearForm
from private_llm.kernels.trace_hook import as_array
from private_llm.ring.ring import Ring


@dataclass(frozen=True, slots=True)
class Share:
    """This party's components of a ring tensor; all parts have the logical shape. `repr` shows no values.

    One part under plain (two in debug sessions), two under trio and dealer, three under quad; int64 or int32.
    """

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> torch.Size:
        """The logical shape (public)."""
        return self.parts[0].shape

    def numel(self) -> int:
        """Number of elements (public)."""
        return self.parts[0].numel()

    def map(self, linear: Callable[[Tensor], Tensor]) -> Share:
        """Apply a linear or reordering function to every part, which may change the shape: a local operation."""
        return Share(tuple(map(linear, self.parts)))

    def __repr__(self) -> str:
        return f"Share(shape={tuple(self.shape)}, parts={len(self.parts)})"


@dataclass(frozen=True, slots=True)
class BitShare:
    """This party's components of secret bits: int64 words [rows, words]; lane j of word i is element 64*i+j.

    `rows` counts bit vectors (for instance thresholds); `count` is the number of elements of each;
    lanes beyond `count` in the last word are unspecified.
    """

    parts: tuple[Tensor, ...]
    count: int

    @property
    def rows(self) -> int:
        """Number of bit vectors."""
        return int(self.parts[0].shape[0])

    def row(self, index: int) -> BitShare:
        """One bit vector, as a share of one row. Local."""
        return self.some(index, 1)

    def some(self, start: int, rows: int) -> BitShare:
        """Bit vectors start .. start + rows - 1, as views. Local."""
        return BitShare(tuple(part[start : start + rows] for part in self.parts), self.count)

    def __repr__(self) -> str:
        return f"BitShare(rows={self.rows}, count={self.count})"


@dataclass(frozen=True, slots=True)
class Index:
    """This party's hold on `count` secret indices below the public `domain`.

    `keys`: of point functions (int64 [count, words] each: two in trio, four in quad), or with `one_hot` the parts of
    shared one-hot rows [count, domain], or the indices [count] under `plain`.
    """

    keys: tuple[Tensor, ...]
    count: int
    domain: int
    one_hot: bool = False

    def to(self, device: torch.device | str) -> Index:
        """The same with its keys on another device. Local."""
        return replace(self, keys=tuple(key.to(device) for key in self.keys))

    def __repr__(self) -> str:
        return f"Index(count={self.count}, domain={self.domain})"


def cleartext(elements: Tensor, watched: bool = False) -> Share:
    """The share of `plain`: the elements themselves; if `watched` (debug_ranges), and real numbers that never wrap.

    Every local step does the same to both, so they differ by a multiple of the ring's size as soon as one wraps.
    """
    return Share((elements, elements.to(torch.float32))) if watched else Share((elements,))


def words_for(count: int) -> int:
    """64-bit words that hold one bit per element: ceil(count / 64)."""
    return (count + 63) // 64


# -- public facts of arithmetic ----------------------------------------------------------------------------------------
BitWeights = Sequence[int | Tensor]
"""Public ring constants: one per bit row, each an int or a tensor of 1 or `count` elements (flattened)."""


@dataclass(frozen=True, slots=True)
class BitWidths:
    """How many of the lowest bits are right of x, which they hold: |x| < 2^(given-2), and are wanted of x / 2^shift.

    Of a product x*y k bits are right, and |x*y| < 2^(k-2); of the quotient r bits are wanted. Under trio and dealer k
    bits are then opened instead of the ring's, and r bits are shared. Which r is enough is told by who reads the
    result: a product below 2^(k-2) again wants k bits of its factors. Where no more than given - shift bits are wanted,
    x may be any number modulo 2^given.
    """

    valid_in: int
    needed_out: int

    def fields(self, shift: int) -> int:
        """Bits above those that a division leaves right by itself: with none, its second exchange goes."""
        return max(0, self.needed_out - self.valid_in + shift)

    def check(self, ring: Ring, shift: int) -> None:
        """Raise DomainError for bits that the ring does not have, and for a shift that leaves none."""
        valid, needed, bits = self.valid_in, self.needed_out, ring.bits
        if not (0 <= shift <= valid - 3 and 3 <= valid <= bits and 1 <= needed <= bits):
            raise DomainError(
                f"bit widths: got a division by 2^{shift} of {valid} bits of which {needed} are needed; want a shift "
                f"from 0 to the valid bits less 3, and at most the {bits} bits of the ring"
            )


def taking_part(form: BilinearForm, y: Share) -> tuple[BilinearForm, Share]:
    """B and what it reads of y: for protocols that mask, or add up, whole operands. Local; copies if B reads a part."""
    narrowed = form.narrowed()
    if narrowed is None:
        return form, y
    smaller, take = narrowed
    return smaller, y.map(take)


def check_injected(bits: BitShare, x: Share | None, weights: BitWeights, constants: BitWeights) -> None:
    """Raise DomainError unless x has bits.count elements, and weights and constants are one for each row. Local."""
    for given in (weights, constants):
        if len(given) != bits.rows:
            raise DomainError(f"inject: got {len(given)} constants for {bits.rows} bit rows; want one each")
        sizes = {each.numel() for each in given if isinstance(each, Tensor)} - {1, bits.count}
        if sizes:
            raise DomainError(
                f"inject: got constants of {min(sizes)} elements for {bits.count} bits; want as many, or 1"
            )
    if x is not None and x.numel() != bits.count:
        raise DomainError(f"inject: got x of {x.numel()} elements for {bits.count} bits; want as many")


def check_low(low: int | None, shift: int) -> None:
    """Raise DomainError for a number of low bits that `inject` does not take. Local."""
    if low is not None and (shift or not 1 <= low <= 63):
        raise DomainError(f"inject: got low={low} with a shift of {shift}; want 1 to 63 low bits, and no shift")


# -- secret orders -----------------------------------------------------------------------------------------------------
@dataclass(eq=False, slots=True)
class Permutation:
    """This party's hold on a secret permutation of `size` elements. `repr` shows nothing of it.

    reuse: whether several openings may share this order. Openings in one order are linked: they tell which elements
    are the same ones, and known inputs tell which (docs/threat-model.md). Without it a second one is refused.
    """

    size: int
    parts: tuple[Tensor | None, ...] = field(repr=False)
    reuse: bool = False
    openings: int = field(default=0, repr=False)

    def spend(self, openings: int) -> None:
        """Count bit vectors that are about to be opened. Raises ProtocolAbort for a second one without `reuse`."""
        if self.openings + openings > 1 and not self.reuse:
            raise ProtocolAbort(
                f"open_shuffled: got {self.openings + openings} bit vectors in one secret order, which links them; "
                "draw a permutation for each, or declare permutation(size, reuse=True)"
            )
        self.openings += openings

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("a secret permutation is not serialised")


@dataclass(frozen=True, slots=True)
class ShuffledBits:
    """Bits that were shuffled by `order`: the one kind of value that parties may open among themselves."""

    bits: BitShare
    order: Permutation

    def __repr__(self) -> str:
        return f"ShuffledBits(rows={self.bits.rows}, count={self.bits.count})"


def drawn(words: Tensor, blocks: int = 1) -> Tensor:
    """The permutation that sorts uniform words [n] in `blocks` equal runs: int64 [n]; bias < n^2 / 2^64. Local."""
    runs = words.view(blocks, -1)
    if words.device.type == "cpu":  # NumPy sorts five times as fast, in the same order
        order = torch.from_numpy(np.argsort(as_array(runs), kind="stable"))
    else:
        order = torch.argsort(runs, stable=True)
    starts = torch.arange(blocks, device=order.device) * runs.shape[1]
    return (order + starts[:, None]).view(-1)


def owner_order(size: int) -> Permutation:
    """The secret order in which a model owner stored what `size` bits are about; no party knows any of it.

    It is kept as long as the weights are, so openings in it are linked (docs/threat-model.md).
    """
    return Permutation(size, (), reuse=True)


def inverse(p: Tensor) -> Tensor:
    """q with q[p[i]] = i: int64 [n]. Local."""
    made = torch.empty_like(p)
    made[p] = torch.arange(p.numel(), dtype=p.dtype, device=p.device)
    return made


def known(part: Tensor | None) -> Tensor:
    """A sub-permutation that this party must hold. Raises ProtocolAbort for one that it does not know."""
    if part is None:
        raise ProtocolAbort("a party moves values in an order that it does not know")
    return part


@dataclass(frozen=True)
class Moved:
    """What a shuffle moves: arrays of one shape in a group (ring elements under +, words under ^).

    shape: of one component. dtype: of its numbers. move: puts the elements of a component in the order of an index.
    places: of what was moved, the rows that are wanted, public int64 [m]; None: all.
    """

    shape: torch.Size
    dtype: torch.dtype
    move: Callable[[Tensor, Tensor], Tensor]
    plus: Callable[[Tensor, Tensor], Tensor]
    minus: Callable[[Tensor, Tensor], Tensor]
    places: Tensor | None = None

    @property
    def left(self) -> Moved:
        """What is wanted of it."""
        if self.places is None:
            return self
        return replace(self, shape=torch.Size((len(self.places), *self.shape[1:])), places=None)

    def end(self, last: Tensor) -> Tensor:
        """Of the last sub-permutation, where the wanted rows come from."""
        return last if self.places is None else last[self.places.to(last.device)]

    @property
    def count(self) -> int:
        """Numbers in a component."""
        return self.shape.numel()


def moved_rows(x: Share, order: Permutation, undo: bool, places: Tensor | None) -> Moved:
    """Rows of a share [n, ...]. Raises DomainError unless n is the size of the permutation, and for places with `undo`,
    or that are no int64 [m] below n.
    """
    if places is not None and undo:
        raise DomainError("shuffle: got places to put rows back; want none: all come back")
    if places is not None and not _inside(places, order.size):
        raise DomainError(f"shuffle: got places {places.dtype} {tuple(places.shape)}; want int64 [m] from 0 to n - 1")
    if not x.shape or x.shape[0] != order.size:
        raise DomainError(f"shuffle: got rows {tuple(x.shape)}; want {order.size} in the first dimension")
    return Moved(x.shape, x.parts[0].dtype, lambda part, p: part[p], torch.add, torch.sub, places)


def _inside(places: Tensor, size: int) -> bool:
    if places.ndim != 1 or places.dtype != torch.int64:
        return False
    return places.is_meta or not places.numel() or bool(places.min() >= 0 and places.max() < size)


def moved_bits(x: BitShare, order: Permutation) -> Moved:
    """Bit vectors, all in the same new order. Raises DomainError unless their length is the permutation's size."""
    if x.count != order.size:
        raise DomainError(f"shuffle_bits: got vectors of {x.count} bits; want {order.size}")
    return Moved(
        x.parts[0].shape,
        torch.int64,
        lambda words, p: packed(unpacked(words, p.numel())[:, p]),
        torch.bitwise_xor,
        torch.bitwise_xor,
    )


def unpacked(words: Tensor, count: int) -> Tensor:
    """Words [rows, words] to one byte a bit: uint8 [rows, count]. Local."""
    shifts = torch.arange(8, dtype=torch.uint8, device=words.device)
    octets = words.contiguous().view(torch.uint8)
    return ((octets[:, :, None] >> shifts) & 1).view(words.shape[0], 64 * words.shape[1])[:, :count]


def packed(bits: Tensor) -> Tensor:
    """0/1 bytes [rows, count] to words [rows, ceil(count / 64)]; lanes beyond `count` are 0. Local."""
    rows, count = bits.shape
    if not count:
        return bits.new_zeros((rows, 0), dtype=torch.int64)
    padded = torch.zeros((rows, 64 * words_for(count)), dtype=torch.uint8, device=bits.device)
    padded[:, :count] = bits
    weights = torch.ones(8, dtype=torch.uint8, device=bits.device) << torch.arange(8, device=bits.device)
    octets = (padded.view(rows, padded.shape[1] // 8, 8) * weights.to(torch.uint8)).sum(2, dtype=torch.uint8)
    return octets.view(torch.int64)


def relaned(bits: BitShare, change: Callable[[Tensor], Tensor], count: int) -> BitShare:
    """Bits as `change` arranges bytes [rows, bits.count] into [rows, count]. Local."""
    return BitShare(tuple(packed(change(unpacked(part, bits.count))) for part in bits.parts), count)
