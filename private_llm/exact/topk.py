"""Which entries of a row are among its k largest, as secret zeros and ones.

Every pair is compared once; an entry's rank is how many are larger, and among equals how many stand before it. All
ranks are there after one comparison, and one more of a few bits says which are below k, whatever n and k are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.exact.comparisons import sign_bits
from private_llm.tensor.fixed import Fixed, arithmetic


def among_largest(x: Fixed, k: int) -> Fixed:
    """1 for the k largest entries over the last dimension, else 0: [..., n] to [..., n], no fractional bits.

    |x| < 2^20. Exact; of equal entries the first ones count. n (n - 1) / 2 comparisons of an activation's bits, and n
    of log2 n bits: 1564 bytes and 7 rounds for rows of 8, 6255 and 8 for 16 (trio, 18 fractional bits, 64-bit ring).
    Local for k = n. Raises DomainError unless 0 < k <= n.
    """
    width = x.shape[-1]
    if not 0 < k <= width:
        raise DomainError(f"among_largest: got k={k}; want 1 to {width}, the entries of a row")
    if k == width:
        ones = torch.ones(x.shape, dtype=x.session.ring.dtype, device=x.share.parts[0].device)
        return x.with_share(x.proto.public(ones), 0)
    first, second = torch.triu_indices(width, width, 1).to(x.share.parts[0].device)
    gap = x.view(lambda part: part[..., first] - part[..., second])
    later = arithmetic(x.session, sign_bits(gap, [0.0], extra=1), [1.0], 0)  # [the first of the pair is smaller]
    later = later.view(lambda part: part[: gap.numel()].reshape(gap.shape))
    return _below(_ranks(later, first, second, width), k)


def _ranks(later: Fixed, first: Tensor, second: Tensor, width: int) -> Fixed:
    """How many entries come before each: pairs that it lost as the first, and did not win as the second."""
    shape = (*later.shape[:-1], width)

    def count(part: Tensor) -> Tensor:
        made = torch.zeros(shape, dtype=part.dtype, device=part.device)
        return made.index_add_(-1, first, part).index_add_(-1, second, -part)

    before = torch.arange(width, dtype=torch.float32)  # as the second of its pairs an entry comes after all of these
    return later.view(count) + before


def _below(rank: Fixed, k: int) -> Fixed:
    """[rank < k] for whole numbers, as 0 or 1."""
    bits = rank.below([float(k)], bits=(rank.shape[-1] - 1).bit_length() + 1)
    made = arithmetic(rank.session, bits, [1.0], 0)
    return made.view(lambda part: part[: rank.numel()].reshape(rank.shape))
