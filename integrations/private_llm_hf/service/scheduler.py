"""The requests that wait at a party, and (at party 0) which of them run in the next batch.

Who has had least of the last half minute's batches comes first (users, by the rows of their requests), and of one user
the oldest request. It decides what kind of batch comes next; all that may share it come along, in the same order, up to
a number of rows. What prepares a call that is only planned runs when nothing else waits. Before a batch of decode
steps, party 0 waits a little for the next steps of sessions that were in the last one: they come as soon as their
clients have chosen a token, and each that joins saves a batch of its own.
"""

import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from private_llm_hf.service.client_session import ClientSession, Request
from private_llm_hf.service.settings import ServiceSettings

_PATIENCE = 2.0
"""A batch waits for a session this many times as long as its client usually takes, and no longer than the last batch
took: to run twice would take longer than to wait."""
_FIRST = 0.25  # what a client is thought to take before it is known, in parts of the last batch
_MEMORY = 0.5  # how much of what a client usually takes is what it took the last time
_AGAIN_S, _LATEST_S = 0.01, 0.5
"""Seconds before a request is offered again that another party had not got: at first, and at most. They double with
each offer in vain, and the session's next requests wait as long before they are offered: who sends to party 0 first
keeps the others waiting."""
_MEMORY_S = 30.0  # seconds of batches after which a third is left of what a user has had
_LACKED = 256  # requests of which it is remembered that they were awaited in vain


@dataclass(frozen=True)
class RequestSize:
    """What a request wants of a batch: one of equal batch_key (None: alone). elements: of its largest array."""

    batch_key: Hashable | None
    elements: int


MeasureRequest = Callable[[Request], RequestSize]


