"""The dealer's oblivious shuffle: Comet's Protocol 1 on our sharing, one round.

pi = rho1 . tau2 = rho2 . tau1, where party i knows (tau_i, rho_i) and the dealer all four: tau1 and rho1 come from its
stream with party 1, tau2 from that with party 2, and rho2 = pi . tau1^-1 is sent to party 2 (4 bytes an element).
Together rho2 and tau2 are uniform and say nothing of pi. Both parties hold M = x + a. With masks c1, d1, z1 of party
1's stream and c2 of party 2's:
    party 1 to 2:  tau1(M) + c1                      party 2 to 1:  tau2(M) + c2
    party 1:       M' = rho1(tau2(M) + c2) + d1      party 2:       M' = rho2(tau1(M) + c1) + d2
    the dealer to party 2:  d2 = d1 + rho1(c2) - rho2(c1)   and   z2 = d1 + pi(a) + rho1(c2) - z1
so M' = pi(x) + z1 + z2 at both. Party 2 lacks c1, d1 and z1, which make what it receives uniform; party 1 lacks c2.
Undoing exchanges the parts: rho_i^-1 comes first and tau_i^-1 last. 2 elements before, 1 each way; 1 round.

The dealer knows pi; hidden from it as well (a last sub-permutation of parties 1 and 2 alone, trio/shuffle.py) it
costs 1 element each way more, in the same round (undone in a round of its own): of the wanted rows alone, where only
some are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.protocols.permutation import Moved, Permutation, check_size, drawn, inverse, known
from private_llm.protocols.trio.party import Trio
from private_llm.protocols.trio.shuffle import Parts


class DealerShuffles(Trio):
    """One endpoint's oblivious shuffles; a permutation's parts are (tau1, rho1, tau2, rho2, last)."""

    def permutation(self, size: int, *, hidden: bool = True, reuse: bool = False, blocks: int = 1) -> Permutation:
        """A fresh secret permutation: 4 bytes an element from the dealer to party 2. Raises DomainError below 1."""
        check_size(size, blocks)
        whole = frozenset[int]() if hidden else frozenset({0})
        if self.role == 0:
            tau1, rho1 = drawn(self._draw_words(size), blocks), drawn(self._draw_words(size), blocks)
            tau2 = drawn(self._draw_words(size, 1), blocks)
            rho2 = inverse(tau1)[tau2[rho1]]
            self.transport.send(2, "permutation", rho2.to(torch.int32))
            return Permutation(size, (tau1, rho1, tau2, rho2, None), whole, reuse)
        last = drawn(self._mutual_words(size), blocks) if hidden else None
        if self.role == 1:
            tau, rho = drawn(self._draw_words(size), blocks), drawn(self._draw_words(size), blocks)
            return Permutation(size, (tau, rho, None, None, last), whole, reuse)
        tau = drawn(self._draw_words(size), blocks)
        rho = self.transport.recv(0, "permutation", (size,), torch.int32).long()
        return Permutation(size, (None, None, tau, rho, last), whole, reuse)

    def _forth(self, tag: str, parts: Parts, order: Permutation, kind: Moved) -> Parts:
        tau1, rho1, tau2, rho2, last = order.parts
        return self._passed(tag, parts, (tau1, rho1, tau2, rho2), last, not order.known_to, kind)

    def _back(self, tag: str, parts: Parts, order: Permutation, kind: Moved) -> Parts:
        tau1, rho1, tau2, rho2, last = (None if part is None else inverse(part) for part in order.parts)
        if not order.known_to:
            parts = self._unhidden(tag, parts, order.parts[4], kind)
        return self._passed(tag, parts, (rho1, tau1, rho2, tau2), last, False, kind)

    def _passed(
        self, tag: str, parts: Parts, steps: tuple[Tensor | None, ...], last: Tensor | None, hidden: bool, kind: Moved
    ) -> Parts:
        """Each party moves by its first step and sends; the other moves what it gets by its second step."""
        if self.role == 0:
            _, then1, first2, then2 = map(known, steps)
            (c1, d1, z1), (c2,) = self._some(kind, 3), self._some(kind, 1, 1)
            shift = kind.plus(d1, kind.move(c2, then1))
            masks = kind.move(kind.move(kind.plus(*parts), first2), then1)
            z2 = kind.minus(kind.plus(shift, masks), z1)
            d2 = kind.minus(shift, kind.move(c1, then2))
            self.transport.send(2, tag, torch.stack([d2, z2]))
            return self._last_masks(kind) if hidden else (z1, z2)
        if self.role == 1:
            first, then = known(steps[0]), known(steps[1])
            c, d, z = self._some(kind, 3)
        else:
            first, then = known(steps[2]), known(steps[3])
            (c,) = self._some(kind, 1)
            d, z = self.transport.recv(0, tag, (2, *kind.shape), kind.dtype)
        message = [kind.plus(kind.move(kind.plus(*parts), first), c)]
        if not hidden:
            m = kind.plus(kind.move(self.transport.exchange(3 - self.role, tag, message[0].contiguous()), then), d)
            return kind.minus(m, z), z
        own, y = self._ended(z, known(last), kind)
        message.append(kind.minus(own, y))
        both = self.transport.exchange(3 - self.role, tag, torch.cat([each.reshape(-1) for each in message]))
        theirs, told = both.split_with_sizes([kind.count, kind.left.count])
        m = kind.move(kind.plus(kind.move(theirs.view(kind.shape), then), d), kind.end(known(last)))
        return kind.minus(kind.minus(m, own), told.view(kind.left.shape)), y
