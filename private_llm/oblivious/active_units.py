"""Which units of stored weights a call computes: opened in the secret order in which their owner stored them.

The owner puts the units (neurons, blocks of them, heads) in a secret order before the weights are shared, so what is
opened names no unit. The order stays as long as the sharing, so openings are linked: Comet's kept orders, whose price
is in docs/threat-model.md. With a budget, each vector opens exactly that many units: all active ones, or as many as it
allows, and units chosen uniformly among the others, so that the number of active ones does not show in one opening.
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.errors import ProtocolAbort
from private_llm.oblivious.budget import check_budget, filled
from private_llm.protocols.permutation import ShuffledBits, owner_order
from private_llm.protocols.session import Session
from private_llm.protocols.share import BitShare


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
    units = check_budget(active, vectors, budget)
    if budget == units:
        return torch.ones((vectors, units), dtype=torch.bool)
    if budget is not None:
        active = filled(session, active, vectors, budget)
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
