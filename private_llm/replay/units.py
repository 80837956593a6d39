"""Parts of a step that are recorded, checked and repeated: any function of shared values that parties compute alike.

The first calls of a key run as always. The next one is recorded. The one behind runs as always, and then the program
runs on what that call drew and received: only if it sends and returns exactly the same it is used from then on. Modules
that are alike but for their weights share a program, and each of them is checked before it uses it. A
party decides alone; the others cannot tell, because masks, messages and ledgers are the same either way. What cannot be
recorded stays as it is, and `Replays.refused` says why.
"""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.kernels.drawn import StreamKey
from private_llm.kernels.watching import this_thread, watched_by
from private_llm.net.ledger import Ledger
from private_llm.net.transport import CLIENT
from private_llm.protocols.session import Owed, Session
from private_llm.protocols.share import Share
from private_llm.ranges import QUANTITIES
from private_llm.replay.program import Arena, Operand, Program
from private_llm.replay.recorder import Recorder
from private_llm.replay.taps import Live, Rerun, Witness, tapped
from private_llm.tensor.fixed import Fixed

MOST_PROGRAMS = 1024
"""Programs that a session keeps; the one that was used longest ago goes first."""
MOST_BYTES = 64 << 20
"""Largest memory of a program that is kept."""
MOST_HELD = 256 << 20
"""Bytes of constants and tables of all programs of a session; again the one that was used longest ago goes first."""

Compute = Callable[[Sequence[Fixed]], tuple[Sequence[Fixed], Hashable]]
"""A function of shared values: what it makes, and public facts about that, equal in every call of a key; None as facts
if a program could not make that."""


_HERE, _OWNER, _AS_IT_IS = range(3)
_Scope = tuple[int, str]
"""A module in the ledger: the one in which the unit was called, one within its owner, or any other."""


@dataclass(frozen=True)
class _Booked:
    """What a run adds to the ledger."""

    sent: tuple[tuple[_Scope, str, int, int], ...]
    rounds: tuple[tuple[_Scope, str, int], ...]
    macs: tuple[tuple[_Scope, int], ...]

    def book(self, ledger: Ledger, owner: str) -> None:
        """Add it, for an owner of this name."""
        outer = ledger.op_name
        starts = (ledger.scope_name, owner, "")
        for (kind, name), op, to, count in self.sent:
            ledger.sent[(starts[kind] + name, outer or op, to)] += count
        for (kind, name), op, count in self.rounds:
            ledger.rounds[(starts[kind] + name, outer or op)] += count
        for (kind, name), count in self.macs:
            ledger.macs[starts[kind] + name] += count


@dataclass(frozen=True)
class _Kept:
    """A program, and how its outputs become values: fractional bits, facts, and the sums owed to the range check."""

    program: Program
    fracs: tuple[int, ...]
    owed: tuple[int, ...]
    facts: Hashable
    booked: _Booked


@dataclass
class _Unit:
    """Calls of one key so far. checked, refused: the owners for which the program is right, and is not."""

    calls: int = 0
    kept: _Kept | None = None
    refused_all: bool = False
    checked: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Owner:
    """Whose call it is: a name, and the memories that belong to it alone: weights, and keys of masks that are made."""

    name: str = ""
    weights: tuple[torch.UntypedStorage | StreamKey, ...] = ()

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Where these memories begin, and their bytes."""
        return tuple([
            each.place if isinstance(each, StreamKey) else (each.data_ptr(), each.nbytes()) for each in self.weights
        ])  # fmt: skip

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where these memories begin."""
        return tuple([start for start, _ in self.places])


NOBODY = Owner()


