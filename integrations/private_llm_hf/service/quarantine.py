"""Users in whose batches the parties' records differed (quad): who may break what all others do, and how it ends.

Inputs of a client that do not fit together look as a party's lie does, and nobody can tell which it was. So the users
of such a batch run alone for a while: the next time it is one of them only. Who is alone when it happens again is not
let in for a while. Both times grow with each time. Clients without a name cannot be told apart and stay in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_ALONE_S, _BARRED_S, _GROWS = 60.0, 600.0, 4.0
"""Seconds that the first time has, and how many times as long the next one is."""
_LONGEST_S = 86400.0


@dataclass
class _User:
    times: int = 0
    alone: int = 0
    alone_until: float = 0.0
    barred_until: float = 0.0


class ClientQuarantine:
    """What a party remembers of users; one thread writes. clock: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._users: dict[str, _User] = {}

    def record_abort(self, users: Iterable[str]) -> None:
        """The records of a batch differed that served these users."""
        now, named = self._clock(), {user for user in users if user}
        for user in named:
            found = self._users.setdefault(user, _User())
            found.times += 1
            found.alone_until = now + min(_LONGEST_S, _ALONE_S * _GROWS**found.times)
            if len(named) == 1:
                found.alone += 1
                if found.alone > 1:
                    found.barred_until = now + min(_LONGEST_S, _BARRED_S * _GROWS ** (found.alone - 2))

    def runs_alone(self, user: str) -> bool:
        """Whether a user's requests share no batch now."""
        found = self._users.get(user)
        return found is not None and self._clock() < found.alone_until

    def seconds_barred(self, user: str) -> float:
        """Seconds for which a user is not let in."""
        found = self._users.get(user)
        return 0.0 if found is None else max(0.0, found.barred_until - self._clock())
