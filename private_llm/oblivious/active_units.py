"""Which units of stored weights a call computes: opened in the secret order in which their owner stored them.

The owner puts the units (neurons, blocks of them, heads) in a secret order before the weights are shared, so what is
opened names no unit. The order stays as long as the sharing, so openings are linked: Comet's kept orders, whose price
is in docs/threat-model.md. With a budget, each vector opens exactly that many units: all active ones, or as many as it
allows, and units chosen uniformly among the others, so that the number of active ones does not show in one opening.
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.errors import DomainError, ProtocolAbort
from private_llm.protocols.permutation import ShuffledBits, owner_order, packed, unpacked
from private_llm.protocols.session import Session
from private_llm.protocols.share import BitShare
from private_llm.tensor.fixed import arithmetic


def opened_units(
    session: Session, active: BitShare, vectors: int, budget: int | None, expected: int | None = None
) -> Tensor:
    """bool [vectors, units]: the units to compute, in the owner's order, public. active: one row of all vectors' bits.

    budget: how many units each vector opens; None opens what is active, and so how many are. With None 1 round (quad
    3) and 3 bits a bit in trio; with a budget two shuffles of bits, a bit made a number, two small comparisons and a
    gate more. What the comparisons cost grows with the digits of `units`: of 128, 1024 and 16,384 units a bit is 35, 40
    and 46 bytes in trio (10 or 11 rounds in all), 40, 44 and 50 in dealer (8 or 9); nothing if it is all units.
    expected: without a budget, how many units a vector opens where costs are counted instead of computed (None: all of
    them). Raises DomainError for a budget outside 1 to units, or for vectors of unequal length, ProtocolAbort if
    parties disagree.
    """
    if active.rows != 1 or vectors < 1 or active.count % vectors:
        raise DomainError(
            f"opened_units: got {active.rows} rows of {active.count} bits; want one, of {vectors} equal vectors"
        )
    units = active.count // vectors
    if budget is not None and not 0 < budget <= units:
        raise DomainError(f"opened_units: got budget={budget}; want 1 to {units} units")
    if budget == units:
        return torch.ones((vectors, units), dtype=torch.bool)
    if budget is not None:
        active = _filled(session, active, vectors, budget)
    opened = session.protocol.open_shuffled(ShuffledBits(active, owner_order(active.count)))
    if opened is None:
        raise ProtocolAbort("opened_units: this party is not told what is opened; want an order that nobody knows")
    found = opened.view(vectors, units)
    if found.is_meta:  # where costs are counted
        return _supposed(vectors, units, budget or expected or units)
    if budget is not None and not bool((found.sum(1) == budget).all()):
        raise ProtocolAbort(f"opened_units: a vector has other than {budget} units: the parties disagree")
    return found


def _supposed(vectors: int, units: int, many: int) -> Tensor:
    """A pattern of `many` units in each vector, for counting costs. Local.

    A vector shares one unit with the one before it: almost as many different units as independent vectors have, and
    one connected component, which is the usual one.
    """
    starts = torch.arange(vectors)[:, None] * max(1, many - 1)
    return (torch.arange(units) - starts) % units < many


def _filled(session: Session, active: BitShare, vectors: int, budget: int) -> BitShare:
    """Exactly `budget` bits in each vector: the first active ones, then the first others, of an order nobody knows."""
    protocol, units = session.protocol, active.count // vectors
    moved = protocol.shuffle_bits(active, protocol.permutation(active.count, blocks=vectors))
    bits = moved.bits
    ones = arithmetic(session, bits, [1.0], 0).view(lambda part: part.reshape(-1)[: active.count].view(vectors, units))
    before = ones.view(lambda part: part.cumsum(1, dtype=part.dtype))
    # of the others, this one's number plus how many are active in all
    place = torch.arange(1.0, units + 1, dtype=torch.float64).expand(vectors, units)
    behind = before.view(lambda part: part[:, -1:] - part) + place
    within = before.stack(behind).below([budget + 1.0], bits=units.bit_length() + 2)
    first, others = _halves(within)
    # [first where active, others elsewhere]
    chosen = protocol.xor(others, protocol.and_(bits, protocol.xor(first, others)))
    return protocol.unshuffle_bits(ShuffledBits(chosen, moved.order))


def _halves(bits: BitShare) -> tuple[BitShare, BitShare]:
    """One row of 2 n bits as two of n. Local."""
    count = bits.count // 2
    lanes = [unpacked(part, bits.count) for part in bits.parts]
    return tuple(  # type: ignore[return-value]
        BitShare(tuple(packed(lane[:, cut : cut + count]) for lane in lanes), count) for cut in (0, count)
    )
