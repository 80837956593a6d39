"""Arg max over the last dimension, as a secret number.

A tournament of neighbours: entries 2j and 2j+1 meet, the first one wins ties, so the winner is the first maximum of
its block whatever the level. One comparison per pair; its bit moves value and index in one injection:
(a, i) - [a < b] (a - b, i - j).

Where comparison keys may be used, index and value are one number, 2^k value + (n - 1 - index): the largest of these is
the first maximum, a level is one round, and a division with its remainder takes both apart in the end.

One secret bit that moves several secrets: their products with it by a single injection.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from private_llm.errors import DomainError
from private_llm.exact.comparisons import reach, sign_bits
from private_llm.exact.maximum import concatenated, maximum
from private_llm.protocols.share import BitShare
from private_llm.tensor.fixed import Fixed, negative


def whole_words(x: Fixed) -> Fixed:
    """x, flattened, with zeros up to a multiple of 64: all lanes of its bits are then shared. Local."""
    spare = -x.numel() % 64
    return x.view(lambda part: torch.nn.functional.pad(part.reshape(-1), (0, spare)))


def times(bits: BitShare, moved: Sequence[Fixed]) -> list[Fixed]:
    """Each of several secrets of one shape times the same bits, which cover their `whole_words`: one injection.

    1 round, 32 bytes an element (trio, 64-bit ring). Fractional bits stay as they are.
    """
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
        for each, at in zip(moved, range(0, lanes * len(moved), lanes), strict=True)
    ]


def argmax(x: Fixed) -> Fixed:
    """Index of the first maximum over the last dimension: [..., n] to [...], with 0 fractional bits. |x| < 2^20.

    Exact, in rings of 32 and 64 bits. 90 bytes per entry (trio, 18 fractional bits, 64-bit ring), ceil(log2 n) levels
    of 5 rounds: 80 for a vocabulary of 50,272. By comparison keys ceil(log2 n) + 2 rounds. Raises DomainError for n =
    0.
    """
    return first_maximum(x)[1]


def first_maximum(x: Fixed) -> tuple[Fixed, Fixed]:
    """The maximum over the last dimension and its index, each [...], as `argmax` and at its cost.

    The maximum has the fractional bits of x, the index none.
    """
    width = x.shape[-1]
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
    return x.session.protocol.has_keys and x.shape[-1] > 1 and bits <= x.session.ring.bits - 2


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
