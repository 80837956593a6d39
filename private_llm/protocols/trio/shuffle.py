"""Trio's oblivious shuffle: pi = pi0 . pi2 . pi1 with pi1 known to parties 0 and 1, pi2 to 0 and 2, pi0 to 1 and 2.

Forward (Comet's Protocol 1 for a helper that knows all masks; x = M - a1 - a2, fresh masks z1, z2):
    party 1 to 2:  m = pi1(x + a2) + r                        r from the stream of parties 0 and 1
    party 0 to 2:  h = z1 + z2 - pi2(pi1(a2)) - pi2(r)        of masks alone, so it may be ahead
    party 2:       pi2(m) + h = pi2(pi1(x)) + z1 + z2 = M'    and sends M' to party 1
Three elements so far, 2 rounds. Party 2 lacks r and z1, so m and h are uniform to it; party 1 lacks z2, so M' is.
So far party 0 knows all of it. Parties 1 and 2 go on with pi0, and masks y1, y2 that each draws with party 0:
    party 1 to 2:  pi0(z1) - y1        party 2 to 1:  pi0(z2) - y2        both hold pi0(M') less what these say
Two elements more and no round, as both travel with the messages above. Each is uniform to its receiver, who lacks y.
Where only some places of the final order are wanted, pi0 takes from M', z1 and z2 what ends there, and M' comes in the
final order: two elements for each row (m and h), and three for each that is wanted. What each party receives is then a
part of what it would receive for all rows, one that it could cut out itself: parties 1 and 2 know pi0 and everybody the
places. The places are public, to party 0 as well. Where they were opened in this order, they and the orders that one
party knows are independent of the rows that they stand for, as the sub-permutation it lacks (pi0, pi2 or pi1) is
uniform and nothing else is opened in it. Messages of party 0 and to it stay whole: pi0 of the places would tell it,
who knows pi1 and pi2, which rows these are.

Back, undoing pi0 first (2 elements, 1 round, as above) and then pi2 and pi1 from the other side:
    party 2 to 1:  m = pi2^-1(x + a1) + r                     r from the stream of parties 0 and 2
    party 1:       pi1^-1(m) + h = M'                         h, z1 from the stream of parties 0 and 1; sends M' to 2
    party 0 to 2:  z2 = h - z1 + pi1^-1(pi2^-1(a1)) + pi1^-1(r)
z2 is uniform to party 2, who lacks h. The same 5 elements, 3 rounds.
"""

import torch
from torch import Tensor

from private_llm.errors import ProtocolAbort
from private_llm.net.ledger import Cost
from private_llm.protocols.share import BitShare, Moved, Permutation, ShuffledBits, drawn, inverse, known, words_for
from private_llm.protocols.trio.division import Family

Parts = tuple[Tensor, Tensor]


