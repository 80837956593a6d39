"""The ledger: what one party really sent, by module, operation and receiver, and the rounds it waited for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

CONTROL = "control"  # name under which messages are booked that carry no part of the protocol: commands, announcements


@dataclass(frozen=True)
class Cost:
    """Bytes by link (sender, receiver) and online rounds of an operation; costs add up sequentially."""

    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    rounds: int = 0

    def __add__(self, other: Cost) -> Cost:
        sent = dict(self.sent)
        for link, count in other.sent.items():
            sent[link] = sent.get(link, 0) + count
        return Cost(sent, self.rounds + other.rounds)

    def times(self, count: int) -> Cost:
        """The cost of `count` such operations one after the other."""
        return Cost({link: n * count for link, n in self.sent.items()}, self.rounds * count)

    @property
    def total(self) -> int:
        """Bytes over all links."""
        return sum(self.sent.values())


_MOST_AGAIN = 1024  # different bookings that are counted before they are added up
_UNTIMED: AbstractContextManager[None] = nullcontext()

HERE, OWNER, AS_IT_IS = range(3)
Scope = tuple[int, str]  # a module: the one computed before, one within an owner (by its name there), or any other


@dataclass(frozen=True)
class LedgerDelta:
    """What something adds to a ledger, to be added again."""

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


class Ledger:
    """Counts of one party. Rounds are the exchanges this party waited for, one after the other.

    sent, rounds, macs: by module, operation and receiver; they are read and reset by the party's own thread.
    spent: seconds by module, waiting included, those of a module within another not; no part of a `Cost`.
    seconds: time by name, empty but in benchmarks (see `timing`).
    """

    def __init__(self, party: int) -> None:
        self.party = party
        self.scope_name = ""  # the innermost module being computed, or an empty string
        self.op_name = ""  # the outermost operation being computed, or an empty string
        self._sent: dict[tuple[str, str, int], int] = defaultdict(int)
        self._rounds: dict[tuple[str, str], int] = defaultdict(int)
        self._macs: dict[str, int] = defaultdict(int)
        self._again: dict[tuple[int, str, str, str], tuple[LedgerDelta, int]] = {}
        self.spent: dict[str, float] = defaultdict(float)
        self.seconds: dict[str, float] = defaultdict(float)
        self._since = 0.0
        self._open = 0

    @property
    def sent(self) -> dict[tuple[str, str, int], int]:
        """Bytes by module, operation and receiver."""
        self._settle()
        return self._sent

    @property
    def rounds(self) -> dict[tuple[str, str], int]:
        """By module and operation."""
        self._settle()
        return self._rounds

    @property
    def macs(self) -> dict[str, int]:
        """Ring multiply-adds by module."""
        self._settle()
        return self._macs

    @contextmanager
    def apart(self) -> Iterator[Ledger]:
        """Inside, all is counted in another ledger, which is given, and not in this one."""
        other, before = Ledger(self.party), (self.sent, self.rounds, self.macs)
        self._sent, self._rounds, self._macs = other.sent, other.rounds, other.macs
        try:
            yield other
        finally:
            self._settle()
            self._sent, self._rounds, self._macs = before

    def add_again(self, entry: LedgerDelta, owner: str) -> None:
        """Book what was booked before, for an owner of this name: it is only counted until somebody reads."""
        key = (id(entry), self.scope_name, self.op_name, owner)
        found = self._again.get(key)
        self._again[key] = (entry, 1 if found is None else found[1] + 1)
        if len(self._again) > _MOST_AGAIN:
            self._settle()

    def _settle(self) -> None:
        if self._again:
            again, self._again = self._again, {}
            for (_, scope, op, owner), (entry, times) in again.items():
                entry.apply(self, scope, op, owner, times)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Book everything inside under the module `name`."""
        outer = self.enter(name)
        try:
            yield
        finally:
            self.leave(outer)

    def enter(self, name: str) -> str:
        """From now on the module `name` is computed; returns the one before, to which the time so far is booked."""
        now, before = time.perf_counter(), self.scope_name
        if self._open:
            self.spent[before] += now - self._since
        self._open += 1
        self._since, self.scope_name = now, name
        return before

    def leave(self, before: str) -> None:
        """The end of what `enter` began: back in the module `before`."""
        now = time.perf_counter()
        self.spent[self.scope_name] += now - self._since
        self._open -= 1
        self._since, self.scope_name = now, before

    @contextmanager
    def op(self, name: str) -> Iterator[None]:
        """Book everything inside under the operation `name` (the outermost name wins)."""
        outer, self.op_name = self.op_name, self.op_name or name
        try:
            yield
        finally:
            self.op_name = outer

    def timing(self, name: str) -> AbstractContextManager[None]:
        """Around what should count as `name` in `seconds`; only the ledger of a benchmark looks at the clock."""
        return _UNTIMED

    def add_sent(self, to: int, tag: str, count: int) -> None:
        """Book `count` bytes sent to party `to`."""
        self._sent[(self.scope_name, self.op_name or tag, to)] += count

    def add_round(self, tag: str) -> None:
        """Book one online round."""
        self._rounds[(self.scope_name, self.op_name or tag)] += 1

    def add_macs(self, count: int) -> None:
        """Book `count` ring multiply-adds of local work."""
        self._macs[self.scope_name] += count

    def book(self, other: Ledger, named: Callable[[str], str] = str, rows: int = 1, total: int = 1) -> None:
        """Add another ledger but control messages, modules `named`, rows / total of bytes and multiply-adds."""
        for (scope, op, to), count in other.sent.items():
            if op != CONTROL:
                self.sent[named(scope), op, to] += round(count * rows / total)
        for (scope, op), count in other.rounds.items():
            self.rounds[named(scope), op] += count
        for scope, count in other.macs.items():
            self.macs[named(scope)] += round(count * rows / total)
        for scope, seconds in other.spent.items():
            self.spent[named(scope)] += seconds

    def cost(self) -> Cost:
        """Everything sent and waited for since the last reset."""
        sent: dict[tuple[int, int], int] = {}
        for (_, _, to), count in self.sent.items():
            sent[(self.party, to)] = sent.get((self.party, to), 0) + count
        return Cost(sent, sum(self.rounds.values()))

    def reset(self) -> None:
        """Start counting anew."""
        self._again.clear()
        self._sent.clear()
        self._rounds.clear()
        self._macs.clear()
        self.spent.clear()
        self.seconds.clear()
        self._since = time.perf_counter()


def merge(ledgers: list[Ledger]) -> Cost:
    """One cost for a whole session: all links, and the rounds of the party that waited most."""
    sent = sum([ledger.cost() for ledger in ledgers], Cost()).sent
    return Cost(sent, max((ledger.cost().rounds for ledger in ledgers), default=0))


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
