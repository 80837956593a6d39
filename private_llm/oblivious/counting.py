"""How many bits of a column are set: added up in binary for some layers of gates, then as ring elements.

A bit that becomes a ring element takes 8 bytes and more; three bits of one weight become two, a sum and a carry, by one
gate (3 bits in trio). Layers of gates take a round each, so their number is chosen by cost.

Local steps on shared bit vectors: every part of a share is changed alike.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from private_llm.net.ledger import Cost
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.registry import Pricing
from private_llm.protocols.share import BitShare
from private_llm.tensor.fixed import Fixed


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


DEPTHS = range(8)  # layers of gates that are tried: 64 bits become 9 in 7 layers


@lru_cache(maxsize=256)
def tree(rows: int, depth: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """How often three bits of each weight (2^0, 2^1, ..) are added up in each layer, and how many are left of each."""
    left, steps = [rows], []
    for _ in range(depth):
        triples = [many // 3 for many in left]
        if not any(triples):
            break
        steps.append(tuple(triples))
        carried = [0, *triples]
        left = [many - 2 * made + new for many, made, new in zip([*left, 0], [*triples, 0], carried, strict=True)]
        left = left if left[-1] else left[:-1]
    return tuple(steps), tuple(left)


def column_sums(x: Fixed, bits: BitShare, depth: int) -> Fixed:
    """Bits [rows, count] (whole words shared) to secret numbers [count] in the session of x: depth + 1 rounds."""
    weighted = [bits]
    steps, _ = tree(bits.rows, depth)
    for triples in steps:
        weighted = _added(x.proto, weighted, triples)
    constants = [1 << weight for weight, rows in enumerate(weighted) for _ in range(rows.rows)]
    return x.with_share(x.proto.inject(joined(*weighted), None, [0] * len(constants), constants), 0)


def _added(proto: Protocol, weighted: Sequence[BitShare], triples: Sequence[int]) -> list[BitShare]:
    """Three bits of one weight to their sum and a carry of the next: (a ^ b)(a ^ c) ^ a, one gate each, one round."""
    a, b, c = (
        joined(*(rows.some(at * many, many) for rows, many in zip(weighted, triples, strict=True) if many))
        for at in range(3)
    )
    carries = proto.xor(a, proto.and_(proto.xor(a, b), proto.xor(a, c)))
    sums = proto.xor(a, proto.xor(b, c))
    made: list[list[BitShare]] = [[] for _ in range(len(weighted) + 1)]
    at = 0
    for weight, (rows, many) in enumerate(zip(weighted, triples, strict=True)):
        made[weight] += [sums.some(at, many), rows.some(3 * many, rows.rows - 3 * many)]
        made[weight + 1].append(carries.some(at, many))
        at += many
    whole = [joined(*pieces) for pieces in made]
    return whole if whole[-1].rows else whole[:-1]


def cost(pricing: Pricing, rows: int, count: int, depth: int) -> Cost:
    """Of `column_sums` of [rows, count] bits."""
    steps, left = tree(rows, depth)
    total = pricing.numbers(count, sum(left))
    for triples in steps:
        total += pricing.prices.gate(count, sum(triples))
    return total