class TrioShuffles(Family):
    """One party's oblivious shuffles."""

    def _order(self, size: int, blocks: int) -> tuple[Tensor | None, ...]:
        if self.role == 0:
            return (*(drawn(self.end._draw_words(size, which), blocks) for which in range(2)), None)
        own = drawn(self.end._draw_words(size), blocks)
        last = drawn(self._mutual_words(size), blocks)
        return (own, None, last) if self.role == 1 else (None, own, last)

    def random_bits(self, rows: int, count: int) -> BitShare:
        """Masks as of any bits, B by the seed of parties 1 and 2. Local. Raises ProtocolAbort if they share none."""
        size = rows * words_for(count)
        masks = [self.end._draw_words(size, which) for which in range(len(self.end._streams))]
        parts = masks if self.role == 0 else [self._mutual_words(size), *masks]
        return BitShare(tuple(part.view(rows, words_for(count)) for part in parts), count)

    def _mutual_words(self, size: int) -> Tensor:
        if self.end._mutual is None:
            raise ProtocolAbort("parties 1 and 2 share no seed for what they draw together; start the session anew")
        return self.end._mutual.words(size, self.end.device)

    # -- what is moved ---------------------------------------------------------------------------------------
    def _moved(self, parts: tuple[Tensor, ...], order: Permutation, kind: Moved, undo: bool) -> tuple[Tensor, ...]:
        return (self._back if undo else self._forth)((parts[0], parts[1]), order, kind)

    @staticmethod
    def moved_price(size: int, undo: bool, left: int | None) -> Cost:
        """Moving `size` bytes, of which `left` are wanted: only the first message to party 2 is of all."""
        end = size if left is None else left
        return Cost({(0, 2): size, (1, 2): size + end, (2, 1): 2 * end}, 3 if undo else 2)

    def _some(self, kind: Moved, arrays: int, which: int = 0) -> list[Tensor]:
        fresh = self.end._streams[which].draw(arrays * kind.count, kind.dtype, self.end.device)
        return list(fresh.view(arrays, *kind.shape))

    def _forth(self, parts: Parts, order: Permutation, kind: Moved) -> Parts:
        first, second, last = order.parts
        if self.role == 0:
            p, q = known(first), known(second)
            (r, z1), (z2,) = self._some(kind, 2), self._some(kind, 1, 1)
            cover = kind.move(kind.plus(kind.move(parts[1], p), r), q)
            self.end.transport.send(2, "shuffle", kind.minus(kind.plus(z1, z2), cover))
            return self._last_masks(kind)
        if self.role == 1:
            r, z = self._some(kind, 2)
            there = kind.plus(kind.move(parts[0], known(first)), r)
            own, y = self._ended(z, known(last), kind)
            m, theirs = self._reply([there, kind.minus(own, y)], [kind.left, kind.left])
            return kind.minus(kind.minus(m, own), theirs), y
        (z,) = self._some(kind, 1)
        got, theirs = self._await([kind, kind.left])
        m = kind.plus(kind.move(got, known(second)), self.end._from_helper("shuffle", tuple(kind.shape), kind.dtype))
        own, y = self._ended(z, known(last), kind)
        m = kind.move(m, kind.end(known(last)))
        self._answer([m, kind.minus(own, y)])
        return kind.minus(kind.minus(m, own), theirs), y

    def _last_masks(self, kind: Moved) -> Parts:
        return self._some(kind.left, 1)[0], self._some(kind.left, 1, 1)[0]

    def _ended(self, z: Tensor, last: Tensor, kind: Moved) -> Parts:
        """An evaluator's mask after the last sub-permutation, and the one that takes its place."""
        return kind.move(z, kind.end(last)), self._some(kind.left, 1)[0]

    def _back(self, parts: Parts, order: Permutation, kind: Moved) -> Parts:
        first, second, last = order.parts
        parts = self._unhidden(parts, last, kind)
        if self.role == 0:
            p, q = inverse(known(first)), inverse(known(second))
            h, z1 = self._some(kind, 2)
            (r,) = self._some(kind, 1, 1)
            cover = kind.move(kind.plus(kind.move(parts[0], q), r), p)
            z2 = kind.plus(kind.minus(h, z1), cover)
            self.end.transport.send(2, "shuffle", z2)
            return z1, z2
        if self.role == 2:
            (r,) = self._some(kind, 1)
            z = self.end._from_helper("shuffle", tuple(kind.shape), kind.dtype)
            (m,) = self._reply([kind.plus(kind.move(parts[0], inverse(known(second))), r)], [kind])
            return kind.minus(m, z), z
        h, z = self._some(kind, 2)
        (theirs,) = self._await([kind])
        m = kind.plus(kind.move(theirs, inverse(known(first))), h)
        self._answer([m])
        return kind.minus(m, z), z

    def _unhidden(self, parts: Parts, last: Tensor | None, kind: Moved) -> Parts:
        """Undo the last sub-permutation, 1 round: each evaluator tells the other what its mask becomes, masked."""
        if self.role == 0:
            return self._some(kind, 1)[0], self._some(kind, 1, 1)[0]
        back = inverse(known(last))
        (y,) = self._some(kind, 1)
        theirs = self.end.transport.exchange(3 - self.role, "shuffle", kind.minus(kind.move(parts[1], back), y))
        # part 0 is x + the other's mask, of which `theirs` says what it becomes less the other's new one
        return kind.minus(kind.move(parts[0], back), theirs), y

    def _reply(self, message: list[Tensor], answers: list[Moved]) -> list[Tensor]:
        """Send and wait for the answer: 2 rounds."""
        self._answer(message)
        return self._await(answers)

    def _answer(self, message: list[Tensor]) -> None:
        """Both evaluators book the way there and the way back."""
        self.end.transport.send(3 - self.role, "shuffle", torch.cat([each.reshape(-1) for each in message]))
        self.end.ledger.add_round("shuffle")

    def _await(self, answers: list[Moved]) -> list[Tensor]:
        self.end.ledger.add_round("shuffle")
        counts = [each.count for each in answers]
        got = self.end.transport.recv(3 - self.role, "shuffle", (sum(counts),), answers[0].dtype)
        return [piece.view(each.shape) for piece, each in zip(got.split_with_sizes(counts), answers, strict=True)]

    # -- opening ---------------------------------------------------------------------------------------------
    def _opened(self, x: ShuffledBits) -> Tensor:
        """The evaluators exchange their masks, 1 bit each way, and party 1 tells party 0 the masked bits."""
        masked, own = x.bits.parts[:2]
        if self.role == 0:
            return self.end.transport.recv(1, "open", tuple(masked.shape), torch.int64) ^ masked ^ own
        theirs = self.end.transport.exchange(3 - self.role, "open", own.contiguous())
        if self.role == 1:
            self.end.transport.send(0, "open", masked.contiguous())
        return masked ^ own ^ theirs

    @staticmethod
    def open_shuffled_price(count: int, rows: int = 1) -> Cost:
        """`open_shuffled` of `rows` vectors of `count` bits: one each way, and one to party 0; 1 round."""
        size = 8 * words_for(count) * rows
        return Cost({(1, 2): size, (2, 1): size, (1, 0): size}, 1)
