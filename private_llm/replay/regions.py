"""A recorded part of a step: its program, the weights that a call binds to it, and what a call does to its session
besides its results, but for its graph break (`replay.graph_break`): bookings, and checks of ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels.seeded_tensor import StreamKey
from private_llm.net.ledger import AS_IT_IS, HERE, OWNER, LedgerDelta, Scope
from private_llm.net.transport import CLIENT
from private_llm.protocols.session import PendingRangeCheck, Session
from private_llm.protocols.share import Share
from private_llm.replay.graph_break import GraphBreak
from private_llm.replay.graphs import GraphProgram
from private_llm.replay.program import Program
from private_llm.replay.recording import Encoding
from private_llm.tensor.fixed import Fixed

Result = tuple[Sequence[Fixed], Hashable]
StepBody = Callable[[Sequence[Fixed]], Result]
"""A function of shared values: what it makes, and public facts about that, equal in every call of a key; None as facts
if a program could not make that."""


@dataclass(frozen=True)
class BreakRecord:
    """A graph break: `Fixed.form` of inputs and outputs, label, module, and number of range checks before it."""

    forms: tuple[tuple[int, int | None], ...]
    form: tuple[int, int | None]
    scope: Scope
    module: Scope
    checks_before: int

    def compute(
        self, session: Session, graph_break: GraphBreak, owner: str, parts: Sequence[Tensor]
    ) -> Sequence[Tensor]:  # fmt: skip
        """That of a program that is repeated, for an owner of this name. Raises DomainError for another form."""
        end, ledger, count = session.protocol, session.protocol.ledger, len(parts) // len(self.forms)
        shares = [Share(tuple(parts[at : at + count])) for at in range(0, len(parts), count)]
        values = [Fixed(session, share, *form) for share, form in zip(shares, self.forms, strict=True)]
        (kind, name), (module_kind, module_name) = self.scope, self.module
        scope = (ledger.scope_name, owner, "")[kind] + name
        with session.module((end.module, owner, "")[module_kind] + module_name), ledger.scope(scope):
            made = graph_break.recompute(values)
        if made.form != self.form:
            raise DomainError(f"a repeated layer: its attention gives {made.form} bits, recorded {self.form}")
        return made.share.parts


def _relative(name: str, here: str, owner: str) -> Scope:
    if owner and (name == owner or name.startswith(f"{owner}.")):
        return OWNER, name[len(owner) :]
    return (HERE, "") if name == here else (AS_IT_IS, name)


@dataclass(frozen=True)
class Outcome:
    """What a call gave and did, but for values; checks: bits of the sums that it leaves to the range check."""

    forms: tuple[tuple[int, int | None], ...]
    checks: tuple[int, ...]
    facts: Hashable
    delta: LedgerDelta
    graph_break: BreakRecord | None

    def settle(self, session: Session, owner: str, shares: Sequence[Share], before: int) -> Result:
        """Book it, and queue its range checks; the values of a program's outputs. before: those pending."""
        session.protocol.ledger.add_again(self.delta, owner)
        values = [Fixed(session, share, *form) for share, form in zip(shares, self.forms, strict=False)]
        sums: list[PendingRangeCheck] = [
            (share, bits, None) for share, bits in zip(shares[len(values) :], self.checks, strict=True)
        ]  # fmt: skip
        pending = session.checks.pending
        first = len(sums) if self.graph_break is None else self.graph_break.checks_before
        pending[before:before] = sums[:first]
        pending += sums[first:]
        return values, self.facts


