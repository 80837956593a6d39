"""What a party service allows (models, numbers of sessions, sizes of batches), and what it tells whoever watches it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from private_llm.errors import ConfigError
from private_llm.typed_settings import check_types


@dataclass(frozen=True)
class ServiceSettings:
    """How a party serves many clients. Raises ConfigError for settings out of range.

    models: this party's share file of each model, by a name for logs and metrics; clients find theirs by its digest
    (none for servers of 'assisted', which have sessions, sessions_per_user, waiting and drain_s alone).
    sessions: clients' sessions at a time; sessions_per_user: of one user (the name in the certificate). waiting:
    clients that may stand in line for a session. rows: of one batch, over all requests that it serves. positions: that
    one session's caches may hold, over all rows, and positions_in_all those of all sessions, of which half for one user
    with a name. elements: of the largest array that one batch may make (`limits.elements_of`). None, for these three:
    as this machine's memory allows; of what the parties state, the smallest numbers hold. offline_bytes: on this
    party's disk (in `PrivateConfig.offline_folder`), of what is prepared for calls that sessions have planned (0:
    nothing is), half of them at most for one user with a name.
    gather_s: seconds that a batch waits for the next requests of sessions that were in the last one. drain_s: seconds
    that sessions may take to end after `PartyService.drain`.
    """

    models: Mapping[str, Path] = field(default_factory=dict)
    sessions: int = 64
    sessions_per_user: int = 16
    waiting: int = 64
    rows: int = 32
    positions: int | None = None
    positions_in_all: int | None = None
    elements: int | None = None
    offline_bytes: int = 1 << 30
    gather_s: float = 0.005
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        check_types(self, but=("models",))
        for name in ("sessions", "sessions_per_user", "rows", "positions", "positions_in_all", "elements"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: got {value}; want at least 1")
        for name in ("waiting", "offline_bytes", "gather_s", "drain_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}: got {getattr(self, name)}; want 0 or more")


@dataclass(frozen=True)
class BatchFacts:
    """One batch: one forward pass. tokens: positions computed, over all rows. sent: bytes that this party sent."""

    model: str
    requests: int
    users: int
    rows: int
    tokens: int
    seconds: float
    sent: int
    rounds: int


class Observer:
    """Watches a service, hears public facts, never a value; this one looks away. Methods are called from any thread,
    return quickly and must not raise. session: the first 12 hexadecimal digits of its number, equal at all parties.
    """

    def links_up(self) -> None:
        """This party is connected with all others, and sessions may begin."""

    def links_down(self, reason: str, orderly: bool = False) -> None:
        """The links between parties, and all sessions, ended; new ones are made. orderly: a party was told to stop."""

    def links_awaited(self, who: str | None, reason: str, seconds: float) -> None:
        """Links could not be made. who: was missing; None: another cause. seconds: since links ended, or began."""

    def session_began(self, session: str, user: str) -> None:
        """A client came in. user: the name in its certificate, "" without one."""

    def session_ended(self, session: str, user: str, seconds: float, reason: str | None) -> None:
        """It left (None), or why it was ended."""

    def refused(self, who: str, reason: str) -> None:
        """A caller was not let in. who: what is known of it."""

    def busy(self, user: str) -> None:
        """A client was told to come later."""

    def batch_done(self, facts: BatchFacts) -> None:
        """A batch is over."""

    def load(self, sessions: int, requests: int) -> None:
        """Sessions that are open, and requests that wait for a batch."""

    def draining(self) -> None:
        """No session begins any more; the service ends when those that run are over."""
