"""Quad's oblivious shuffle: four sub-permutations, each known to three parties, every message known to two.

x = V - u - a2 - a1: each of the four components is unknown to one party (u to 0, a2 to 1, a1 to 2, V to 3). Step j
moves by a sub-permutation that party j alone does not know (pi = pi_0 . pi_3 . pi_2 . pi_1), under fresh masks that
the same three parties draw as before. With t_m = pi_j(c_m) - c'_m for the three masks c_m,
    V' = pi_j(V) - t_0 - t_1 - t_2.
A party that knows pi_j lacks only its own t_i, which two others know; it is uniform to it, as it lacks c'_i. Party j
lacks all that has pi_j in it and gets V', uniform to it, as it lacks c'_j. Party 3 needs nothing, and what it sends is
of masks alone, so it may be ahead. Three elements a step, 12 in all.

Who sends what, and why one liar is always seen (party 0 sends nothing, `verify` compares transcripts; `arithmetic`):
  step 1 (0, 2, 3 know it): party 3 sends t_2 to 2, who records it with 0; and t_0 to 0. Party 2 sends V' to 1.
          V' is recorded by 0 with 1 and with 2: a lie in t_0 is off at 0 alone, a lie in V' at 1 alone.
  step 2 (0, 1, 3): likewise with 1 and 2 exchanged.
  step 3 (0, 1, 2): party 2 sends t_1 to 1 and party 1 sends t_2 to 2, each recorded with 0. Party 2 tells 0 t_0, which
          1 records.
  step 0 (1, 2, 3): party 3 sends t_1 to 1 and t_2 to 2; the other evaluator sends a digest of the same, compared at
          once. (A lie differs for sure, whatever the secrets are, so stopping there tells nothing.) Party 2 tells 0
          V', which 1 records.
Undoing takes the steps back in the other order. 2 rounds on the way of V, 1 for the masks of step 3.

Opening bits: each party lacks one component and gets it from one party and its digest from another, compared at once:
what is opened decides what parties do next, so nobody may act on a lie until some later `verify`. Party 3, without
whom the others could open a result, tells party 0 whether its two agreed.
"""

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from private_llm.errors import ProtocolAbort, UnsupportedOp
from private_llm.net.ledger import Cost
from private_llm.protocols.quad.client import DIGEST_BYTES, as_bytes, as_tensor, digest
from private_llm.protocols.quad.records import Member, QuadParty, same
from private_llm.protocols.share import BitShare, Moved, Permutation, ShuffledBits, drawn, inverse, known, words_for
from private_llm.protocols.trio.division import Family

OrderStep = Callable[[Tensor, Tensor], Tensor]

_STEPS = (1, 2, 3, 0)  # in each the party of that number does not know the sub-permutation
_VALUE = 3  # the component that party 3 lacks: V; component m is unknown to party m


