"""`dealer`: two computing parties (1 and 2) and a dealer (endpoint 0), who knows masks and gets no value of theirs.

The sharing is Trio's (trio/arithmetic.py), because its party 0 is a dealer: [x] = x + a1 + a2 with a1 known to party 1,
a2 to party 2, both to the dealer; between the two parties x is held additively, (x + a2) - a2 = x and the like.
What the dealer sends (shares of products of masks, of mask bits, of rounding corrections) is the correlated
randomness of a product, a comparison or a truncation. It depends on masks and public facts alone (shapes, and which
rows of a cache go on), so the dealer may be days ahead of calls whose public facts are known before.

What differs from Trio:
  1. The dealer receives no share and no key of a value, only what all may know (see threat). Trio's client hands
     party 0 keys of point functions for token lookups; here it shares one-hot rows between the two parties: 2 `domain`
     elements an index from the client, then a product with the table (one finish), local for a public table.
  2. `remask`: a bilinear product first gives both operands fresh masks b1, b2 (streams of dealer and party i):
     party i sends b_i - a_i for both operands and adds what it receives to its masked component. That is the opening
     of Beaver's multiplication as in CrypTen and Comet: (|x| + |y|) elements each way, 1 round, on top of the product.
     Without it a value keeps its mask for life; products are safe without new masks because E, which contains all
     cross terms of masks, is shared with a fresh mask g each time (trio/arithmetic.py), and only the output is sent.

Leakage: none to a single one of the three (each message is masked by a stream its receiver lacks). The dealer with
either party, or the two parties together, know everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.kernels.forms import Form
from private_llm.net.transport import Transport
from private_llm.protocols.adder import DEFAULT_ADDER, Adder
from private_llm.protocols.arithmetic import taking_part
from private_llm.protocols.dealer.shuffle import DealerShuffles
from private_llm.protocols.exact import ExactTruncation
from private_llm.protocols.narrow import BitWidths
from private_llm.protocols.share import Share
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring


class TwoPartyDealer(DealerShuffles):
    """One endpoint of `dealer`: the dealer itself (0) or a computing party (1, 2).

    Costs are Trio's but for what is here.
    """

    name = "dealer"
    one_hot = True

    def __init__(
        self, party: int, transport: Transport, ring: Ring, pair_seeds: dict[int, Seed], input_keys: Sequence[Seed],
        adder: Adder = DEFAULT_ADDER, device: str = "cpu", comparing: Seed | None = None, remask: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(party, transport, ring, pair_seeds, input_keys, adder, device, comparing)
        self.remask = remask

    def mul(self, x: Share, y: Share, shift: int = 0, widths: BitWidths | None = None) -> Share:
        """As Trio's, with `remask` after one round of |x| + |y| elements each way (|x| for a square of one share).

        That is 16 bytes for each element of an operand (64-bit ring).
        """
        return super().mul(*self._operands(x, y), shift, widths)

    def bilinear(
        self, form: Form, x: Share, y: Share, shift: int = 0, select: Tensor | None = None,
        widths: BitWidths | None = None,
    ) -> Share:  # fmt: skip
        """As Trio's, with `remask` after one round of |x| + |y| elements each way (before broadcasting).

        Of y only what the form reads counts. 16 bytes for each element of an operand (64-bit ring).
        """
        if self.remask:
            form, y = taking_part(form, y)
            x, y = self._operands(x, y)
        return super().bilinear(form, x, y, shift, select, widths)

    def _operands(self, x: Share, y: Share) -> tuple[Share, Share]:
        """Both operands under fresh masks, if the products of this session want that."""
        if not self.remask:
            return x, y
        held = [x] if x is y else [x, y]
        sizes = [share.numel() for share in held]
        fresh = [self._draw(sum(sizes), which) for which in range(len(self._streams))]
        if self.party == 0:
            parts = fresh
        else:
            (mine,) = fresh
            old = torch.cat([share.parts[1].reshape(-1) for share in held])
            theirs = self.transport.exchange(3 - self.party, "remask", mine - old)
            parts = [torch.cat([share.parts[0].reshape(-1) for share in held]) + theirs, mine]
        pieces = zip(*(part.split(sizes) for part in parts), strict=True)
        made = [Share(tuple(p.view(share.shape) for p in piece)) for share, piece in zip(held, pieces, strict=True)]
        return made[0], made[-1]


class ExactDealer(ExactTruncation, TwoPartyDealer):
    """`dealer` with exact divisions; what they cost more is in `protocols/exact.py`."""
