"""Arg max over the last dimension, as a secret number.

A tournament of neighbours: entries 2j and 2j+1 meet, the first one wins ties, so the winner is the first maximum of
its block whatever the level. One comparison per pair; its bit moves value and index in one injection:
(a, i) - [a < b] (a - b, i - j).
"""

from __future__ import annotations

import torch

from private_llm.errors import DomainError
from private_llm.exact.comparisons import sign_bits
from private_llm.exact.maximum import concatenated
from private_llm.exact.moves import times, whole_words
from private_llm.tensor.fixed import Fixed


def argmax(x: Fixed) -> Fixed:
    """Index of the first maximum over the last dimension: [..., n] to [...], with 0 fractional bits. |x| < 2^20.

    Exact, in rings of 32 and 64 bits. 90 bytes per entry (trio, 18 fractional bits, 64-bit ring), ceil(log2 n) levels
    of 5 rounds: 80 for a vocabulary of 50,272. Raises DomainError for n = 0.
    """
    return first_maximum(x)[1]


def first_maximum(x: Fixed) -> tuple[Fixed, Fixed]:
    """The maximum over the last dimension and its index, each [...], as `argmax` and at its cost.

    The maximum has the fractional bits of x, the index none.
    """
    width = x.shape[-1]
    if width < 1:
        raise DomainError("argmax: got an empty last dimension; want at least one entry")
    device = x.share.parts[0].device
    counting = torch.arange(width, dtype=x.session.ring.dtype, device=device).expand(x.shape)
    index = x.with_share(x.proto.public(counting), 0)
    while x.shape[-1] > 1:
        x, index = _level(x, index)
    rows = x.shape[:-1]
    return x.view(lambda part: part.reshape(rows)), index.view(lambda part: part.reshape(rows))


def _level(x: Fixed, index: Fixed) -> tuple[Fixed, Fixed]:
    """Winners of neighbouring pairs, and the last entry if it has no neighbour."""
    even = x.shape[-1] // 2 * 2
    first = [v.view(lambda part: part[..., 0:even:2]) for v in (x, index)]
    second = [v.view(lambda part: part[..., 1:even:2]) for v in (x, index)]
    lost = _lost(first[0] - second[0], first[1] - second[1])
    won = [kept - loss for kept, loss in zip(first, lost, strict=True)]
    if even == x.shape[-1]:
        return won[0], won[1]
    rest = [v.view(lambda part: part[..., even:]) for v in (x, index)]
    return concatenated([won[0], rest[0]], -1), concatenated([won[1], rest[1]], -1)


def _lost(gap: Fixed, steps: Fixed) -> tuple[Fixed, Fixed]:
    """[gap < 0] times gap and times steps, by one comparison and one injection on both.

    The bits are used twice over, so lanes are filled up to whole words with zeros.
    """
    values, indices = times(sign_bits(whole_words(gap), [0.0], extra=1), [gap, steps])
    return values, indices
