"""One party's side of preprocessing apart from the online phase: the helping party computes planned requests ahead, its
receivers store what it sends, and later the others follow the plan while it is silent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from private_llm.errors import ProtocolAbort
from private_llm.net.offline_store import OfflineStore, OfflineStoreTransport, OfflineTransport, store_call
from private_llm.net.transport import Transport
from private_llm.protocols.session import Session

Request = TypeVar("Request")


class OfflinePhase(Generic[Request]):
    """The plan that is being prepared or followed; there is one at a time."""

    def __init__(
        self, session: Session, links: Transport, run: Callable[[Request], None],
        beat: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """links: the party's own. run: computes one request and answers nobody. beat: called when there is progress."""
        self._session, self._links, self._run, self._beat = session, links, run, beat
        self._helper, self._keepers = session.config.helper, session.config.offline_receivers
        self._store: OfflineStore | None = None
        self._plan = self._calls = self._next = 0

    def prepare(self, plan: int, requests: Sequence[Request]) -> int:
        """Compute ahead, or store, every request of a new plan (numbers rise); what is left of an older one is lost.

        The helping party sends all of its part, its receivers write that to disk, the others do nothing. Returns bytes
        stored. Raises ProtocolAbort for a plan that was prepared before.
        """
        self.close()
        if plan <= self._plan:
            raise ProtocolAbort(f"preprocessing plan {plan} was prepared before; masks must never repeat")
        self._plan, self._calls, self._next = plan, len(requests), 0
        if self._session.party == self._helper:
            for number, request in enumerate(requests):
                self._compute(number, request)
        elif self._helper is not None and self._session.party in self._keepers and requests:
            return self._receive(self._helper)
        return 0

    def _compute(self, number: int, request: Request) -> None:
        links: list[OfflineTransport] = []

        def announcing(transport: Transport) -> Transport:
            links.append(OfflineTransport(transport))
            return links[0]

        with self._session.protocol.section(self._label(number), announcing):
            self._run(request)
        links[0].end_call(self._keepers)

    def _receive(self, helper: int) -> int:
        self._store = store = OfflineStore(self._session.config.offline_folder)
        for _ in range(self._calls):
            store_call(self._links, helper, store, self._beat)
        stored = store.nbytes
        store.rewind()
        return stored

    @contextmanager
    def following(self, plan: int, number: int) -> Iterator[None]:
        """Inside a computing party runs request `number` of `plan`, with the helping party's part from the store.

        Raises ProtocolAbort for any request but the next: masks must never repeat.
        """
        if (plan, number) != (self._plan, self._next) or self._next >= self._calls:
            raise ProtocolAbort(
                f"request {number} of preprocessing plan {plan}: want request {self._next} of plan {self._plan}; what "
                "was preprocessed is used in order and once, because masks must never repeat"
            )
        protocol, store, helper = self._session.protocol, self._store, self._helper
        self._next += 1

        def reading(transport: Transport) -> Transport:
            if store is None or helper is None:
                return transport
            return OfflineStoreTransport(transport, helper, store, lambda: protocol.device)

        with protocol.section(self._label(number), reading):
            yield
        if store is not None:
            store.finish_call()
        if self._next == self._calls:
            self.close()

    def close(self) -> None:
        """Delete what is left. Idempotent."""
        if self._store is not None:
            self._store.close()
            self._store = None
        self._calls = 0

    def _label(self, number: int) -> str:
        return section_label(self._plan, number)


def section_label(plan: int, number: int) -> str:
    """What the masks of a planned request are drawn under, at the parties and at the client."""
    return f"plan {plan} call {number}"
