"""The k largest entries of secret rows, without opening anything: which they are, and what they are in order.

What is sent, and how often, depends on public shapes alone. Of equal entries the first ones count. Three methods,
chosen by cost: ranks of all pairs, a network (sort_network.py) and a search for the k-th largest (digit_search.py).

By ranks every pair of a row is compared once, so the depth hardly grows with n. [a comes before b] counts for the rank
of b, its inverse for that of a. An entry's rank is how many of the n - 1 others come before it (counting.py), and one
more comparison of log2 n bits says which ranks are below k. n (n - 1) / 2 comparisons a row: for some tens of entries.
"""

from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.exact.comparisons import reach
from private_llm.net.ledger import Cost
from private_llm.oblivious import counting, digit_search, sort_network
from private_llm.oblivious.sort_network import Order
from private_llm.protocols.registry import Pricing
from private_llm.protocols.share import BitShare, packed, relaned
from private_llm.tensor.fixed import Fixed

Method = Literal["auto", "pairs", "network", "search"]
"""How the k largest are found; "auto" is the one that takes least time by its cost (`method_for`)."""

MOST_PAIRS = 1 << 23  # pairs that are compared at once take about 55 bytes of a party's memory each, half a gigabyte


def largest_bits(x: Fixed, k: int, method: Method = "auto", bits: int | None = None) -> BitShare:
    """1 for the k largest entries over the last dimension of x [..., n], else 0: one row of x.numel() bits.

    Exact, exactly k bits a row, of equal entries the first ones. bits: |ring element| < 2^(bits - 1), by default what
    calibration or the range of activations says (`exact.comparisons.reach`), at most ring bits - 1. Nothing is opened.
    Cost: `cost`; 39 bits in trio, 32 rows: of 64 entries by pairs 887 bytes an entry and 13 rounds, of 2048 with k =
    512 by the network 1462 bytes an entry and 329 rounds, by search 228 bytes an entry and 312 rounds. Local for k = n.
    Raises DomainError unless 0 < k <= n and 2 <= bits < ring bits, and for an unknown method.
    """
    rows, width, bits = _checked(x, k, method, bits)
    if k == width or not rows:
        return _all(x)
    pricing = Pricing.of(x.session.config)
    found = method_for(pricing, rows, width, k, bits) if method == "auto" else method
    flat = x.view(lambda part: part.reshape(rows, width))
    if found == "pairs":
        return by_pairs(flat, k, bits, depth_for(pricing, rows, width, bits))
    if found == "network":
        return sort_network.largest_bits(flat, k, bits)
    return digit_search.largest_bits(flat, k, digit_search.plan_for(pricing, rows, width, bits))


def largest(x: Fixed, k: int, method: Method = "auto", bits: int | None = None) -> Fixed:
    """As numbers 0 and 1 in the shape of x, no fractional bits: 1 round, 24 bytes an entry more (trio, 64 bits)."""
    made = x.proto.inject(largest_bits(x, k, method, bits), None, [0], [1])
    shape = x.shape
    return x.with_share(made.map(lambda part: part.reshape(shape)), 0)


def largest_values(x: Fixed, k: int, bits: int | None = None) -> tuple[Fixed, Fixed]:
    """The k largest entries over the last dimension, largest first, and their indices: each [..., k].

    A stable sort cut off after k: of equal entries the first one comes first. Indices have no fractional bits. By the
    network, whose comparators move values and indices (`sort_network.sort_cost`). Range and errors as `largest_bits`.
    """
    rows, width, bits = _checked(x, k, "network", bits)
    if not rows:
        return x.view(lambda part: part[..., :k]), x.with_share(x.share, 0).view(lambda part: part[..., :k])
    order = Order(width, bits, x.session.ring.bits)
    entries = order.entries(x.view(lambda part: part.reshape(rows, width)), moved=True)
    values, indices = sort_network.sort(entries, order, 0, k)
    shape = (*x.shape[:-1], k)
    return x.with_share(values.share.map(lambda part: part.reshape(shape))), indices.view(
        lambda part: part.reshape(shape)
    )


