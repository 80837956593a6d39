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

Its oblivious shuffle is Comet's Protocol 1 on our sharing, one round.
pi = rho1 . tau2 = rho2 . tau1, where party i knows (tau_i, rho_i) and the dealer all four: tau1 and rho1 come from its
stream with party 1, tau2 from that with party 2, and rho2 = pi . tau1^-1 is sent to party 2 (4 bytes an element).
Together rho2 and tau2 are uniform and say nothing of pi. Both parties hold M = x + a. With masks c1, d1, z1 of party
1's stream and c2 of party 2's:
    party 1 to 2:  tau1(M) + c1                      party 2 to 1:  tau2(M) + c2
    party 1:       M' = rho1(tau2(M) + c2) + d1      party 2:       M' = rho2(tau1(M) + c1) + d2
    the dealer to party 2:  d2 = d1 + rho1(c2) - rho2(c1)   and   z2 = d1 + pi(a) + rho1(c2) - z1
so M' = pi(x) + z1 + z2 at both. Party 2 lacks c1, d1 and z1, which make what it receives uniform; party 1 lacks c2.
Undoing exchanges the parts: rho_i^-1 comes first and tau_i^-1 last. 2 elements before, 1 each way; 1 round.

The dealer knows pi. A last sub-permutation of parties 1 and 2 alone (trio/shuffle.py) hides the order from it as well,
for 1 element each way more, in the same round (undone in a round of its own), of the wanted rows alone.
"""

import torch
from torch import Tensor

from private_llm.kernels.forms import BilinearForm
from private_llm.net.ledger import Cost
from private_llm.protocols.ends import PartySetup
from private_llm.protocols.share import BitWidths, Moved, Permutation, Share, drawn, inverse, known, taking_part
from private_llm.protocols.trio.arithmetic import TrioArithmetic
from private_llm.protocols.trio.division import TrioParty
from private_llm.protocols.trio.shuffle import Parts, TrioShuffles
from private_llm.ring.ring import Ring


class DealerParty(TrioParty):
    """One endpoint of `dealer`: the dealer itself (0) or a computing party (1, 2)."""

    name = "dealer"
    one_hot = True


class DealerArithmetic(TrioArithmetic):
    """Trio's arithmetic, with fresh masks for operands where `matmul="remask"` asks for them."""

    def __init__(self, end: TrioParty, setup: PartySetup) -> None:
        super().__init__(end, setup)
        self._remask = setup.config.matmul == "remask"

    def mul(self, x: Share, y: Share, shift: int = 0, widths: BitWidths | None = None) -> Share:
        """As Trio's; with `remask` after |x| + |y| elements each way (|x| for a square of one share), 1 round."""
        return super().mul(*self._operands(x, y), shift, widths)

    def bilinear(
        self, form: BilinearForm, x: Share, y: Share, shift: int = 0, select: Tensor | None = None,
        widths: BitWidths | None = None,
    ) -> Share:  # fmt: skip
        """As `mul`, elements before broadcasting; of y only what the form reads counts."""
        if self._remask:
            form, y = taking_part(form, y)
            x, y = self._operands(x, y)
        return super().bilinear(form, x, y, shift, select, widths)

    def _operands(self, x: Share, y: Share) -> tuple[Share, Share]:
        if not self._remask:
            return x, y
        held = [x] if x is y else [x, y]
        sizes = [share.numel() for share in held]
        fresh = [self.end._draw(sum(sizes), which) for which in range(len(self.end._streams))]
        if self.party == 0:
            parts = fresh
        else:
            (mine,) = fresh
            old = torch.cat([share.parts[1].reshape(-1) for share in held])
            theirs = self.end.transport.exchange(3 - self.party, "remask", mine - old)
            parts = [torch.cat([share.parts[0].reshape(-1) for share in held]) + theirs, mine]
        pieces = zip(*(part.split(sizes) for part in parts), strict=True)
        made = [Share(tuple(p.view(share.shape) for p in piece)) for share, piece in zip(held, pieces, strict=True)]
        return made[0], made[-1]

    @staticmethod
    def remask_price(ring: Ring, *operands: int) -> Cost:
        """Fresh masks for operands of these many elements: all of them each way, 1 round; nothing from the dealer."""
        count = sum(operands) * ring.bytes
        return Cost({(1, 2): count, (2, 1): count}, 1)


