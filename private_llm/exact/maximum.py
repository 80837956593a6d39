"""Maximum of rows by a tournament.

One of pairs has ceil(log2 n) levels, n - 1 comparisons. max(a, b) = a - [a < b] (a - b): a comparison, an injection.

A maximum that may be a little off needs few bits of its entries (`is_cut`): cut to CUT_BITS fractional bits, which is
local, and to the bits of their differences, they meet exactly in a ring of 26 bits (13 with a small known range), in
which an injection costs 13 bytes instead of 32. A cut entry is less than two units above its entry and less than one
below, so the winner less two units is below the largest entry, by less than three.

Where few cut entries are left, all of a group meet at once: every pair is compared, an entry's rank is how many come
before it, and one more comparison, of the bits of a rank, keeps the entry of rank 0. That is 6 rounds for groups of up
to 8 entries and 7 for 16, in place of 12 and 16; `_fastest` finds the sizes of groups, level by level, by the network.

Over a slow network, where comparison keys make a level one round, whole entries (up to 16) meet at once, too, and
2^(l+1) rank + entry is below 2^l for the first alone, if entries lie between 0 and 2^l: one more comparison, of the
bits of a rank, gives that entry times 1, and the others times 0. Two rounds for 5 to 16 entries, and more keys.

Arg max: the first entry of a pair wins ties, so the winner is the first maximum of its block. One injection moves value
and index: (a, i) - [a < b] (a - b, i - j). Where comparison keys may be used, both are one number, 2^k value + (n - 1 -
index), a level is one round, and a division with its remainder takes them apart in the end.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.exact.comparisons import chosen_below, coarse_span, exact_span, reach, sign_bits
from private_llm.exact.ragged_rows import Rows
from private_llm.exact.ranks import losses, rank_bits
from private_llm.protocols.one_step import Pieces, PiecesShape
from private_llm.protocols.registry import Pricing
from private_llm.protocols.share import BitShare, Share
from private_llm.tensor.fixed import Fixed, by_keys, narrows, negative


def maximum(x: Fixed, coarse: bool = False) -> Fixed:
    """Maximum over the last dimension: [..., n] to [..., 1], for |x| < 2^20.

    Exact: 57 bytes per pair, 5 rounds a level (trio, 18 fractional bits, 64-bit ring). With `coarse`, for |x| < 2^20 -
    2^10, under trio and dealer less than 3/16 below, never above, and right in the lowest 40 bits (`Fixed.width`): 29
    bytes per pair, 4 rounds a level, or 6 or 7 for 3 or 4 levels where few entries are left. Elsewhere (`is_cut`) each
    level may choose the smaller of two entries less than 2^-6 apart: 49 bytes per pair. By comparison keys 1 round a
    level, and where the stated network makes them pay (`at_once`), 2 for the last 3 or 4 levels.
    """
    if coarse and is_cut(x):
        return _restored(maximum(_cut(x)), x)
    while x.shape[-1] > 1:
        if at_once(x, coarse):
            return _first_of_all(x)
        size = _group_size(x, x.numel() // x.shape[-1], x.shape[-1])
        if size > 2:
            x = _firsts(_in_groups(x, size))
            continue
        half = x.shape[-1] // 2
        top = larger(_last(x, 0, half), _last(x, half, 2 * half), coarse)
        x = concatenated([top, _last(x, 2 * half, x.shape[-1])], -1) if x.shape[-1] % 2 else top
    return x


def maximum_ragged(x: Fixed, rows: Rows, coarse: bool = False) -> Fixed:
    """Maximum of each row of the flat x [total]: [count]; rows must not be empty. Cost and error as `maximum`.

    The longest row decides about levels. Raises DomainError for an x of another shape.
    """
    rows.check(x)
    if coarse and is_cut(x):
        return _restored(maximum_ragged(_cut(x), rows), x)
    numbers = rows.numbers(x.share.parts[0].device)
    for place, level in enumerate(numbers.tournament):
        if 2 < rows.longest <= _MOST:
            places = numbers.square(place, rows.longest)
            square = x.view(lambda part, places=places: part[places])  # type: ignore[misc]
            if at_once(square, coarse) or _group_size(x, rows.count, rows.longest) == rows.longest:
                return maximum(square, coarse).view(lambda part: part.reshape(-1))
        rows = rows.halved
        top = larger(_taken(x, level.left), _taken(x, level.right), coarse)
        x = concatenated([top, _taken(x, level.bye)], 0)
        x = _taken(x, level.order)
    return x


def is_cut(x: Fixed) -> bool:
    """Whether a coarse maximum of x is one of cut entries: not by comparison keys. Local and public."""
    possible = narrows(x.session) and not by_keys(x.session, x.numel()) and x.frac >= CUT_BITS
    return possible and x.frac - CUT_BITS + _cut_width(x) <= (x.session.ring.bits if x.width is None else x.width)


def _cut_width(x: Fixed) -> int:
    return CUT_BITS + reach(x) + 2


def _cut(x: Fixed) -> Fixed:
    return x.local_truncate(CUT_BITS, _cut_width(x))


def _restored(winner: Fixed, x: Fixed) -> Fixed:
    return winner.finer(x.frac) - 2.0 ** (1 - CUT_BITS)


def _group_size(x: Fixed, rows: int, width: int) -> int:
    """How many neighbours in rows of `width` cut entries should meet at this level: 2, or a group. Local and public."""
    if x.width is None or width == 1 or x.session.config.adder == "ripple":
        return min(width, 2)
    keys = "piecewise" in x.session.protocol.primitives
    return _fastest(Pricing.of(x.session.config), keys, rows, width, exact_span(x, extra=1)[0], x.width)[1]


@lru_cache(maxsize=4096)
def _fastest(pricing: Pricing, keys: bool, rows: int, width: int, bits: int, right: int) -> tuple[float, int]:
    """(seconds of a tournament, entries that meet at its first level); bits: compared, right: of an entry."""
    if width == 1:
        return 0.0, 1
    found = []
    for most in range(2, min(width, _MOST) + 1):
        groups = -(-width // most)
        size = -(-width // groups)
        met = pricing.sign_seconds(keys, rows * (width // 2 if most == 2 else groups * size * (size - 1) // 2), bits)
        kept = rows * (width // 2 if most == 2 else groups * size)
        chosen = pricing.prices.inject(pricing.ring, kept, 1, 1, 0, right)
        if most > 2:
            met += pricing.seconds(pricing.comparison(kept, rank_bits(size)))
        found.append((met + pricing.seconds(chosen) + _fastest(pricing, keys, rows, groups, bits, right)[0], size))
    return min(found)


def _in_groups(x: Fixed, size: int) -> Fixed:
    """[.., n] to [.., groups, size]; the last group has copies of the last entry. Local."""
    width = x.shape[-1]
    groups = -(-width // size)
    places = torch.arange(groups * size, device=x.share.parts[0].device).clamp(max=width - 1)
    return x.view(lambda part: part[..., places].unflatten(-1, (groups, size)))


def _firsts(x: Fixed) -> Fixed:
    """The largest of each group of cut entries, [.., groups, size] to [.., groups]: see `_fastest`."""
    bits = rank_bits(x.shape[-1])
    rank = losses(x, 1, bits).view(lambda part: part.squeeze(-1))
    first = rank.less_than([1.0], bits=bits)
    return x.select(first, [1], [0.0]).sum(-1)


def larger(a: Fixed, b: Fixed, coarse: bool) -> Fixed:
    """max(a, b) elementwise, equal shapes; a where they are equal.

    With `coarse`, maybe the smaller if they differ by < 2^-6. |a|, |b| < 2^20. 57 bytes an element and 5 rounds, coarse
    49 and 4. By comparison keys 1 round (`chosen_below`).
    """
    d = a - b
    span = coarse_span(d, extra=1) if coarse else exact_span(d, extra=1)
    return a + chosen_below(d, [0.0], [-1], [0.0], span)


def at_once(x: Fixed, coarse: bool) -> bool:
    """Whether all entries of a row should meet at once, by comparison keys, in time and in bytes. Local, public."""
    width = x.shape[-1]
    if not _FEWEST <= width <= _MOST or "piecewise" not in x.session.protocol.primitives or not x.numel():
        return False
    rows, last = x.numel() // width, _chosen_shape(x)
    if last.bits > (x.session.ring.bits if x.width is None else x.width):
        return False
    bits, low = (coarse_span if coarse else exact_span)(x, extra=1)
    times = [x.proto.key_seconds(rows * (width >> level), PiecesShape(1, 1, bits, low)) for level in (1, 2, 3, 4)]
    pairs = PiecesShape(1, 1, exact_span(x, extra=1)[0])
    found = [x.proto.key_seconds(rows * width * (width - 1) // 2, pairs), x.proto.key_seconds(rows * width, last)]
    if any(each is None for each in found):
        return False
    return sum(filter(None, found)) < sum(filter(None, times[: (width - 1).bit_length()]))


def _chosen_shape(x: Fixed) -> PiecesShape:
    """Public sizes of the comparison of ranks: entries have `low` bits without a sign."""
    entry = x.frac + reach(x) + 1
    return PiecesShape(1, 1, entry + 2 + (x.shape[-1] - 1).bit_length(), entry)


def _first_of_all(x: Fixed) -> Fixed:
    """Maximum over the last dimension, [..., n] to [..., 1], exact, of distinct ranks: 2 rounds by comparison keys."""
    shape = _chosen_shape(x)
    entry = shape.low
    rank = losses(x, 1).view(lambda part: part.squeeze(-1))
    above = x.proto.add_public(x.share, 1 << (entry - 1))
    both = x.proto.add(x.proto.mul_public(rank.share, 1 << (entry + 1)), above)
    first = Pieces((-(1 << entry),), (((0, 1),),), ((0, 0),), shape.bits, shape.low)
    (made,) = x.proto.piecewise(both, first)
    total = x.with_share(made).sum(-1, keepdim=True)
    return total.with_share(total.proto.add_public(total.share, -(1 << (entry - 1))))


CUT_BITS = 4  # fractional bits of cut entries: a maximum is less than 3/16 below the largest; softmax wants 1/4

_FEWEST, _MOST = 5, 16  # entries that may meet at once: fewer take as many rounds in pairs, more have too many pairs


def concatenated(pieces: Sequence[Fixed], dim: int) -> Fixed:
    """Secrets of equal fractional bits, one after the other. Local."""
    columns = zip(*(piece.share.parts for piece in pieces), strict=True)
    made = pieces[0].with_share(Share(tuple(torch.cat(column, dim) for column in columns)))
    return reduce(Fixed.min_width_with, pieces, made)


def _last(x: Fixed, start: int, stop: int) -> Fixed:
    return x.view(lambda part: part[..., start:stop])


def _taken(x: Fixed, index: Tensor) -> Fixed:
    return x.view(lambda part: part.index_select(0, index))


# -- arg max ---------------------------------------------------------------------------------------------------------
def whole_words(x: Fixed) -> Fixed:
    """x, flattened, with zeros up to a multiple of 64: all lanes of its bits are then shared. Local."""
    spare = -x.numel() % 64
    return x.view(lambda part: torch.nn.functional.pad(part.reshape(-1), (0, spare)))


def times(bits: BitShare, moved: Sequence[Fixed]) -> list[Fixed]:
    """Secrets of one shape times the same bits (`whole_words`): 1 round, 32 bytes an element (trio, 64-bit ring)."""
    shape, count, lanes = moved[0].shape, moved[0].numel(), bits.count
    if len(moved) == 1:
        bits = BitShare(bits.parts, count)
        made = moved[0].proto.inject(bits, moved[0].share, [1], [0])
        return [moved[0].with_share(made.map(lambda part: part.reshape(shape)))]
    copies = BitShare(tuple(torch.cat([part] * len(moved), 1) for part in bits.parts), lanes * len(moved))
    flat = concatenated([whole_words(each) for each in moved], 0)
    made = flat.proto.inject(copies, flat.share, [1], [0])
    return [
        each.with_share(made.map(lambda part, at=at: part[at : at + count].reshape(shape)))  # type: ignore[misc]
        for at, each in ((place * lanes, each) for place, each in enumerate(moved))
    ]


def argmax(x: Fixed) -> Fixed:
    """Index of the first maximum over the last dimension: [..., n] to [...], with 0 fractional bits. |x| < 2^20.

    Exact, in rings of 32 and 64 bits. 90 bytes per entry (trio, 18 fractional bits, 64-bit ring), ceil(log2 n) levels
    of 5 rounds: 80 for a vocabulary of 50,272. By keys ceil(log2 n) + 2 rounds. Raises DomainError for n = 0.
    """
    return first_maximum(x)[1]


def first_maximum(x: Fixed) -> tuple[Fixed, Fixed]:
    """The maximum over the last dimension (fractional bits as x) and its index (none), [...]; costs as `argmax`."""
    x, width = x.restore_high_bits(), x.shape[-1]
    if width < 1:
        raise DomainError("argmax: got an empty last dimension; want at least one entry")
    if _in_one_number(x):
        return _unpacked(maximum(_packed(x)), width)
    device = x.share.parts[0].device
    counting = torch.arange(width, dtype=x.session.ring.dtype, device=device).expand(x.shape)
    index = x.with_share(x.proto.public(counting), 0)
    while x.shape[-1] > 1:
        x, index = _level(x, index)
    rows = x.shape[:-1]
    return x.view(lambda part: part.reshape(rows)), index.view(lambda part: part.reshape(rows))


def _in_one_number(x: Fixed) -> bool:
    """Whether differences of values with their indices fit the ring, and levels may take a round. Public and local."""
    bits = x.frac + reach(x) + 2 + _index_bits(x.shape[-1])
    return "piecewise" in x.session.protocol.primitives and x.shape[-1] > 1 and bits <= x.session.ring.bits - 2


def _index_bits(width: int) -> int:
    return (width - 1).bit_length()


def _packed(x: Fixed) -> Fixed:
    """Values with their indices below the last place: no two are equal, and of equal values the first is largest."""
    width = x.shape[-1]
    more = _index_bits(width)
    rest = torch.arange(width - 1, -1, -1, dtype=x.session.ring.dtype, device=x.share.parts[0].device)
    return x.with_share(x.proto.add_public(x.proto.mul_public(x.share, 1 << more), rest), x.frac + more)


def _unpacked(top: Fixed, width: int) -> tuple[Fixed, Fixed]:
    """Value and index of what `_packed` made, each [...], from [..., 1]: a division, and its remainder.

    The quotient may be one too large, and its remainder tells: 2 rounds by comparison keys.
    """
    more, shape = _index_bits(width), top.shape[:-1]
    top = top.view(lambda part: part.reshape(-1))
    quotient = top.with_share(top.proto.truncate(top.share, more), 0)
    whole = top.with_share(top.share, 0)
    rest = whole - quotient.scale_int(1 << more)
    beyond = negative(rest, more + 1)
    value, index = quotient - beyond, width - 1 - (rest + beyond.scale_int(1 << more))
    made = [each.view(lambda part: part.reshape(shape)) for each in (value, index)]
    return made[0].with_share(made[0].share, top.frac - more), made[1]


def _level(x: Fixed, index: Fixed) -> tuple[Fixed, Fixed]:
    """Winners of neighbouring pairs, and the last entry if it has no neighbour."""
    even = x.shape[-1] // 2 * 2
    first = [v.view(lambda part: part[..., 0:even:2]) for v in (x, index)]
    second = [v.view(lambda part: part[..., 1:even:2]) for v in (x, index)]
    gap, steps = first[0] - second[0], first[1] - second[1]
    # bits are used twice over, so lanes are filled up to whole words
    lost = times(sign_bits(whole_words(gap), [0.0], extra=1), [gap, steps])
    won = [kept - loss for kept, loss in zip(first, lost, strict=True)]
    if even == x.shape[-1]:
        return won[0], won[1]
    rest = [v.view(lambda part: part[..., even:]) for v in (x, index)]
    return concatenated([won[0], rest[0]], -1), concatenated([won[1], rest[1]], -1)
