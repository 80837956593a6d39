"""Rows to queues of one public length, and back, without opening who goes where: balanced routing, as in CryptoMoE
(arXiv 2511.01197, section 4), for mixtures of experts that do not compute all experts for all tokens.

Each queue takes the rows of largest weight for it (`topk`), as many as it has places, and none of weight zero: what an
expert makes of a token that nobody sent it might leave its range. Their order is kept: how many of the first t rows a
queue takes is a sum, and row t is in place c where that sum comes to c + 1 at t. So one comparison of a few bits with
all places says which row is in which place. That is a matrix of zeros and ones, and rows go to places and back by
products with it; the first is exact. Nothing is sent that depends on weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.exact.maximum import whole_words
from private_llm.oblivious.topk import largest
from private_llm.protocols.share import BitShare
from private_llm.tensor.fixed import Fixed, negative

LEAST = 4
"""Units in the last place from which a weight counts: zeros times something are truncated to one at most."""


@dataclass(frozen=True, eq=False)
class Queues:
    """Which row is in which place. places: secret zeros and ones [B, queues, length, rows], no fractional bits."""

    places: Fixed

    def gathered(self, x: Fixed) -> Fixed:
        """Rows of x [B, rows, H] in their places, [B, queues, length, H], exact: 1 round, 16 bytes an entry (trio)."""
        made = self._matrix(self.places).matmul(x.restore_high_bits(), frac=x.frac)
        return made.view(lambda part: part.view(*self.places.shape[:3], -1))

    def combined(self, made: Fixed, weights: Fixed) -> Fixed:
        """For each row the sum of what its places made, [B, queues, length, H], times its weights, [B, rows, queues].

        [B, rows, H]: 1 round and 16 bytes an element of `places`, and a product with one truncation.
        """
        spread = weights.view(lambda part: part.mT.unsqueeze(2).expand(self.places.shape).contiguous())
        back = self._matrix(self.places.mul(spread, frac=weights.frac)).view(lambda part: part.mT.contiguous())
        return back.matmul(made.view(lambda part: part.flatten(1, 2)))

    @staticmethod
    def _matrix(of: Fixed) -> Fixed:
        return of.view(lambda part: part.flatten(1, 2))


def queues_of(weights: Fixed, length: int) -> Queues:
    """The `length` rows of largest weight for each queue, from weights [B, rows, queues] of 0 and more.

    Of equal weights the first rows count; weights below LEAST units are 0, and places that are left over stay empty.
    `topk.cost` for B queues rows of `rows` entries, a comparison and a product of as many; then, for each row, queue
    and place, a comparison of log2 length bits by a public number and an injection: 24 bytes and 4 rounds (trio).
    Raises DomainError unless 0 < length <= rows.
    """
    batch, rows, queues = weights.shape
    if not 0 < length <= rows:
        raise DomainError(f"queues: got a length of {length}; want 1 to {rows}, the rows there are")
    by_queue = weights.view(lambda part: part.mT.contiguous())
    zero = negative(by_queue - LEAST * 2.0**-weights.frac)
    taken = largest(by_queue, length).mul(1 - zero.view(lambda part: part.view(by_queue.shape)), frac=0)
    so_far = taken.view(lambda part: part.cumsum(-1))  # [B, queues, rows], 0 to length
    padded = whole_words(so_far)
    bits = padded.less_than([place + 1.0 for place in range(length)], bits=length.bit_length() + 2)
    flat = BitShare(tuple(part.reshape(1, -1) for part in bits.parts), length * padded.numel())
    below = padded.with_share(padded.proto.inject(flat, None, [0], [1]), 0)  # [row t's sum is below c + 1]

    def arranged(part: Tensor) -> Tensor:
        part = part.view(length, -1)[:, : so_far.numel()].view(length, batch, queues, rows).permute(1, 2, 0, 3)
        return torch.cat([-part[..., :1], -part.diff(dim=-1)], -1)

    first = torch.zeros(rows)
    first[0] = 1.0  # before the first row all sums are 0
    return Queues(below.view(arranged) + first)