class QuadShuffles(Family):
    """One party's oblivious shuffles; a permutation's parts are its sub-permutations, by the party that lacks it.

    They raise ProtocolAbort, before anything is opened, where one party's message is not what another vouches for.
    """

    end: QuadParty

    def _order(self, size: int, blocks: int) -> tuple[Tensor | None, ...]:
        return tuple(None if words is None else drawn(words, blocks) for words in self._drawn_components(size))

    def random_bits(self, rows: int, count: int) -> BitShare:
        """Each of the four components from the stream of the three parties that know it, who need no record. Local."""
        held = self._drawn_components(rows * words_for(count))
        parts = self._parts([None if words is None else words.view(rows, -1) for words in held], torch.bitwise_xor)
        return BitShare(self.end._as_elements(parts), count)

    def _drawn_components(self, size: int) -> list[Tensor | None]:
        """Uniform words that three parties know, for each party that lacks them."""
        made: list[Tensor | None] = [
            None if lacking == self.party else self.end._draw_words(size, self._stream_without(lacking))
            for lacking in range(_VALUE)
        ]
        return [*made, None if self.end._order_stream is None else self.end._order_stream.words(size, self.end.device)]

    def _stream_without(self, lacking: int) -> int:
        """Which of this party's streams is that of all parties but one: of u, a2 or a1."""
        order = {0: (2, 1), 1: (2, 0), 2: (1, 0), 3: (2, 1, 0)}[self.party]  # a1's, a2's and u's stream, if held
        return order.index(lacking)

    # -- what is moved ---------------------------------------------------------------------------------------
    def _moved(self, parts: tuple[Tensor, ...], order: Permutation, kind: Moved, undo: bool) -> tuple[Tensor, ...]:
        """12 elements for each and 64 bytes, 3 rounds. All are moved, whatever places are wanted."""
        held, places = self._run(self._components(parts, kind.plus), order, kind, undo), kind.places
        moved = self._parts(held, kind.minus)
        return moved if places is None else tuple(part[places.to(part.device)] for part in moved)

    @staticmethod
    def moved_price(size: int, undo: bool, left: int | None) -> Cost:
        """By four sub-permutations: 12 elements for each, and two digests; 3 rounds."""
        between = 2 * size + DIGEST_BYTES
        masks = dict.fromkeys([(3, 0), (3, 1), (3, 2), (2, 0)], 2 * size)
        return Cost({**masks, (1, 2): between, (2, 1): between}, 3)

    def _components(self, parts: tuple[Tensor, ...], plus: OrderStep) -> list[Tensor | None]:
        """(u, a2, a1, V), None for the one that this party lacks."""
        first, second, third = parts
        if self.party == 3:
            return [third, second, first, None]
        value = plus(plus(first, second), third)
        return {0: [None, second, first, value], 1: [third, None, second, value], 2: [third, second, None, value]}[
            self.party
        ]

    def _parts(self, held: list[Tensor | None], minus: OrderStep) -> tuple[Tensor, ...]:
        u, a2, a1, value = held
        if self.party == 3:
            return known(a1), known(a2), known(u)
        first, second = {0: (a1, a2), 1: (a1, u), 2: (a2, u)}[self.party]
        masks = known(first), known(second)
        rest = minus(minus(known(value), masks[0]), masks[1])
        return (rest, *masks) if self.role else (*masks, rest)

    def _run(self, held: list[Tensor | None], order: Permutation, kind: Moved, undo: bool) -> list[Tensor | None]:
        """The components after all steps: first all that is of masks alone, then V from step to step."""
        if self.end.runs_ahead:
            raise UnsupportedOp(
                "shuffle: party 3 has no store at party 1 for what it computes ahead; want calls that are not "
                "preprocessed"
            )
        steps = _STEPS[::-1] if undo else _STEPS
        perms = [None if part is None else inverse(part) if undo else part for part in order.parts]
        changes: dict[int, dict[int, Tensor]] = {}
        masks = held[:_VALUE]
        for step in steps:
            masks, changes[step] = self._remasked(masks, perms[step], kind)
        self._send_masks(changes, kind)
        value = held[_VALUE]
        if self.party != _VALUE:
            for step in steps:
                value = self._stepped(step, known(value), perms[step], changes[step], kind)
        return [*masks, value]

    def _remasked(
        self, masks: list[Tensor | None], p: Tensor | None, kind: Moved
    ) -> tuple[list[Tensor | None], dict[int, Tensor]]:
        """Fresh masks, and t_m = p(c_m) - c'_m of those that this party knows, if it knows p."""
        fresh: list[Tensor | None] = []
        changes: dict[int, Tensor] = {}
        for number, mask in enumerate(masks):
            if mask is None:
                fresh.append(None)
                continue
            stream = self.end._streams[self._stream_without(number)]
            new = stream.draw(kind.count, kind.dtype, self.end.device).view(kind.shape)
            fresh.append(new)
            if p is not None:
                changes[number] = kind.minus(kind.move(mask, p), new)
        return fresh, changes

    def _send_masks(self, changes: dict[int, dict[int, Tensor]], kind: Moved) -> None:
        """Every party that knows a step's order gets the t that it lacks. Views: in the order of the steps' numbers."""
        shape = (2, *kind.shape)
        if self.party == 3:
            self.end.transport.send(Member(0), "shuffle", torch.stack([changes[1][0], changes[2][0]]))
            self.end.transport.send(Member(1), "shuffle", torch.stack([changes[2][1], changes[0][1]]))
            self.end.transport.send(Member(2), "shuffle", torch.stack([changes[1][2], changes[0][2]]))
            return
        if self.party == 0:
            self.end._transcripts[2].absorb(changes[1][2])
            self.end._transcripts[1].absorb(changes[2][1])
            self.end._transcripts[1].absorb(changes[3][1])
            self.end._transcripts[2].absorb(changes[3][2])
            changes[1][0], changes[2][0] = self.end.transport.recv(Member(3), "shuffle", shape, kind.dtype)
            changes[3][0] = self.end._told("shuffle", tuple(kind.shape), kind.dtype)
            return
        other = 3 - self.party
        apart = other  # the step in which this party gets its t from party 3 with party 0 as witness
        changes[apart][self.party], changes[0][self.party] = self.end.transport.recv(
            Member(3), "shuffle", shape, kind.dtype
        )
        theirs = self.end.transport.exchange(Member(other), "shuffle", changes[3][other].contiguous())
        changes[3][self.party] = theirs
        self.end._transcripts[0].absorb(changes[apart][self.party])
        self.end._transcripts[0].absorb(theirs)
        self.end._tell("shuffle", changes[3][0].contiguous())
        self.end.transport.send(Member(other), "shuffle", as_tensor(digest(changes[0][other])))
        if not self._vouched("shuffle", other, changes[0][self.party]):
            self._stop("shuffle")

    def _vouched(self, tag: str, witness: int, value: Tensor) -> bool:
        """Whether `witness`, who holds the same, sends the digest of what another party sent."""
        said = self.end.transport.recv(Member(witness), tag, (DIGEST_BYTES,), torch.uint8)
        return same([said], [digest(value)])

    def _stop(self, tag: str) -> NoReturn:
        self.end._deviation = True
        raise ProtocolAbort(
            f"{tag}: what one party sent is not what another party vouches for; nothing was opened; end the session "
            "and find out why"
        )

    def _stepped(self, step: int, value: Tensor, p: Tensor | None, changes: dict[int, Tensor], kind: Moved) -> Tensor:
        """V after one step, at parties 0, 1 and 2."""
        if self.party == step:
            if step == 0:
                return self.end._told("shuffle", tuple(kind.shape), kind.dtype)
            value = self.end.transport.recv(Member(3 - step), "shuffle", tuple(kind.shape), kind.dtype)
        else:
            value = kind.move(value, known(p))
            for change in changes.values():
                value = kind.minus(value, change)
            if step == 0:
                self.end._tell("shuffle", value)
            elif step != _VALUE and self.party == 3 - step:
                self.end.transport.send(Member(step), "shuffle", value)
        if step in (1, 2):
            self.end._confirm(value)
            if self.party:
                self.end.ledger.add_round("shuffle")
        return value

    # -- opening ---------------------------------------------------------------------------------------------
    def _opened(self, x: ShuffledBits) -> Tensor:
        """To all four parties; 4 bits each, 129 bytes more. After one `verify`: 3 rounds in all."""
        self.end.verify()
        held = [
            None if part is None else part.contiguous()
            for part in self._components(self.end._as_elements(x.bits.parts), torch.bitwise_xor)
        ]
        shape = tuple(x.bits.parts[0].shape)
        for lacking, teller, witness in ((0, 2, 3), (1, 2, 3), (2, 1, 3), (_VALUE, 1, 2)):
            mine = held[lacking]
            if mine is not None and self.party == teller:
                self.end.transport.send(Member(lacking), "open", mine)
            elif mine is not None and self.party == witness:
                self.end.transport.send(Member(lacking), "open", as_tensor(digest(mine)))
        teller, witness = {0: (2, 3), 1: (2, 3), 2: (1, 3), 3: (1, 2)}[self.party]
        if self.party in (1, 2):
            self.end.ledger.add_round("open")
        missing = self.end.transport.recv(Member(teller), "open", shape, torch.int64)
        agreed = self._vouched("open", witness, missing)
        if self.party == 3:  # the others open nothing without party 0, who opens nothing without this
            self.end.transport.send(Member(0), "open", as_tensor(bytes([agreed])))
        elif self.party == 0:
            answer = self.end.transport.recv(Member(3), "open", (1,), torch.uint8)
            agreed = agreed and (answer.is_meta or as_bytes(answer) == b"\1")
        if not agreed:
            self._stop("open")
        opened = missing
        for part in held:
            if part is not None:
                opened = opened ^ part
        return opened

    @staticmethod
    def open_shuffled_price(count: int, rows: int = 1) -> Cost:
        """`verify`, then to each party the component that it lacks and its digest; 3 rounds."""
        size = 8 * words_for(count) * rows
        told = dict.fromkeys([(2, 0), (2, 1), (1, 2), (1, 3)], size)
        vouched = dict.fromkeys([(3, 0), (3, 1), (3, 2), (2, 3)], DIGEST_BYTES)
        return QuadParty.verify_price() + Cost({**told, **vouched}, 1) + Cost({(3, 0): 1})