def cost(pricing: Pricing, rows: int, width: int, k: int, bits: int, method: Method = "auto") -> Cost:
    """Bytes by link and rounds of `largest_bits` for `rows` rows of `width` entries."""
    if k == width or not rows:
        return Cost()
    found = method_for(pricing, rows, width, k, bits) if method == "auto" else method
    if found == "pairs":
        return pairs_cost(pricing, rows, width, bits, depth_for(pricing, rows, width, bits))
    if found == "network":
        return sort_network.cost(pricing, rows, width, k, bits)
    return digit_search.cost(pricing, rows, width, bits)


@lru_cache(maxsize=1024)
def method_for(pricing: Pricing, rows: int, width: int, k: int, bits: int) -> Literal["pairs", "network", "search"]:
    """The method that takes least time, by its rounds and bytes on the configured network. Public.

    Never more than MOST_PAIRS pairs, however far the parties. Without `bandwidth_mbit`, at 1 Gbit/s: on one machine a
    byte and a round take about what they do there (docs/decisions/233-top-k-methods-are-priced-at-one-gigabit.md).
    """
    methods: tuple[Literal["pairs", "network", "search"], ...] = ("pairs", "network", "search")
    methods = methods if rows * width * (width - 1) // 2 <= MOST_PAIRS else methods[1:]
    return min(methods, key=lambda each: pricing.seconds(cost(pricing, rows, width, k, bits, each)))


def _checked(x: Fixed, k: int, method: str, bits: int | None) -> tuple[int, int, int]:
    """Rows, their width, and bits of an entry."""
    width = x.shape[-1] if x.shape else 0
    if not 0 < k <= width:
        raise DomainError(f"top-k: got k={k}; want 1 to {width}, the entries of a row")
    if method not in get_args(Method):
        raise DomainError(f"top-k: got method={method!r}; want one of {', '.join(get_args(Method))}")
    ring = x.session.ring.bits
    bits = min(ring - 1, x.frac + reach(x) + 1) if bits is None else bits
    if not 2 <= bits < ring:
        raise DomainError(
            f"top-k: got bits={bits}; want 2 to {ring - 1}: differences need one more, the ring has {ring}"
        )
    return x.numel() // width, width, bits


def _all(x: Fixed) -> BitShare:
    uniform = x.proto.random_bits(1, x.numel())
    return x.proto.invert(x.proto.xor(uniform, uniform))


# -- ranks of all pairs -----------------------------------------------------------------------------------------------
def by_pairs(x: Fixed, k: int, bits: int, depth: int) -> BitShare:
    """The k of x [rows, n], 0 < k < n, |element| < 2^(bits - 1): bits [rows * n]; depth: as `counting.column_sums`."""
    proto, (rows, width) = x.proto, x.shape
    device = x.share.parts[0].device
    first, second = torch.triu_indices(width, width, 1).to(device)
    gap = x.view(lambda part: part[:, first] - part[:, second])
    loses = gap.less_than([0.0], bits=bits + 1)  # [the second comes before the first]
    pair, leads = _partners(width)
    pair, count = pair.to(device), rows * width

    def arranged(part: Tensor) -> Tensor:
        return part.view(rows, -1)[:, pair].transpose(0, 1).reshape(width - 1, -1)

    before = relaned(loses, arranged, count)
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
    return (width - 1).bit_length() + 1


def pairs_cost(pricing: Pricing, rows: int, width: int, bits: int, depth: int) -> Cost:
    """Of `by_pairs`, for every k."""
    compared = pricing.comparison(rows * width * (width - 1) // 2, bits + 1)
    counted = counting.cost(pricing, width - 1, rows * width, depth)
    return compared + counted + pricing.comparison(rows * width, _rank_bits(width))


@lru_cache(maxsize=1024)
def depth_for(pricing: Pricing, rows: int, width: int, bits: int) -> int:
    """The number of layers of gates that takes least time by its cost. Public."""
    return min(counting.DEPTHS, key=lambda depth: pricing.seconds(pairs_cost(pricing, rows, width, bits, depth)))
