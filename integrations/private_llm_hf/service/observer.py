"""What a party service tells whoever watches it (logs, metrics): public facts, never a value.

Every method may be called from any thread, returns quickly and must not raise. `session` is the first 12 hexadecimal
digits of a session's number, the same at all parties.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """Watches a service; this one looks away."""

    def links_up(self) -> None:
        """This party is connected with all others, and sessions may begin."""

    def links_down(self, reason: str, orderly: bool = False) -> None:
        """The links between the parties ended, and all sessions with them; they are being made again.

        orderly: because a party stops as it was told to.
        """

    def links_awaited(self, who: str | None, reason: str, seconds: float) -> None:
        """A try to link the parties failed; the next one has begun.

        who: the parties that were not there, None if it failed for another reason. seconds: since the links ended, or
        since this party started.
        """

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
