"""Top-k by ranks: every pair of a row is compared once, so the depth hardly grows with n.

[a comes before b] counts for the rank of b, its inverse for that of a. An entry's rank is how many of the n - 1 others
come before it (counting.py), and one more comparison of log2 n bits says which ranks are below k. n (n - 1) / 2
comparisons a row: for rows of some tens of entries. Of a pair of equals the first one comes before the other.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from private_llm.net.ledger import Cost
from private_llm.oblivious import counting
from private_llm.oblivious.pricing import Pricing
from private_llm.protocols.permutation import packed, unpacked
from private_llm.protocols.share import BitShare
from private_llm.tensor.fixed import Fixed


def largest_bits(x: Fixed, k: int, bits: int, depth: int) -> BitShare:
    """The k largest of each row of x [rows, n], 0 < k < n, as one row of bits [rows * n].

    |ring element| < 2^(bits - 1). depth: of `counting.column_sums`; it changes the cost alone.
    """
    proto, (rows, width) = x.proto, x.shape
    device = x.share.parts[0].device
    first, second = torch.triu_indices(width, width, 1).to(device)
    gap = x.view(lambda part: part[:, first] - part[:, second])
    loses = gap.less_than([0.0], bits=bits + 1)  # [the second comes before the first]
    pair, leads = _partners(width)
    pair, count = pair.to(device), rows * width

    def arranged(part: Tensor) -> Tensor:
        return packed(unpacked(part, gap.numel()).view(rows, -1)[:, pair].transpose(0, 1).reshape(width - 1, -1))

    before = BitShare(tuple(map(arranged, loses.parts)), count)
    nothing = proto.xor(before, before)
    turned = packed(leads.to(device).repeat(1, rows))
    every = proto.invert(nothing)
    before = proto.xor(before, BitShare(tuple(part & turned for part in every.parts), count))
    return counting.column_sums(x, before, depth).less_than([float(k)], bits=_rank_bits(width))


@lru_cache(maxsize=64)
def _partners(width: int) -> tuple[Tensor, Tensor]:
    """Of each entry and its n - 1 others, [n - 1, n]: the pair's number, and 1 where the other one is its first."""
    other = torch.arange(width - 1).view(-1, 1)
    entry = torch.arange(width).expand(width - 1, width)
    leads = other < entry
    other = torch.where(leads, other, other + 1)
    first, second = torch.minimum(other, entry), torch.maximum(other, entry)
    return first * (2 * width - first - 1) // 2 + second - first - 1, leads.to(torch.uint8)


def _rank_bits(width: int) -> int:
    """Of a rank minus k, with its sign."""
    return (width - 1).bit_length() + 1


def depth_cost(pricing: Pricing, rows: int, width: int, bits: int, depth: int) -> Cost:
    """Of `largest_bits`, for every k."""
    compared = pricing.comparison(rows * width * (width - 1) // 2, bits + 1)
    counted = counting.cost(pricing, width - 1, rows * width, depth)
    return compared + counted + pricing.comparison(rows * width, _rank_bits(width))


@lru_cache(maxsize=1024)
def depth_for(pricing: Pricing, rows: int, width: int, bits: int) -> int:
    """The number of layers of gates that takes least time by its cost. Public."""
    return min(counting.DEPTHS, key=lambda depth: pricing.seconds(depth_cost(pricing, rows, width, bits, depth)))


def cost(pricing: Pricing, rows: int, width: int, bits: int) -> Cost:
    """Of the cheapest depth."""
    return depth_cost(pricing, rows, width, bits, depth_for(pricing, rows, width, bits))
