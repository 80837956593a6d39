"""A public number of active elements, whatever the data: which ones stays secret, and how many as well.

An opened pattern shows how many bits are set, and that number depends on the data. Here exactly `budget` positions are
opened: active ones beyond the budget are left out (the last ones), and as many dummies as are lacking are added, in an
order that nobody knows. So what is opened is a uniform choice of `budget` of n + budget positions, and nothing else.
This is Comet's shuffle-based indexing (section 4.2) with the sparsity level of its appendix E fixed instead of noisy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import DomainError, ProtocolAbort
from private_llm.protocols.permutation import Permutation, packed, unpacked
from private_llm.protocols.session import Session
from private_llm.protocols.share import BitShare, Share
from private_llm.tensor.fixed import Fixed, arithmetic


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen elements in a secret order.

    order: of `size` elements and then the dummies. places: where the chosen ones lie in it, int64 [budget], public.
    """

    order: Permutation
    places: Tensor
    size: int

    def take(self, x: Fixed) -> Fixed:
        """The chosen rows of x [size, ...]; a dummy's row is zero: [budget, ...]. One shuffle of all rows and dummies.

        Raises DomainError for another number of rows.
        """
        if not x.shape or x.shape[0] != self.size:
            raise DomainError(f"take: got rows {tuple(x.shape)}; want {self.size} in the first dimension")
        dummies = self.order.size - self.size
        whole = x.view(lambda part: torch.cat([part, part.new_zeros((dummies, *part.shape[1:]))]))
        moved = x.with_share(x.proto.shuffle(whole.share, self.order))
        return moved.view(lambda part: part[self.places.to(part.device)])

    def put_back(self, y: Fixed) -> Fixed:
        """Rows y [budget, ...] where `take` found them, zero elsewhere: [size, ...]. Undoes one shuffle of all rows.

        Raises DomainError for another number of rows.
        """
        if not y.shape or y.shape[0] != len(self.places):
            raise DomainError(f"put_back: got rows {tuple(y.shape)}; want {len(self.places)} in the first dimension")

        def spread(part: Tensor) -> Tensor:
            whole = part.new_zeros((self.order.size, *part.shape[1:]))
            whole[self.places.to(part.device)] = part
            return whole

        back = y.with_share(y.proto.shuffle(y.view(spread).share, self.order, undo=True))
        return back.view(lambda part: part[: self.size])


def choose(session: Session, active: BitShare, budget: int) -> Choice:
    """Exactly `budget` positions, all active ones of `active` (one vector of n bits) among them if they are that few.

    n bits to numbers, n + budget small comparisons and gates, one shuffle of n + budget bits, and the opening: 32 to 39
    bytes for each of n in trio, 37 to 44 in dealer and 55 to 67 in quad for n of 640 to 64,000, more with log n; 7 or 8
    rounds, 6 or 7, and 11. How many are active is not learned, only where the chosen ones lie in the secret order.
    Raises DomainError for a budget outside 1 to n, or more than one vector; ProtocolAbort if what is opened is not as
    many positions.
    """
    count = active.count
    if active.rows != 1 or not 0 < budget <= count:
        raise DomainError(
            f"choose: got budget={budget} and {active.rows} vectors of {count} bits; want a budget of 1 to {count}, "
            "and one vector"
        )
    protocol = session.protocol
    ones = arithmetic(session, active, [1.0], 0).view(lambda part: part.reshape(-1)[:count])
    before = ones.view(lambda part: part.cumsum(0, dtype=part.dtype))
    lacking = before.view(lambda part: part[-1:].expand(budget)) - torch.arange(budget, dtype=torch.float64)
    both = zip((before - float(budget)).share.parts, lacking.share.parts, strict=True)
    ranks = before.with_share(Share(tuple(torch.cat(pair) for pair in both)))
    # [how many up to here <= budget], and for dummy number j [how many in all <= j]
    within = ranks.below([1.0], bits=count.bit_length() + 2)
    zeros = protocol.xor(active, active)
    kept = protocol.and_(within, _followed_by_ones(active, protocol.invert(zeros), budget))
    order = protocol.permutation(count + budget)
    opened = protocol.open_shuffled(protocol.shuffle_bits(kept, order))
    if opened is None:
        raise ProtocolAbort("choose: this party is not told what is opened; want an order that nobody knows")
    return Choice(order, _places(opened[0], budget), count)


def _followed_by_ones(active: BitShare, ones: BitShare, budget: int) -> BitShare:
    """n bits and then `budget` ones. Local."""
    parts = []
    for part, one in zip(active.parts, ones.parts, strict=True):
        fill = unpacked(one, 1).expand(1, budget)
        parts.append(packed(torch.cat([unpacked(part, active.count), fill], dim=1)))
    return BitShare(tuple(parts), active.count + budget)


def _places(opened: Tensor, budget: int) -> Tensor:
    if opened.is_meta:
        return torch.arange(budget)
    places = opened.nonzero()[:, 0]
    if len(places) != budget:
        raise ProtocolAbort(f"choose: {len(places)} positions were opened; want {budget}: parties disagree")
    return places
