"""Local steps on shared bit vectors: every part of a share is changed alike."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from private_llm.protocols.protocol import Protocol
from private_llm.protocols.share import BitShare


def each(bits: BitShare, change: Callable[[Tensor], Tensor]) -> BitShare:
    """A function of words that is linear in the bits, on vectors that stay as long."""
    return BitShare(tuple(map(change, bits.parts)), bits.count)


def joined(*bits: BitShare) -> BitShare:
    """Vectors of equal length one after the other."""
    return BitShare(tuple(torch.cat(parts) for parts in zip(*(b.parts for b in bits), strict=True)), bits[0].count)


def copies(bits: BitShare, times: int) -> BitShare:
    """All vectors `times` times over."""
    return bits if times == 1 else each(bits, lambda part: part.repeat(times, 1))


def xor_all(proto: Protocol, first: BitShare, others: BitShare) -> BitShare:
    """Exclusive or of one vector and all others."""
    for row in range(others.rows):
        first = proto.xor(first, others.row(row))
    return first