class Replays:
    """The programs of one party's session.

    counts: how many calls were "plain", "recorded", "checked" and "repeated". refused: why keys stay as they are.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._units: OrderedDict[Hashable, _Unit] = OrderedDict()
        self._arena = Arena()
        self._live: Live | None = None

    def __len__(self) -> int:
        """Keys that were met, and are still known."""
        return len(self._units)

    def run(
        self, session: Session, key: Hashable, inputs: Sequence[Fixed], compute: Compute, owner: Owner = NOBODY,
        patience: int = 1,
    ) -> tuple[Sequence[Fixed], Hashable]:  # fmt: skip
        """What `compute` makes of the inputs, and its facts.

        key: all that decides what is computed, but sizes and the owner's weights. patience: calls before one is
        recorded.
        """
        unit = self._unit((key, tuple([(tuple(x.shape), x.frac, len(x.share.parts)) for x in inputs])))
        unit.calls += 1
        if owner.name in unit.checked and unit.kept is not None:
            return self._repeat(session, unit.kept, inputs, owner)
        if unit.refused_all or unit.calls <= patience or owner.name in unit.refused:
            self.counts["plain"] += 1
            made, facts = compute(inputs)
            if facts is None:
                unit.refused_all = True
            return made, facts
        if unit.kept is None:
            return self._record(session, unit, inputs, compute, owner)
        return self._check(session, unit, unit.kept, inputs, compute, owner)

    def _unit(self, key: Hashable) -> _Unit:
        found = self._units.get(key)
        if found is None:
            found = self._units[key] = _Unit()
            if len(self._units) > MOST_PROGRAMS:
                self._units.popitem(last=False)
        else:
            self._units.move_to_end(key)
        return found

    def _let_go(self) -> None:
        """Forget programs while all of them hold too much."""
        held = [(key, unit.kept.program.held) for key, unit in self._units.items() if unit.kept is not None]
        total = sum(size for _, size in held)
        for key, size in held[:-1]:
            if total <= MOST_HELD:
                break
            total -= size
            del self._units[key]

    def _record(
        self, session: Session, unit: _Unit, inputs: Sequence[Fixed], compute: Compute, owner: Owner
    ) -> tuple[Sequence[Fixed], Hashable]:  # fmt: skip
        self.counts["recorded"] += 1
        protocol, ledger = session.protocol, session.protocol.ledger
        recorder = Recorder(protocol.transport, protocol.mask_streams, owner.places)
        parts = [part.contiguous().clone() for x in inputs for part in x.share.parts]
        operands: list[Operand] = []
        for number in range(len(parts)):
            recorder.changing(parts[number]).first = -1
            operands.append(recorder.operand(parts[number]))
        before, owed = _Ledgers(ledger, owner.name), len(session.known.owed)
        with recorder.operations(), watched_by(recorder), tapped(protocol, recorder):
            made, facts = compute(_values(inputs, parts))
        new = session.known.owed[owed:]
        fracs = tuple(x.frac for x in made)
        try:
            if facts is None:
                raise UnsupportedOp("results that are no secret tensors")
            if any(rows is not None for _, _, rows in new):
                raise UnsupportedOp("a verdict for each row of a batch")
            outputs = [part for x in made for part in x.share.parts] + [p for sums, _, _ in new for p in sums.parts]
            parts.clear()
            program = recorder.program(operands, outputs)
            if program.size > MOST_BYTES:
                raise UnsupportedOp(f"a program of more than {MOST_BYTES >> 20} MiB")
            unit.kept = _Kept(program, fracs, tuple(bits for _, bits, _ in new), facts, before.booked(ledger))
        except Exception as error:  # noqa: BLE001 - the step is done; only its program is not
            unit.refused_all = True
            self.refused[str(error)] += 1
        else:
            self._let_go()
        return made, facts

    def _check(
        self, session: Session, unit: _Unit, kept: _Kept, inputs: Sequence[Fixed], compute: Compute, owner: Owner
    ) -> tuple[Sequence[Fixed], Hashable]:  # fmt: skip
        self.counts["checked"] += 1
        protocol, ledger = session.protocol, session.protocol.ledger
        witness = Witness(protocol.transport, protocol.mask_streams)
        given = [part.contiguous().clone() for x in inputs for part in x.share.parts]
        before, owed = _Ledgers(ledger, owner.name), len(session.known.owed)
        with watched_by(witness), tapped(protocol, witness):
            made, facts = compute(inputs)
        new = session.known.owed[owed:]
        outputs = [part for x in made for part in x.share.parts] + [p for sums, _, _ in new for p in sums.parts]
        rerun = Rerun(witness.notes)
        try:
            again = kept.program.run(rerun, self._arena, given, owner.addresses)
        except Exception as error:  # noqa: BLE001 - as above
            again = []
            self.refused[str(error)] += 1
        same = (kept.fracs, kept.owed, kept.facts) == (tuple(x.frac for x in made), tuple(b for _, b, _ in new), facts)
        right = (
            same and rerun.agrees(witness.notes) and kept.booked == before.booked(ledger)
            and len(again) == len(outputs) and all(map(torch.equal, again, outputs))
        )  # fmt: skip
        (unit.checked if right else unit.refused).add(owner.name)
        if not right:
            self.refused["a recorded program that gives something else"] += 1
        return made, facts

    def _repeat(
        self, session: Session, kept: _Kept, inputs: Sequence[Fixed], owner: Owner
    ) -> tuple[Sequence[Fixed], Hashable]:  # fmt: skip
        self.counts["repeated"] += 1
        protocol, known = session.protocol, session.known
        outside = self._live
        if outside is None or outside.transport is not protocol.transport:
            outside = self._live = Live(protocol.transport, protocol.mask_streams)
        parts = [part for x in inputs for part in x.share.parts]
        made = kept.program.run(outside, self._arena, parts, owner.addresses)
        kept.booked.book(protocol.ledger, owner.name)
        each = len(inputs[0].share.parts)
        shares = [Share(tuple(made[at : at + each])) for at in range(0, len(made), each)]
        values = [Fixed(session, share, frac) for share, frac in zip(shares, kept.fracs, strict=False)]
        sums: list[Owed] = [(share, bits, None) for share, bits in zip(shares[len(values) :], kept.owed, strict=True)]
        known.owed += sums
        return values, kept.facts


def _values(inputs: Sequence[Fixed], parts: Sequence[Tensor]) -> list[Fixed]:
    """The inputs with these parts."""
    left = iter(parts)
    return [Fixed(x.session, Share(tuple(next(left) for _ in x.share.parts)), x.frac) for x in inputs]


class _Ledgers:
    """What a ledger said at one time."""

    def __init__(self, ledger: Ledger, owner: str) -> None:
        self._here, self._owner = ledger.scope_name, owner
        self._held = Counter(ledger.sent), Counter(ledger.rounds), Counter(ledger.macs)

    def _scope(self, name: str) -> _Scope:
        if self._owner and (name == self._owner or name.startswith(f"{self._owner}.")):
            return _OWNER, name[len(self._owner) :]
        return (_HERE, "") if name == self._here else (_AS_IT_IS, name)

    def booked(self, ledger: Ledger) -> _Booked:
        """What it says more now."""
        sent, rounds, macs = self._held
        more_sent, more_rounds = Counter(ledger.sent) - sent, Counter(ledger.rounds) - rounds
        for key in [key for key in more_sent if key[2] == CLIENT]:  # "still computing", which comes when it comes
            del more_sent[key]
        more_macs = Counter(ledger.macs) - macs
        return _Booked(
            tuple([(self._scope(scope), op, to, count) for (scope, op, to), count in more_sent.items()]),
            tuple([(self._scope(scope), op, count) for (scope, op), count in more_rounds.items()]),
            tuple([(self._scope(scope), count) for scope, count in more_macs.items()]),
        )


_held: weakref.WeakKeyDictionary[Session, Replays] = weakref.WeakKeyDictionary()


def replays_of(session: Session) -> Replays | None:
    """The programs of a session, None where steps are not repeated: with `replay=False`, on GPUs, in a 32-bit ring,
    while costs are counted, where each row of a batch has its own verdict, and inside a step that is recorded.
    """
    if not session.config.replay or this_thread.watcher is not None or session.known.batch is not None:
        return None
    protocol = session.protocol
    if session.device != "cpu" or protocol.placed or session.ring.bits != 64 or not protocol.mask_streams:
        return None
    found = _held.get(session)
    if found is None:
        found = _held[session] = Replays()
    return found


def repeat(
    session: Session, key: Hashable, inputs: Sequence[Fixed], compute: Callable[[Sequence[Fixed]], Sequence[Fixed]],
    patience: int = 1,
) -> Sequence[Fixed]:  # fmt: skip
    """What `compute` makes of the inputs, repeated as a program where that can be. key, patience: as for `Replays.run`;
    the ranges of the module that is computed are part of the key anyway.
    """
    replays, known = replays_of(session), session.known
    if replays is None or known.pending is not None:
        return compute(inputs)

    def told(values: Sequence[Fixed]) -> tuple[Sequence[Fixed], Hashable]:
        made = compute(values)
        return made, () if known.pending is None else None

    return replays.run(session, (key, *map(session.exponent, QUANTITIES)), inputs, told, patience=patience)[0]


def forget(session: Session) -> None:
    """Let go of a session's programs, and of the weights that they read."""
    _held.pop(session, None)
