"""Keys padded to a few lengths, so that attention of one new token after the other repeats as one program.

A recorded program serves one length (`private_llm.replay`), and a decode step has another length each time. Padding
repeats the last entry: scores of copies change neither a row's maximum nor its range, and their exponentials are
taken out by a public factor of 0 before anything is summed. Rounds stay the same, because no length is padded beyond
the next power of two; bytes grow by those of the copies' scores, at most a quarter, from 113 entries on an eighth.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from private_llm.protocols.session import Session
from private_llm.protocols.share import Share
from private_llm.tensor.fixed import Fixed

STEP = 16  # lengths above 64 are padded to multiples of it, shorter ones to those of an eighth of the next power of two


def repeats(session: Session) -> bool:
    """Whether attention of this session is padded: public, and alike at all parties, whether they repeat or not."""
    config = session.config
    return session.protocol.can_repeat and session.ring.bits == 64 and config.approximations == "ours"


@contextmanager
def alike(session: Session) -> Iterator[None]:
    """Inside, all layers' scores, values and readers count as the widest, so that layers share programs. Local."""
    kept, session.numerics.shared_ranges = session.numerics.shared_ranges, frozenset({"score", "value", "read"})
    try:
        yield
    finally:
        session.numerics.shared_ranges = kept


def padded_length(length: int) -> int:
    """The next length that repeats."""
    step = min(STEP, max(1, (1 << (length - 1).bit_length()) // 8)) if length else 1
    return -(-length // step) * step


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class HeldShare(Share):
    """Entries of a buffer. repeated: (of a total, newest copies), None once the buffer has gone on. Local."""

    repeated: Callable[[int], Share | None]


def padded(rows: Fixed) -> Fixed:
    """Keys or values [B, G, k, D] as [B, G, `padded_length` of k, D]. Local; of a cache, views until it changes."""
    length, held = rows.shape[2], rows.share
    total = padded_length(length)
    share = held.repeated(total) if isinstance(held, HeldShare) else None
    if share is not None:
        return rows.with_share(share)
    more = total - length
    return rows.view(lambda part: torch.cat([part, part[:, :, -1:].expand(-1, -1, more, -1)], 2)) if more else rows


def presence(rows: Fixed) -> Fixed:
    """Which entries of rows [B, G, k, D], once they are padded, are no copies: a public factor of ones, then zeros.

    It comes as a value whose parts all are the factor, because values are what changes when a program is repeated.
    """
    length, part = rows.shape[2], rows.share.parts[0]
    most = 1 << length.bit_length()
    factor = _ones_then_zeros(most, part.dtype, str(part.device)).narrow(0, most - length, padded_length(length))
    return Fixed(rows.session, Share((factor,) * len(rows.share.parts)), 0)


@lru_cache(maxsize=4)
def _ones_then_zeros(ones: int, dtype: torch.dtype, device: str) -> Tensor:
    """Every layer's factors are views of it."""
    return (torch.arange(ones + STEP) < ones).to(dtype).to(device)
