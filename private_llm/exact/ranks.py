"""Ranks of all entries of a row at once, and which are among its k largest.

Every pair is compared once; an entry's rank is how many are larger, and among equals how many stand before it.
All ranks are there after one comparison, and one more of a few bits says which are below k, whatever n and k are. Where
only the best groups of entries count, the same comparisons say how many of each group are larger than an entry, and
one product with the secret groups makes its rank of these. (`oblivious.topk` has other methods, chosen by cost.)
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.exact.comparisons import exact_span
from private_llm.tensor.fixed import Fixed, negative


def rank_bits(size: int) -> int:
    """Of a rank below `size`, with a sign."""
    return (size - 1).bit_length() + 1


@dataclass(frozen=True)
class Groups:
    """Neighbours of a row as `count` equal groups, of which `kept` count: those whose `best` largest sum to most."""

    count: int
    kept: int
    best: int


def among_largest(x: Fixed, k: int) -> Fixed:
    """1 for the k largest entries over the last dimension, else 0: [..., n] to [..., n], no fractional bits.

    |x| < 2^20. Exact; of equal entries the first ones count. n (n - 1) / 2 comparisons of an activation's bits, and n
    of log2 n bits: 934 bytes and 7 rounds for rows of 8, 3600 and 8 for 16 (trio, 18 fractional bits, 64-bit ring);
    by comparison keys 2 rounds.
    Local for k = n. Raises DomainError unless 0 < k <= n.
    """
    width = x.shape[-1]
    if not 0 < k <= width:
        raise DomainError(f"among_largest: got k={k}; want 1 to {width}, the entries of a row")
    if k == width:
        ones = torch.ones(x.shape, dtype=x.session.ring.dtype, device=x.share.parts[0].device)
        return x.with_share(x.proto.public(ones), 0)
    return _below(losses(x, 1, rank_bits(width)).view(lambda part: part.squeeze(-1)), k)


def among_largest_of_groups(x: Fixed, k: int, groups: Groups) -> Fixed:
    """1 for the k largest entries of the best groups, else 0: [..., n] to [..., n], no fractional bits.

    |x| < 2^20 / best. Which groups count is as secret as which entries do. Exact, equals as in `among_largest`. The
    comparisons of all pairs of entries and of groups, and a product for each entry where a group's sum has to be made
    (best < n / count), one for its rank and one for its group. Raises DomainError for groups that do not divide n, or
    hold fewer than k entries.
    """
    width = x.shape[-1]
    size = width // max(groups.count, 1)
    if groups.count * size != width or not 0 < groups.kept <= groups.count or not 0 < groups.best <= size:
        raise DomainError(f"among_largest: got {groups} for rows of {width} entries; want groups of equal size")
    if not 0 < k <= groups.kept * size:
        raise DomainError(f"among_largest: got k={k}; want 1 to {groups.kept * size}, the entries of the groups kept")
    if groups.kept == groups.count:
        return among_largest(x, k)
    lost = losses(x, groups.count, rank_bits(width))  # [..., n, groups]
    own = torch.arange(width, device=x.share.parts[0].device) // size
    inside = lost.view(lambda part: part.gather(-1, own.view(-1, 1).expand(*part.shape[:-1], 1)).squeeze(-1))
    held = x if groups.best == size else x.mul(_below(inside, groups.best, size), frac=x.frac)
    kept = among_largest(held.view(lambda part: part.unflatten(-1, (groups.count, size)).sum(-1)), groups.kept)
    rank = lost.matmul(kept.view(lambda part: part.unsqueeze(-1)), frac=0, width=rank_bits(width)).view(
        lambda part: part.squeeze(-1)
    )
    return _below(rank, k).mul(kept.view(lambda part: part[..., own]), frac=0)


def losses(x: Fixed, groups: int, width: int | None = None) -> Fixed:
    """How many of each group beat an entry, being larger, or equal and before it: [..., n] to [..., n, groups].

    width: bits of the result that are read (default: all).
    """
    count, pairs = x.shape[-1], _pairs_of(x.shape[-1], groups, x.session.ring.dtype, x.share.parts[0].device)
    gap = x.view(lambda part: part[..., pairs.first] - part[..., pairs.second])
    later = negative(gap, exact_span(gap, extra=1)[0], width)  # [the first of the pair is smaller]
    shape = (*x.shape[:-1], count * groups)

    def summed(part: Tensor) -> Tensor:
        part = part.reshape(gap.shape)
        made = torch.zeros(shape, dtype=part.dtype, device=part.device)
        made.index_add_(-1, pairs.at_first, part).index_add_(-1, pairs.at_second, -part)
        return made.view(*x.shape, groups)

    total = later.view(summed)
    return total.with_share(total.proto.add_public(total.share, pairs.before))


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Of all pairs of a row: positions of the first and the second, and in [entries x groups] where their bits count,
    int64; before: how many of each group stand before an entry, which comes after all of these as a second.
    """

    first: Tensor
    second: Tensor
    at_first: Tensor
    at_second: Tensor
    before: Tensor


@lru_cache(maxsize=64)
def _pairs_of(count: int, groups: int, dtype: torch.dtype, device: torch.device) -> _Pairs:
    """Public, the same at every call, so they stay where they are used; never written to."""
    size = count // groups
    first, second = torch.triu_indices(count, count, 1)
    before = (torch.arange(count).view(-1, 1) - size * torch.arange(groups)).clamp(0, size).to(dtype)
    made = (first, second, first * groups + second // size, second * groups + first // size, before)
    return _Pairs(*(each.to(device) for each in made))


def _below(rank: Fixed, k: int, most: int | None = None) -> Fixed:
    """[rank < k] for whole numbers below `most` (default: the entries of a row), as 0 or 1."""
    most = rank.shape[-1] if most is None else most
    made = negative(rank - k, rank_bits(most))
    return made.view(lambda part: part.reshape(rank.shape))