class BreakCheck:
    """The graph break of a call that is checked: what it took and made."""

    def __init__(self) -> None:
        self.same = True
        self._given: list[Tensor] = []
        self._made: list[Tensor] = []

    def record(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of the call."""
        self._given, self._made = [x.clone() for x in given], [x.clone() for x in made]
        return made

    def replay(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of the program."""
        self.same &= len(given) == len(self._given) and all(map(torch.equal, given, self._given))
        return self._made


class SideEffects:
    """What a call adds to its session, but for its graph_break: bookings, and checks of ranges."""

    def __init__(self, session: Session, owner: str) -> None:
        self._session, self._owner, self._module = session, owner, session.protocol.module
        self._delta = LedgerDelta((), (), ())
        self._break: BreakRecord | None = None
        self._new: list[PendingRangeCheck] = []
        self._start()

    def _start(self) -> None:
        ledger = self._session.protocol.ledger
        self._here, self._owed = ledger.scope_name, len(self._session.checks.pending)
        self._before = Counter(ledger.sent), Counter(ledger.rounds), Counter(ledger.macs)

    def pause(self) -> None:
        """What comes is of the graph break."""
        ledger, (sent, rounds, macs) = self._session.protocol.ledger, self._before
        sent, rounds, macs = Counter(ledger.sent) - sent, Counter(ledger.rounds) - rounds, Counter(ledger.macs) - macs
        # but for "still computing" to the client, which comes when it comes
        booked = tuple([(self._scope(at), op, to, n) for (at, op, to), n in sent.items() if to != CLIENT])
        waited = tuple([(self._scope(at), op, n) for (at, op), n in rounds.items()])
        computed = tuple([(self._scope(at), n) for at, n in macs.items()])
        self._delta = self._delta.plus(LedgerDelta(booked, waited, computed))
        self._new += self._session.checks.pending[self._owed :]

    def _scope(self, name: str) -> Scope:
        return _relative(name, self._here, self._owner)

    def exit_hook(
        self, record: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
    ) -> Callable[[Sequence[Fixed], Fixed], Fixed]:  # fmt: skip
        """A graph break's `exit`, which lets `record` know."""

        def exit_(values: Sequence[Fixed], made: Fixed) -> Fixed:
            given = [part for x in values for part in x.share.parts]
            parts = record(given, made.share.parts)
            end = self._session.protocol
            scope, module = self._scope(end.ledger.scope_name), _relative(end.module, self._module, self._owner)
            self._break = BreakRecord(tuple(x.form for x in values), made.form, scope, module, len(self._new))
            self._start()
            return made.with_share(Share(tuple(parts)))

        return exit_

    def end(self, made: Sequence[Fixed], facts: Hashable) -> tuple[Outcome, list[Tensor]]:
        """All that a call of these values leaves, with owed sums. Raises UnsupportedOp for what no program books."""
        self.pause()
        if any(rows is not None for _, _, rows in self._new):
            raise UnsupportedOp("a verdict for each row of a batch")
        parts = [part for x in made for part in x.share.parts] + [
            part for sums, _, _ in self._new for part in sums.parts
        ]
        forms, checks = tuple([x.form for x in made]), tuple([bits for _, bits, _ in self._new])
        return Outcome(forms, checks, facts, self._delta, self._break), parts


@dataclass(frozen=True)
class CompiledRegion:
    """A program, what becomes of its outputs, and the ring elements that it takes of public tensors."""

    program: Program | GraphProgram
    outcome: Outcome
    encodings: tuple[Encoding, ...] = ()


@dataclass
class RegionState:
    """Calls of one key so far. checked, refused: the owners for which the program is right, and is not. bound: graphs
    by owner, but for that with which they were recorded. place: of graphs, whether they run within others.
    """

    place: tuple[object, ...] = ()
    calls: int = 0
    compiled: CompiledRegion | None = None
    refused_all: bool = False
    checked: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    bound: dict[str, GraphProgram] = field(default_factory=dict)

    def fits(self, binding: WeightBinding) -> bool:
        """Whether the program that was checked for this owner is that of these weights."""
        program = self.bound.get(binding.name) or (self.compiled and self.compiled.program)
        return not isinstance(program, GraphProgram) or program.weights is binding.weights

    def bound_program(self, program: Program | GraphProgram, binding: WeightBinding) -> Program | GraphProgram:
        """That of these weights: graphs read the memories with which they are captured."""
        if isinstance(program, Program) or program.weights is binding.weights:
            return program
        found = self.bound.get(binding.name)
        if found is None or found.weights is not binding.weights:
            found = self.bound[binding.name] = program.bound_to(binding.weights)
        return found


@dataclass(frozen=True)
class WeightBinding:
    """Whose call it is: a name, and the memories that belong to it alone: weights, and keys of masks that are made."""

    name: str = ""
    weights: tuple[torch.UntypedStorage | StreamKey, ...] = field(default=(), repr=False)  # printed, they are secrets

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


NO_WEIGHTS = WeightBinding()


def layout_of(in_place: Sequence[Fixed], places: tuple[int, ...]) -> Hashable:
    """All that a program says of where values lie, but for the places; also which of them share one."""
    parts = [part for x in in_place for part in x.share.parts]
    views = [(tuple(part.shape), part.stride(), part.storage_offset(), part.dtype) for part in parts]
    return tuple([x.form for x in in_place]), tuple(views), tuple(map(places.index, places))


def with_parts(inputs: Sequence[Fixed], parts: Sequence[Tensor]) -> list[Fixed]:
    """The inputs with these parts."""
    left = iter(parts)
    return [x.with_share(Share(tuple(next(left) for _ in x.share.parts))) for x in inputs]


def uses_cuda_graphs(session: Session) -> bool:
    """Whether programs of this session are graphs of a GPU."""
    return torch.device(session.device).type == "cuda"