class DealerShuffles(TrioShuffles):
    """Oblivious shuffles; a permutation's parts are (tau1, rho1, tau2, rho2, last)."""

    def _order(self, size: int, blocks: int) -> tuple[Tensor | None, ...]:
        """4 bytes an element from the dealer to party 2."""
        if self.role == 0:
            tau1, rho1 = drawn(self.end._draw_words(size), blocks), drawn(self.end._draw_words(size), blocks)
            tau2 = drawn(self.end._draw_words(size, 1), blocks)
            rho2 = inverse(tau1)[tau2[rho1]]
            self.end.transport.send(2, "permutation", rho2.to(torch.int32))
            return tau1, rho1, tau2, rho2, None
        last = drawn(self._mutual_words(size), blocks)
        tau = drawn(self.end._draw_words(size), blocks)
        if self.role == 1:
            return tau, drawn(self.end._draw_words(size), blocks), None, None, last
        return None, None, tau, self.end._from_helper("permutation", (size,), torch.int32).long(), last

    @staticmethod
    def permutation_price(size: int) -> Cost:
        """One of the sub-permutations, 4 bytes an element, to party 2."""
        return Cost({(0, 2): 4 * size})

    def _forth(self, parts: Parts, order: Permutation, kind: Moved) -> Parts:
        tau1, rho1, tau2, rho2, last = order.parts
        return self._passed(parts, (tau1, rho1, tau2, rho2), last, True, kind)

    def _back(self, parts: Parts, order: Permutation, kind: Moved) -> Parts:
        tau1, rho1, tau2, rho2, _ = (None if part is None else inverse(part) for part in order.parts)
        parts = self._unhidden(parts, order.parts[4], kind)
        return self._passed(parts, (rho1, tau1, rho2, tau2), None, False, kind)

    def _passed(
        self, parts: Parts, steps: tuple[Tensor | None, ...], last: Tensor | None, ends: bool, kind: Moved
    ) -> Parts:
        """Each party moves and sends, the other moves on; ends: with the last sub-permutation, unlike the dealer."""
        if self.role == 0:
            _, then1, first2, then2 = map(known, steps)
            (c1, d1, z1), (c2,) = self._some(kind, 3), self._some(kind, 1, 1)
            shift = kind.plus(d1, kind.move(c2, then1))
            masks = kind.move(kind.move(kind.plus(*parts), first2), then1)
            z2 = kind.minus(kind.plus(shift, masks), z1)
            d2 = kind.minus(shift, kind.move(c1, then2))
            self.end.transport.send(2, "shuffle", torch.stack([d2, z2]))
            return self._last_masks(kind) if ends else (z1, z2)
        if self.role == 1:
            first, then = known(steps[0]), known(steps[1])
            c, d, z = self._some(kind, 3)
        else:
            first, then = known(steps[2]), known(steps[3])
            (c,) = self._some(kind, 1)
            d, z = self.end._from_helper("shuffle", (2, *kind.shape), kind.dtype)
        message = kind.plus(kind.move(kind.plus(*parts), first), c)
        if not ends:
            m = kind.plus(
                kind.move(self.end.transport.exchange(3 - self.role, "shuffle", message.contiguous()), then), d
            )
            return kind.minus(m, z), z
        own, y = self._ended(z, known(last), kind)
        both = torch.cat([message.reshape(-1), kind.minus(own, y).reshape(-1)])
        both = self.end.transport.exchange(3 - self.role, "shuffle", both)
        theirs, told = both.split_with_sizes([kind.count, kind.left.count])
        m = kind.move(kind.plus(kind.move(theirs.view(kind.shape), then), d), kind.end(known(last)))
        return kind.minus(kind.minus(m, own), told.view(kind.left.shape)), y

    @staticmethod
    def moved_price(size: int, undo: bool, left: int | None) -> Cost:
        """Two elements before, two each way, the second of the `left` alone; 1 round (undone: 2)."""
        online = size + (size if left is None else left)
        return Cost({(0, 2): 2 * size, (1, 2): online, (2, 1): online}, 2 if undo else 1)
