"""What links lend to programs: connections to compiled ones, which write and read frames without Python, and a barrier.

Plain sockets and links between threads are lent; what encrypts, delays, counts or alters messages is asked for each of
them. While a socket is lent, whoever else wants to write to it (the end of the session, of another thread) waits for
the program: as long as that computes, and at most `WAIT_MS` of waiting on each connection.

At a barrier the parties of one process wait for each other, to do once what each would have to do for itself. A point
is a name and the number of times that a party came to it; all parties come to a name equally often. Who passes one
without waiting says so; then nobody waits at this name any more. As `threading.Barrier`, whose threads always wait.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from private_llm.errors import PartyFailed
from private_llm.net import connection

Row = np.ndarray[tuple[int], np.dtype[np.int64]]  # a connection as programs use it: the words of `connection`


MOST = 16  # endpoints; of those with higher numbers none is lent


class End(Protocol):
    """One end of a connection, in Python."""

    def lend(self, row: Row) -> None:
        """Let a program use it, until `take_back`; nobody else uses it meanwhile. It may keep it for itself."""

    def take_back(self, row: Row) -> None:
        """The end of `lend`; nothing, if it was not lent."""


class Direct:
    """All connections of an endpoint that can be lent; inside `with`, `address` is that of the rows, by endpoint."""

    def __init__(self, ends: Callable[[int], Sequence[End]]) -> None:
        """ends: `Transport.ends`."""
        self._table = np.zeros((MOST, connection.FIELDS), np.int64)
        self._table[:, [connection.OUT, connection.IN]] = -1
        self._ends: list[tuple[End, Row]] = []
        self.address = self._table.ctypes.data
        for endpoint in range(MOST if connection.HERE else 0):
            for end in ends(endpoint):
                self._ends.append((end, self._table[endpoint]))

    def __enter__(self) -> "Direct":
        try:
            for end, row in self._ends:
                end.lend(row)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Take all of them back, whatever becomes of one."""
        failed: BaseException | None = None
        left, tried = self._ends[::-1], -1
        while left:
            try:
                while left:
                    end, row = left[-1]
                    end.take_back(row)
                    left.pop()
            except BaseException as error:  # noqa: BLE001 - raised below
                failed = failed or error
                if tried == len(left):  # a second time; after an interrupt that does what the first did not come to
                    left.pop()
                tried = len(left)
        if failed is not None:
            raise failed


Given = TypeVar("Given")
ResultT = TypeVar("ResultT")
_SKIPPED = object()
_POLL_S = 0.5  # how often one that waits looks whether the session has ended

Point = tuple[Hashable, ...]  # a name, the number of times that a party came to it, and what else tells points apart


class Barrier:
    """The points of one parallel session. closed: names that parties passed differently, so that nobody waits there."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.closed: set[Hashable] = set()
        self.changed = threading.Condition()
        self.arrived: dict[Hashable, dict[int, Any]] = {}
        self.acting: dict[Hashable, int] = {}
        self.made: dict[Hashable, list[Any]] = {}

    def close(self, name: Hashable) -> None:
        """From now on nobody waits at a name, but at points that follow one at which all have met."""
        with self.changed:
            self.closed.add(name)
            self.changed.notify_all()

    def arrive(self, me: int, point: Point, given: object) -> bool:
        """Whether all who have been at this point so far wait there."""
        arrived = self.arrived.setdefault(point, {})
        arrived[me] = given
        skipped = sum(each is _SKIPPED for each in arrived.values())
        if skipped and (skipped < len(arrived) or len(arrived) == self.parties):
            del self.arrived[point]  # and what was given: programs hold much memory
        if 0 < skipped < len(arrived):
            self.close(point[0])
        return not skipped

    def missing(self, point: Point) -> int | None:
        """The first party that has not come to a point, or the one that acts there; None if all wait."""
        if point in self.acting:
            return self.acting[point]
        arrived = self.arrived.get(point, ())
        return next((party for party in range(self.parties) if party not in arrived), None)


@dataclass(frozen=True)
class BarrierEnd:
    """One party's end. failure: why the session has ended, or None. aside: around a time in which this party waits for
    the one it is given. silent: what to say of a party that did not come in time.
    """

    barrier: Barrier
    me: int
    failure: Callable[[], str | None]
    timeout: float
    aside: Callable[[int], AbstractContextManager[None]]
    silent: Callable[[int], str]

    def skip(self, point: Point) -> None:
        """Pass a point without waiting."""
        with self.barrier.changed:
            if point[0] not in self.barrier.closed:
                self.barrier.arrive(self.me, point, _SKIPPED)

    def wait(
        self, point: Point, given: Given, action: Callable[[Sequence[Given]], ResultT], follows: bool = False
    ) -> ResultT | None:  # fmt: skip
        """What the last one's `action` makes of what all parties gave, in their order; None unless all wait here.

        follows: all have met at an earlier point, after which all wait here, too. Raises PartyFailed if the session has
        ended, or if a party does not come in time, and at the last to come what `action` raises.
        """
        barrier = self.barrier
        with barrier.changed:
            if (point[0] in barrier.closed and not follows) or not barrier.arrive(self.me, point, given):
                return None
            arrived = barrier.arrived[point]
            missing = barrier.missing(point)
            if missing is None:
                del barrier.arrived[point]
                barrier.acting[point] = self.me
        if missing is not None:
            with self.aside(missing), barrier.changed:
                found: ResultT | None = self._awaited(point, follows)
                return found
        made = action([arrived[party] for party in range(barrier.parties)])
        with barrier.changed:
            del barrier.acting[point]
            barrier.made[point] = [made, barrier.parties - 1]
            barrier.changed.notify_all()
        return made

    def _awaited(self, point: Point, follows: bool) -> Any:  # noqa: ANN401 - whatever the action makes
        barrier, left = self.barrier, self.timeout
        while point not in barrier.made:
            if point[0] in barrier.closed and not follows and point not in barrier.acting:
                barrier.arrived.pop(point, None)
                return None
            if (reason := self.failure()) is not None:
                raise PartyFailed(reason)
            if not barrier.changed.wait(min(_POLL_S, max(left, 0.0))):
                left -= _POLL_S
                if left <= 0.0 and (missing := barrier.missing(point)) is not None:
                    raise PartyFailed(self.silent(missing))
        found = barrier.made[point]
        found[1] -= 1
        if not found[1]:
            del barrier.made[point]
        return found[0]
