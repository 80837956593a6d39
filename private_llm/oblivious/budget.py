"""A public number of active elements for each of several vectors, whatever the data: which ones stays secret.

An opened pattern shows how many bits are set, and that number depends on the data. Here exactly `budget` elements of
each vector are opened: all active ones and others in place of those that are lacking, or as many active ones as the
budget allows. Both are chosen uniformly, in an order that nobody knows, so no place of a vector is favoured, and a
vector's choice depends on no other vector. What is opened is a uniform choice of `budget` places, and nothing else.
This is Comet's shuffle-based indexing (section 4.2) with the sparsity level of its appendix E fixed instead of noisy.

Units of stored weights (neurons, blocks of them, heads) are opened in the secret order in which their owner stored them
(`opened_units`), so what is opened names no unit. That order stays as long as the sharing, so openings are linked:
Comet's kept orders, whose price is in docs/threat-model.md.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import DomainError, ProtocolAbort
from private_llm.protocols.session import Session
from private_llm.protocols.share import BitShare, Permutation, ShuffledBits, owner_order, relaned
from private_llm.tensor.fixed import Fixed, arithmetic


@dataclass(frozen=True, slots=True)
class ChosenUnits:
    """Elements in a secret order of `size` and then dummies, if any; places: of chosen ones, int64 [chosen], public."""

    order: Permutation
    places: Tensor
    size: int

    def take(self, x: Fixed) -> Fixed:
        """Chosen rows of x [size, ...], 0 for dummies: [chosen, ...]. One shuffle of all rows and dummies. Raises
        DomainError for another number of rows.
        """
        if not x.shape or x.shape[0] != self.size:
            raise DomainError(f"take: got rows {tuple(x.shape)}; want {self.size} in the first dimension")
        dummies = self.order.size - self.size
        whole = x.view(lambda part: torch.cat([part, part.new_zeros((dummies, *part.shape[1:]))]))
        moved = x.with_share(x.proto.shuffle(whole.share, self.order))
        return moved.view(lambda part: part[self.places.to(part.device)])

    def put_back(self, y: Fixed) -> Fixed:
        """Rows y [chosen, ...] back in place: [size, ...], else 0. One shuffle. Raises DomainError for other y."""
        if not y.shape or y.shape[0] != len(self.places):
            raise DomainError(f"put_back: got rows {tuple(y.shape)}; want {len(self.places)} in the first dimension")

        return shuffled_back(y, self.order, self.places).view(lambda part: part[: self.size])


def shuffled_back(y: Fixed, order: Permutation, places: Tensor) -> Fixed:
    """Rows y of these places in a secret order, zeros elsewhere, all put back: [size, ...]. Undoes one shuffle."""

    def spread(part: Tensor) -> Tensor:
        whole = part.new_zeros((order.size, *part.shape[places.dim() :]))
        whole[places.to(part.device)] = part
        return whole

    return y.with_share(y.proto.shuffle(y.view(spread).share, order, undo=True))


def choose(session: Session, active: BitShare, budget: int, vectors: int = 1) -> ChosenUnits:
    """Exactly `budget` elements of each of `vectors` equal vectors, in a secret order within each vector.

    active: one row of all vectors' bits. Cost: `filled`, one shuffle of as many bits, and the opening: of vectors of
    128, 1024 and 16,384 a bit is 35, 40 and 46 bytes in trio (10 or 11 rounds in all), 40, 44 and 50 in dealer (8 or
    9). How many are active is not learned, only where the chosen ones lie in the secret order. Raises DomainError for a
    budget outside 1 to the length, or vectors of unequal length; ProtocolAbort if other than so many are opened.
    """
    units = check_budget(active, vectors, budget)
    protocol = session.protocol
    order = protocol.permutation(active.count, blocks=vectors)
    opened = protocol.open_shuffled(protocol.shuffle_bits(filled(session, active, vectors, budget), order))
    return ChosenUnits(order, _places(opened.view(vectors, units), budget), active.count)


def check_budget(active: BitShare, vectors: int, budget: int | None) -> int:
    """The length of each vector. Raises DomainError for vectors of unequal length, or a budget outside 1 to it."""
    if active.rows != 1 or vectors < 1 or active.count % vectors:
        raise DomainError(
            f"budget: got {active.rows} rows of {active.count} bits; want one, of {vectors} equal vectors"
        )
    units = active.count // vectors
    if budget is not None and not 0 < budget <= units:
        raise DomainError(f"budget: got {budget}; want 1 to {units}, the elements of a vector")
    return units


def filled(session: Session, active: BitShare, vectors: int, budget: int) -> BitShare:
    """Exactly `budget` bits in each vector: the first active ones, then the first others, of an order nobody knows.

    Two shuffles of bits, a bit made a number, two small comparisons and a gate for each bit. Nothing is opened.
    """
    protocol, units = session.protocol, active.count // vectors
    moved = protocol.shuffle_bits(active, protocol.permutation(active.count, blocks=vectors))
    bits = moved.bits
    ones = arithmetic(session, bits, [1.0], 0).view(lambda part: part.reshape(-1)[: active.count].view(vectors, units))
    before = ones.view(lambda part: part.cumsum(1, dtype=part.dtype))
    # of the others, this one's number plus how many are active in all
    place = torch.arange(1.0, units + 1, dtype=torch.float64).expand(vectors, units)
    after = before.view(lambda part: part[:, -1:] - part) + place
    within = before.stack(after).less_than([budget + 1.0], bits=units.bit_length() + 2)
    first, others = (
        relaned(within, lambda part, at=at: part[:, at : at + active.count], active.count)  # type: ignore[misc]
        for at in (0, active.count)
    )
    # [first where active, others elsewhere]
    chosen = protocol.xor(others, protocol.and_(bits, protocol.xor(first, others)))
    return protocol.unshuffle_bits(ShuffledBits(chosen, moved.order))


def _places(opened: Tensor, budget: int) -> Tensor:
    if opened.is_meta:
        return torch.arange(len(opened) * budget)
    if not bool((opened.sum(1) == budget).all()):
        raise ProtocolAbort(f"choose: a vector has other than {budget} places: the parties disagree")
    return opened.view(-1).nonzero()[:, 0]


def opened_units(
    session: Session, active: BitShare, vectors: int, budget: int | None, expected: int | None = None
) -> Tensor:
    """bool [vectors, units]: the units to compute, in the owner's order, public. active: one row of all vectors' bits.

    budget: how many units each vector opens; None opens what is active, and so how many are. With None 1 round (quad
    3) and 3 bits a bit in trio; with a budget two shuffles of bits, a bit made a number, two small comparisons and a
    gate more. What the comparisons cost grows with the digits of `units`: of 128, 1024 and 16,384 units a bit is 35, 40
    and 46 bytes in trio (10 or 11 rounds in all), 40, 44 and 50 in dealer (8 or 9); nothing if it is all units.
    expected: without a budget, how many units a vector opens where costs are counted (None: all). Raises DomainError
    for a budget outside 1 to units, or for vectors of unequal length, ProtocolAbort if parties disagree.
    """
    units = check_budget(active, vectors, budget)
    if budget == units:
        return torch.ones((vectors, units), dtype=torch.bool)
    if budget is not None:
        active = filled(session, active, vectors, budget)
    opened = session.protocol.open_shuffled(ShuffledBits(active, owner_order(active.count)))
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
