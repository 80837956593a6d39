"""Parts of a step that are recorded, checked and repeated: any function of shared values that parties compute alike.

The first calls of a key run as always. The next one is recorded. The one behind runs as always, and then the program
runs on what that call drew and received: only if it sends and returns exactly the same it is used from then on. Modules
that are alike but for their weights share a program, and each of them is checked before it uses it. A
party decides alone; the others cannot tell, because masks, messages and ledgers are the same either way. What cannot be
recorded stays as it is, and `Replays.refused` says why.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels.drawn import StreamKey
from private_llm.kernels.watching import this_thread, watched_by
from private_llm.protocols.session import Owed, Session
from private_llm.protocols.share import Share
from private_llm.ranges import QUANTITIES
from private_llm.replay import graphs
from private_llm.replay.graph_recorder import GraphRecorder
from private_llm.replay.graphs import GraphProgram, Pool
from private_llm.replay.middle import Middle, this_call
from private_llm.replay.program import Arena, Inner, Program
from private_llm.replay.publics import Encoding
from private_llm.replay.recorder import Recorder
from private_llm.replay.taps import Live, Rerun, Tap, Witness, tapped
from private_llm.replay.told import Booked, Met, Seen, Told
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.scale import encode_public

MOST_PROGRAMS = 1024
"""Programs that a session keeps; the one that was used longest ago goes first."""
MOST_BYTES = 64 << 20
"""Largest memory of a program that is kept."""
MOST_HELD = 256 << 20
"""Bytes of constants and tables of all programs of a session; again the one that was used longest ago goes first."""

Result = tuple[Sequence[Fixed], Hashable]
Compute = Callable[[Sequence[Fixed]], Result]
"""A function of shared values: what it makes, and public facts about that, equal in every call of a key; None as facts
if a program could not make that."""


@dataclass(frozen=True)
class _Kept:
    """A program, and how its outputs become values: fractional bits, facts, and the sums owed to the range check."""

    program: Program | GraphProgram
    forms: tuple[tuple[int, int | None], ...]
    owed: tuple[int, ...]
    facts: Hashable
    booked: Booked
    middle: Met | None = None
    encodings: tuple[Encoding, ...] = ()


@dataclass
class _Unit:
    """Calls of one key so far. checked, refused: the owners for which the program is right, and is not.

    place: of graphs, whether they run within others: these are counted apart.
    """

    place: tuple[object, ...] = ()
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
        self.unsettled = 0
        """Calls that Python computed because their program was not ready yet."""
        self.waits = False
        """Whether a larger unit is computed for the first time, within which nothing is recorded."""
        self._arenas = (Arena(), Arena())  # the second one is for what is computed in a middle
        self._pools = (Pool(), Pool())
        self._inside = 0
        self._live: Live | None = None

    def __len__(self) -> int:
        """Keys that were met, and are still known."""
        return len(self._units)

    def run(
        self, session: Session, key: Hashable, inputs: Sequence[Fixed], compute: Compute, owner: Owner = NOBODY,
        patience: int = 1, middle: Middle | None = None, lying: Sequence[Fixed] = (),
    ) -> Result:  # fmt: skip
        """What `compute` makes of the inputs, and its facts.

        key: all that decides what is computed, but sizes and the owner's weights. patience: calls before one is
        recorded. middle: what of this call stays in Python. lying: values that `compute` takes from elsewhere, which
        programs read where they lie; such a call has no owner.
        """
        unit = _Unit()
        try:
            if lying:
                owner = Owner(weights=tuple([part.untyped_storage() for x in lying for part in x.share.parts]))
                key = (key, _layout(lying, owner.addresses))
            unit = self._unit(session, key, inputs, owner)
            unit.calls += 1
            call = self._call(session, unit, inputs, owner, patience, middle)
        except Exception as error:  # noqa: BLE001 - nothing is computed yet, so Python computes as always
            self._refuse(unit, owner, error)
            if middle is not None:
                middle.unwatched()
            call = functools.partial(self._plain, unit, inputs, None)
        return call(compute)

    def _call(
        self, session: Session, unit: _Unit, inputs: Sequence[Fixed], owner: Owner, patience: int,
        middle: Middle | None,
    ) -> Callable[[Compute], Result]:  # fmt: skip
        """How this call is computed, ready to begin."""
        refused = unit.refused_all or owner.name in unit.refused
        if owner.name in unit.checked and unit.kept is not None:
            return self._repeat(session, unit.kept, inputs, owner, middle)
        self.unsettled += not refused
        if refused or unit.calls <= patience:
            first = None if refused else middle
            return functools.partial(self._plain, unit, inputs, first)
        if unit.kept is None:
            return self._record(session, unit, inputs, owner, middle)
        return self._check(session, unit, unit.kept, inputs, owner, middle)

    def _refuse(self, unit: _Unit, owner: Owner, error: Exception) -> None:
        """From now on Python computes: for this owner, where there is a program for others."""
        self.refused[str(error) or type(error).__name__] += 1
        unit.checked.discard(owner.name)
        unit.refused.add(owner.name)
        unit.refused_all |= unit.kept is None

    def _plain(self, unit: _Unit, inputs: Sequence[Fixed], middle: Middle | None, compute: Compute) -> Result:
        """As always."""
        self.counts["plain"] += 1
        if middle is None:
            made, facts = compute(inputs)
        else:
            made, facts = self._first(inputs, compute, middle)
            unit.refused_all |= self._without(middle)
        unit.refused_all |= facts is None
        return made, facts

    def _first(
        self, inputs: Sequence[Fixed], compute: Compute, middle: Middle
    ) -> Result:  # fmt: skip
        """As always, but what is within is not recorded by itself, and the middle is watched."""

        @contextmanager
        def aside() -> Iterator[None]:
            self.waits = False
            with self._within():
                yield
            self.waits = True

        middle.aside, self.waits = aside, True
        try:
            with _met(middle):
                return compute(inputs)
        finally:
            self.waits = False

    def _without(self, middle: Middle) -> bool:
        """Whether a unit has not the middle that it should have."""
        if not middle.met:
            middle.refuse("a middle that was not met")
        if middle.reason is not None:
            self.refused[middle.reason] += 1
        return middle.reason is not None

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Inside, a middle is computed, whose programs run in memory of their own."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @property
    def _place(self) -> int:
        """1 within a middle, whose programs run in memory of their own, else 0."""
        return min(self._inside, 1)

    @property
    def _arena(self) -> Arena:
        return self._arenas[self._place]

    def _unit(self, session: Session, key: Hashable, inputs: Sequence[Fixed], owner: Owner) -> _Unit:
        # a graph reads the memories with which it was captured, in the pool of its place
        alone = (owner.name, self._place) if captures(session) else ()
        key, place = (key, alone, tuple([(tuple(x.shape), x.form, len(x.share.parts)) for x in inputs])), alone[1:]
        found = self._units.get(key)
        if found is None:
            found = self._units[key] = _Unit(place)
            if len(self._units) > MOST_PROGRAMS:
                self._units.popitem(last=False)
        else:
            self._units.move_to_end(key)
        return found

    def _let_go(self, place: tuple[object, ...]) -> None:
        """Forget programs of a place while all of them hold too much."""
        held = [
            (key, unit.kept.program.held)
            for key, unit in self._units.items()
            if unit.kept is not None and unit.place == place
        ]
        total, most = sum(size for _, size in held), graphs.MOST_HELD if place else MOST_HELD
        for key, size in held[:-1]:
            if total <= most:
                break
            total -= size
            del self._units[key]

    def _record(
        self, session: Session, unit: _Unit, inputs: Sequence[Fixed], owner: Owner, middle: Middle | None
    ) -> Callable[[Compute], Result]:  # fmt: skip
        protocol = session.protocol
        recorder: Any = (
            GraphRecorder(
                protocol.transport, protocol.mask_streams, torch.device(session.device), self._pools[self._place]
            )
            if captures(session)
            else Recorder(protocol.transport, protocol.mask_streams, owner.places)
        )
        parts: list[Tensor] = []
        operands = []
        for part in [part for x in inputs for part in x.share.parts]:
            parts.append(part.contiguous().clone())
            operands.append(recorder.given(parts[-1]))
        told = Told(session, owner.name)
        if middle is not None:
            operands += [recorder.public(x) for x in middle.publics]
            self._surround(middle, told, recorder, recorder.aside)
            middle.ends = told.ending(recorder.middle)
        given = _values(inputs, parts)
        parts.clear()
        self.counts["recorded"] += 1

        def record(compute: Compute) -> Result:
            with recorder.operations(), watched_by(recorder), tapped(protocol, recorder), _met(middle):
                made, facts = compute(given)
            given.clear()  # nothing that changes may outlive the step
            try:
                unit.kept = self._kept(recorder, operands, told, made, facts, middle)
                self._let_go(unit.place)
            except Exception as error:  # noqa: BLE001 - the step is done; only its program is not
                self._refuse(unit, owner, error)
            return made, facts

        return record

    def _kept(
        self, recorder: Any, operands: Sequence[Any], told: Told, made: Sequence[Fixed], facts: Hashable,  # noqa: ANN401
        middle: Middle | None,
    ) -> _Kept:  # fmt: skip
        """The program of a step that was recorded. Raises UnsupportedOp where there is none."""
        new = told.end()
        if facts is None:
            raise UnsupportedOp("results that are no secret tensors")
        if middle is not None and self._without(middle):
            raise UnsupportedOp(f"its middle: {middle.reason}")
        if any(rows is not None for _, _, rows in new):
            raise UnsupportedOp("a verdict for each row of a batch")
        encodings = recorder.encodings()
        program = recorder.program([*operands, *encodings.values()], _outputs(made, new))
        if isinstance(program, Program) and program.size > MOST_BYTES:
            raise UnsupportedOp(f"a program of more than {MOST_BYTES >> 20} MiB")
        return _Kept(
            program, tuple([x.form for x in made]), tuple([bits for _, bits, _ in new]), facts, told.booked, told.met,
            tuple(encodings),
        )  # fmt: skip

    def _surround(
        self, middle: Middle, told: Told, tap: Tap, unseen: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:  # fmt: skip
        """Let `told` and `tap` see nothing of a middle."""

        @contextmanager
        def aside() -> Iterator[None]:
            with unseen(), watched_by(None), tapped(told.session.protocol, tap.inner), self._within():
                yield

        def begins() -> str | None:
            told.pause()
            return None if told.session.known.pending is None else "a check that was put off until the middle"

        middle.aside, middle.begins = aside, begins

    def _check(
        self, session: Session, unit: _Unit, kept: _Kept, inputs: Sequence[Fixed], owner: Owner, middle: Middle | None
    ) -> Callable[[Compute], Result]:  # fmt: skip
        protocol = session.protocol
        witness = Witness(protocol.transport, protocol.mask_streams)
        given = [part.contiguous().clone() for x in inputs for part in x.share.parts]
        told, seen = Told(session, owner.name), Seen()
        if middle is not None:
            given += [x.clone() for x in middle.publics]
            self._surround(middle, told, witness)
            middle.ends = told.ending(seen.note)
        self.counts["checked"] += 1

        def right(made: Sequence[Fixed], facts: Hashable) -> bool:
            new, rerun = told.end(), Rerun(witness.notes)
            if witness.reason is not None or (middle is not None and middle.reason is not None):
                raise UnsupportedOp(f"its check: {witness.reason or (middle and middle.reason)}")
            if middle is not None:
                given.extend(encode_public(inputs[0], middle.publics[each[0]], each) for each in kept.encodings)
            again, outputs = (
                kept.program.run(rerun, self._arena, given, owner.addresses, seen.again),
                _outputs(made, new),
            )
            said = tuple([x.form for x in made]), tuple([bits for _, bits, _ in new]), facts
            return (
                (kept.forms, kept.owed, kept.facts) == said and rerun.agrees(witness.notes)
                and (kept.booked, kept.middle) == (told.booked, told.met) and seen.same
                and len(again) == len(outputs) and all(map(torch.equal, again, outputs))
            )  # fmt: skip

        def check(compute: Compute) -> Result:
            with watched_by(witness), tapped(protocol, witness), _met(middle):
                made, facts = compute(inputs)
            try:
                if not right(made, facts):
                    raise UnsupportedOp("a recorded program that gives something else")
                unit.checked.add(owner.name)
            except Exception as error:  # noqa: BLE001 - as above
                self._refuse(unit, owner, error)
            return made, facts

        return check

    def _repeat(
        self, session: Session, kept: _Kept, inputs: Sequence[Fixed], owner: Owner, middle: Middle | None
    ) -> Callable[[Compute], Result]:  # fmt: skip
        protocol = session.protocol
        outside = self._live
        if outside is None or outside.transport is not protocol.transport:
            outside = self._live = Live(protocol.transport, protocol.mask_streams)
        parts = [part for x in inputs for part in x.share.parts]
        each = len(parts) // len(inputs)
        inner: Inner | None = None
        if middle is not None and kept.middle is not None:
            parts += [
                *middle.publics, *(encode_public(inputs[0], middle.publics[e[0]], e) for e in kept.encodings)
            ]  # fmt: skip
            inner = functools.partial(self._inner, session, kept.middle, middle, owner.name)
        ready = kept.program.ready(outside, self._arena, parts, owner.addresses)
        self.counts["repeated"] += 1

        def repeat(_: Compute) -> Result:
            known = session.known
            before = len(known.owed)
            made = ready(inner)
            protocol.ledger.add_again(kept.booked, owner.name)
            shares = [Share(tuple(made[at : at + each])) for at in range(0, len(made), each)]
            values = [Fixed(session, share, *form) for share, form in zip(shares, kept.forms, strict=False)]
            sums: list[Owed] = [
                (share, bits, None) for share, bits in zip(shares[len(values) :], kept.owed, strict=True)
            ]  # fmt: skip
            first = len(sums) if kept.middle is None else kept.middle.owed
            known.owed[before:before] = sums[:first]
            known.owed += sums[first:]
            return values, kept.facts

        return repeat

    def _inner(
        self, session: Session, met: Met, middle: Middle, owner: str, parts: Sequence[Tensor]
    ) -> Sequence[Tensor]:  # fmt: skip
        """The middle of a program that is repeated."""
        ledger = session.protocol.ledger
        count = len(parts) // len(met.forms)
        values = [
            Fixed(session, Share(tuple(parts[at * count : (at + 1) * count])), *form)
            for at, form in enumerate(met.forms)
        ]
        outer = ledger.enter(met.module(ledger, owner))
        try:
            with self._within():
                made = middle.again(values)
                if made.form != met.form:
                    raise DomainError(f"a repeated layer: its attention gives {made.form} bits, recorded {met.form}")
                return made.share.parts
        finally:
            ledger.leave(outer)


def _layout(lying: Sequence[Fixed], places: tuple[int, ...]) -> Hashable:
    """All that a program says of where values lie, but for the places; also which of them share one."""
    parts = [part for x in lying for part in x.share.parts]
    views = [(tuple(part.shape), part.stride(), part.storage_offset(), part.dtype) for part in parts]
    return tuple([x.form for x in lying]), tuple(views), tuple(map(places.index, places))


@contextmanager
def _met(middle: Middle | None) -> Iterator[None]:
    """Inside, what is called may meet this middle."""
    before, this_call.middle = this_call.middle, middle
    try:
        yield
    finally:
        this_call.middle = before


def _outputs(made: Sequence[Fixed], owed: Sequence[Owed]) -> list[Tensor]:
    """Parts of what a call made, and of the sums that it owes to the range check."""
    return [part for x in made for part in x.share.parts] + [part for sums, _, _ in owed for part in sums.parts]


def _values(inputs: Sequence[Fixed], parts: Sequence[Tensor]) -> list[Fixed]:
    """The inputs with these parts."""
    left = iter(parts)
    return [x.with_share(Share(tuple(next(left) for _ in x.share.parts))) for x in inputs]


_held: weakref.WeakKeyDictionary[Session, Replays] = weakref.WeakKeyDictionary()


def captures(session: Session) -> bool:
    """Whether programs of this session are graphs of a GPU."""
    return torch.device(session.device).type == "cuda"


def replays_of(session: Session) -> Replays | None:
    """The programs of a session, None where steps are not repeated: with `replay=False`, with a device map, in a
    32-bit ring, while costs are counted, where each row of a batch has its own verdict, and inside a step that is
    recorded.
    """
    if not session.config.replay or this_thread.watcher is not None or session.known.batch is not None:
        return None
    protocol = session.protocol
    placed = session.device == "meta" or (session.config.device_map is not None and protocol.placed)
    if placed or session.ring.bits != 64 or not protocol.mask_streams:
        return None
    found = _held.get(session)
    if found is None:
        found = _held[session] = Replays()
    return None if found.waits else found


def repeat(
    session: Session, key: Hashable, inputs: Sequence[Fixed], compute: Callable[[Sequence[Fixed]], Sequence[Fixed]],
    patience: int = 1, lying: Sequence[Fixed] = (),
) -> Sequence[Fixed]:  # fmt: skip
    """What `compute` makes of the inputs, repeated as a program where that can be. key, patience: as for `Replays.run`;
    the ranges of the module that is computed are part of the key anyway. lying: large inputs after the others, which a
    program of a CPU reads where they lie, in the same layout each time, instead of copying them.
    """
    replays, known = replays_of(session), session.known
    if replays is None or known.pending is not None:
        return compute([*inputs, *lying])
    if captures(session):
        inputs, lying = [*inputs, *lying], ()

    def told(values: Sequence[Fixed]) -> Result:
        made = compute([*values, *lying])
        return made, () if known.pending is None else None

    key = (key, *map(session.exponent, QUANTITIES))
    return replays.run(session, key, inputs, told, patience=patience, lying=lying)[0]


def unsettled_calls(session: Session | None = None) -> int:
    """Calls of a session (None: of all in this process) that Python computed because their program was not ready."""
    return sum([found.unsettled for each, found in _held.copy().items() if session is None or session is each])


def forget(session: Session) -> None:
    """Let go of a session's programs, and of the weights that they read."""
    _held.pop(session, None)