class Scheduler:
    """Requests by session, in the order in which they came. Thread-safe."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._requests: dict[str, Request] = {}
        self._changed = threading.Condition()
        self._expected: set[str] = set()
        self._ran_at, self._took = 0.0, 0.0
        self._turns: dict[str, float] = {}
        self._not_before: dict[str, float] = {}
        self._late: dict[str, float] = {}
        self._had: dict[str, float] = {}
        self._lacked: set[tuple[str, int]] = set()
        self._woken = False

    def __len__(self) -> int:
        return len(self._requests)

    def add_request(self, request: Request) -> None:
        """One request a session waits at a time."""
        with self._changed:
            number = request.session.id
            self._requests[number] = request
            if number in self._late:
                self._not_before[number] = time.monotonic() + self._late[number]
            if number in self._expected:
                turn = request.since - self._ran_at
                self._turns[number] = _MEMORY * turn + (1 - _MEMORY) * self._turns.get(number, turn)
            self._changed.notify_all()

    def finish_session(self, session: ClientSession) -> None:
        """A session is over: what it asked for is forgotten."""
        with self._changed:
            found = self._requests.get(session.id)
            if found is not None and found.session is session:
                del self._requests[session.id]
            self._forget(session.id)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let whoever waits look around."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def clear(self) -> None:
        """All sessions are over."""
        with self._changed:
            for each in (self._requests, self._expected, self._not_before, self._late, self._turns, self._lacked):
                each.clear()

    def forget_sessions(self, sessions: Sequence[str]) -> None:
        """These sessions are over."""
        with self._changed:
            for session in sessions:
                self._forget(session)

    def _forget(self, session: str) -> None:
        for each in (self._not_before, self._late, self._turns):
            each.pop(session, None)
        self._expected.discard(session)

    # -- party 0 ------------------------------------------------------------------------------------------------
    def schedule(self, seconds: float, measure: MeasureRequest, most: int) -> list[Request]:
        """Take the next batch's requests, of `most` elements together, or the first; None after `seconds`."""
        with self._changed:
            self._await_offers(time.monotonic() + seconds)
            self._woken = False
            if not self._offered():
                return []
            self._gather()
            waiting = sorted(self._offered(), key=lambda r: (r.prepares, self._had.get(r.session.user, 0.0), r.since))
            if not waiting:
                return []
            first = waiting[0]
            wanted, found = measure(first), [first]
            if wanted.batch_key is not None:
                rows, elements = first.call.rows, wanted.elements
                for other in waiting[1:]:
                    own = measure(other)
                    if other.session.model is not first.session.model or own.batch_key != wanted.batch_key:
                        continue
                    if rows + other.call.rows <= self._settings.rows and elements + own.elements <= most:
                        found.append(other)
                        rows, elements = rows + other.call.rows, elements + own.elements
            found.sort(key=lambda request: request.session.id)  # the same rows in the same order, if they can be
            for request in found:
                del self._requests[request.session.id]
            return found

    def _await_offers(self, until: float) -> None:
        while not self._offered() and not self._woken:
            now = time.monotonic()
            if now >= until:
                return
            self._changed.wait(min([until, *(self._not_before[number] for number in self._requests)]) - now)

    def _offered(self) -> list[Request]:
        now = time.monotonic()
        return [r for r in self._requests.values() if self._not_before.get(r.session.id, 0.0) <= now]

    def _gather(self) -> None:
        """Wait a little for sessions of the last batch that have not asked for the next step yet."""
        while missing := self._expected - self._requests.keys():
            turn = max(self._turns.get(session, _FIRST * self._took) for session in missing)
            limit = self._ran_at + max(self._settings.gather_s, min(self._took, _PATIENCE * turn))
            if not self._changed.wait(max(0.0, limit - time.monotonic())):
                break
        self._expected &= self._requests.keys()

    def requeue(self, request: Request, patience: float) -> None:
        """A request that another party has not got yet waits a little longer; after `patience` its session ends."""
        if time.monotonic() - request.since > patience:
            request.session.cut("a party did not get this client's request in time; is it connected with all parties?")
            return
        with self._changed:
            number = request.session.id
            self._late[number] = min(_LATEST_S, max(_AGAIN_S, 2 * self._late.get(number, 0.0)))
            self._requests[number] = request
            self._not_before[number] = time.monotonic() + self._late[number]

    def update_from_batch(self, requests: Sequence[Request], seconds: float) -> None:
        """A batch is over; its sessions will ask for the next step."""
        with self._changed:
            self._expected = {request.session.id for request in requests if request.error is None}
            self._ran_at, self._took = time.monotonic(), seconds
            self._charge(requests, seconds)

    def _charge(self, requests: Sequence[Request], seconds: float) -> None:
        """Who had what of a batch; and sessions whose requests were everywhere are offered sooner again."""
        left = math.exp(-seconds / _MEMORY_S)
        self._had = {user: had * left for user, had in self._had.items() if had * left > _AGAIN_S}
        rows = sum(request.call.rows for request in requests)
        for request in requests:
            user, late = request.session.user, self._late.pop(request.session.id, 0.0) / 2
            self._had[user] = self._had.get(user, 0.0) + seconds * request.call.rows / rows
            if late >= _AGAIN_S:
                self._late[request.session.id] = late

    # -- the others -----------------------------------------------------------------------------------------------
    def find_requests(self, wanted: Sequence[tuple[str, int]], seconds: float) -> list[Request | None]:
        """These requests, None for those not there within `seconds`, which are awaited in vain once only."""
        awaited = [place for place, ticket in enumerate(wanted) if ticket not in self._lacked]

        def held() -> list[Request | None]:
            found = ((self._requests.get(session), number) for session, number in wanted)
            return [request if request is not None and request.number == number else None for request, number in found]

        with self._changed:
            self._changed.wait_for(lambda: None not in map(held().__getitem__, awaited), seconds)
            found = held()
            self._lacked.difference_update(wanted)
            if len(self._lacked) > _LACKED:
                self._lacked.clear()
            self._lacked.update(ticket for ticket, one in zip(wanted, found, strict=True) if one is None)
            return found

    def remove_requests(self, requests: Sequence[Request]) -> None:
        """These are run now."""
        with self._changed:
            for request in requests:
                if self._requests.get(request.session.id) is request:
                    del self._requests[request.session.id]
