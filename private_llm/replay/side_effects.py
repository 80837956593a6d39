"""What a call adds to its session, but for its graph break (`replay.graph_break`): bookings, and checks of ranges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.net.ledger import Ledger
from private_llm.net.transport import CLIENT
from private_llm.protocols.session import PendingRangeCheck, Session
from private_llm.protocols.share import Share
from private_llm.tensor.fixed import Fixed

_HERE, _OWNER, _AS_IT_IS = range(3)
Scope = tuple[int, str]
"""A module in the ledger: the one in which the region was called, one within its owner, or any other."""


@dataclass(frozen=True)
class LedgerDelta:
    """What a run adds to the ledger."""

    sent: tuple[tuple[Scope, str, int, int], ...]
    rounds: tuple[tuple[Scope, str, int], ...]
    macs: tuple[tuple[Scope, int], ...]

    def plus(self, other: LedgerDelta) -> LedgerDelta:
        """Both."""
        return LedgerDelta(self.sent + other.sent, self.rounds + other.rounds, self.macs + other.macs)

    def apply(self, ledger: Ledger, scope: str, op: str, owner: str, times: int) -> None:
        """Add it `times` times, for an owner of this name; scope, op: what was computed."""
        starts, sent, rounds, macs = (scope, owner, ""), ledger.sent, ledger.rounds, ledger.macs
        for (kind, name), tag, to, count in self.sent:
            sent[(starts[kind] + name, op or tag, to)] += count * times
        for (kind, name), tag, count in self.rounds:
            rounds[(starts[kind] + name, op or tag)] += count * times
        for (kind, name), count in self.macs:
            macs[starts[kind] + name] += count * times


@dataclass(frozen=True)
class BreakRecord:
    """A graph break: `Fixed.form` of what it takes and gives, its module, and how many checks of ranges came before."""

    forms: tuple[tuple[int, int | None], ...]
    form: tuple[int, int | None]
    scope: Scope
    owed: int

    def module(self, ledger: Ledger, owner: str) -> str:
        """Its module's name, for an owner of this name."""
        kind, name = self.scope
        return (ledger.scope_name, owner, "")[kind] + name


class _Ledgers:
    """What a ledger said at one time."""

    def __init__(self, ledger: Ledger, owner: str) -> None:
        self._here, self._owner = ledger.scope_name, owner
        self._held = Counter(ledger.sent), Counter(ledger.rounds), Counter(ledger.macs)

    def scope(self, name: str) -> Scope:
        """A module's place."""
        if self._owner and (name == self._owner or name.startswith(f"{self._owner}.")):
            return _OWNER, name[len(self._owner) :]
        return (_HERE, "") if name == self._here else (_AS_IT_IS, name)

    def delta(self, ledger: Ledger) -> LedgerDelta:
        """What it says more now."""
        sent, rounds, macs = self._held
        more_sent, more_rounds = Counter(ledger.sent) - sent, Counter(ledger.rounds) - rounds
        for key in [key for key in more_sent if key[2] == CLIENT]:  # "still computing", which comes when it comes
            del more_sent[key]
        more_macs = Counter(ledger.macs) - macs
        return LedgerDelta(
            tuple([(self.scope(scope), op, to, count) for (scope, op, to), count in more_sent.items()]),
            tuple([(self.scope(scope), op, count) for (scope, op), count in more_rounds.items()]),
            tuple([(self.scope(scope), count) for scope, count in more_macs.items()]),
        )


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
        self.session, self._owner = session, owner
        self.delta = LedgerDelta((), (), ())
        self.break_record: BreakRecord | None = None
        self._new: list[PendingRangeCheck] = []
        self._start()

    def _start(self) -> None:
        self._before = _Ledgers(self.session.protocol.ledger, self._owner)
        self._owed = len(self.session.numerics.pending_range_checks)

    def pause(self) -> None:
        """What comes is of the graph break."""
        self.delta = self.delta.plus(self._before.delta(self.session.protocol.ledger))
        self._new += self.session.numerics.pending_range_checks[self._owed :]

    def exit_hook(
        self, record: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
    ) -> Callable[[Sequence[Fixed], Fixed], Fixed]:  # fmt: skip
        """A graph break's `exit`, which lets `record` know."""

        def exit_(values: Sequence[Fixed], made: Fixed) -> Fixed:
            given = [part for x in values for part in x.share.parts]
            parts = record(given, made.share.parts)
            scope = self._before.scope(self.session.protocol.ledger.scope_name)
            self.break_record = BreakRecord(tuple(x.form for x in values), made.form, scope, len(self._new))
            self._start()
            return made.with_share(Share(tuple(parts)))

        return exit_

    def end(self) -> list[PendingRangeCheck]:
        """Checks that the call owes."""
        self.pause()
        return self._new
