"""One party's side of preprocessing apart from the online phase: the helping party computes planned calls ahead, its
receivers store what it sends, and later the others make these calls while it is silent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from private_llm.errors import ConfigError
from private_llm.net.offline_store import OfflineStore, OfflineStoreTransport, OfflineTransport, store_call
from private_llm.net.transport import Transport
from private_llm.protocols.session import Session


class OfflinePhase:
    """What the helping party sends for the calls of one plan: stored in their order, and read once in the same order.

    label: of the masks of a call, the same ahead and later, and of no other call (`PartyEnd.section`).
    """

    def __init__(self, session: Session, links: Transport) -> None:
        """links: the party's own."""
        self._session, self._links = session, links
        self._store: OfflineStore | None = None
        self._reads = False

    @property
    def nbytes(self) -> int:
        """On this party's disk."""
        return 0 if self._store is None else self._store.nbytes

    def prepare(
        self, label: str, run: Callable[[], None], beat: Callable[[], None] = lambda: None, room: int | None = None
    ) -> str | None:
        """One call ahead: the helping party runs it and sends its part, its receivers write that to disk, the others do
        nothing. beat: called when there is progress.

        room: bytes that may be added on disk; then what the disk does not take is received and dropped, and why is
        returned. Without it ShareFileError is raised, and ConfigError for a folder that cannot be written.
        """
        session, helper, keepers = self._session, self._session.config.helper, self._session.config.offline_receivers
        if session.party == helper:
            with session.protocol.section(label, OfflineTransport):
                run()
            OfflineTransport(self._links).end_call(keepers)
        elif helper is not None and session.party in keepers:
            problem = None
            try:
                self._store = self._store or OfflineStore(session.config.offline_folder)
            except ConfigError as error:
                if room is None:
                    raise
                problem = str(error)
            return store_call(self._links, helper, self._store, beat, room, problem)
        return None

    @contextmanager
    def following(self, label: str) -> Iterator[None]:
        """A party's next call, with its helper's part from the store. Raises ShareFileError for a damaged store."""
        protocol, store, helper = self._session.protocol, self._store, self._session.config.helper

        def reading(transport: Transport) -> Transport:
            if store is None or helper is None:
                return transport
            return OfflineStoreTransport(transport, helper, store, lambda: protocol.device)

        if store is not None and not self._reads:
            store.rewind()
        self._reads = True
        with protocol.section(label, reading):
            yield
        if store is not None:
            store.finish_call()

    def close(self) -> None:
        """Delete what is left. Idempotent."""
        if self._store is not None:
            self._store.close()
            self._store = None


def section_label(plan: int, number: int) -> str:
    """What the masks of a planned request are drawn under, at the parties and at the client."""
    return f"plan {plan} call {number}"
