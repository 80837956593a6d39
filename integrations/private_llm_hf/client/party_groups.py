"""Several groups of parties that hold one model, for more users than one group serves.

A session lives at one group. It begins at the group with the fewest of them; one that cannot be reached, or lets nobody
in, comes last until its parties answer again.
"""

import contextvars
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakSet

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PartiesBusy, TransportError
from private_llm.net.addresses import parse_address
from private_llm.net.local import LocalMesh
from private_llm.net.rendezvous import WAIT_UNTIL
from private_llm_hf.client.launch import start_parties
from private_llm_hf.client.parties import Parties

Hosts = tuple[str, ...]

_REACH_S = 3.0
"""Seconds for a group to answer before the next one is asked."""
_AGAIN_S = 10.0
"""Seconds until a group that failed is called again."""


class PartyGroups:
    """Groups of parties by their hosts; called as `start_parties`, begins a session at one of them. Thread-safe.

    Raises ConfigError for no group, or one named twice.
    """

    def __init__(self, groups: Sequence[Hosts]) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[Hosts, WeakSet[Parties]] = {}
        self._starting: Counter[Hosts] = Counter()
        self._failed: dict[Hosts, float] = {}
        self._full: set[Hosts] = set()  # of these those that answered, and let nobody in
        self._mine = threading.local()
        self._groups: tuple[Hosts, ...] = ()
        self.change(groups)

    @property
    def groups(self) -> tuple[Hosts, ...]:
        """Those that sessions begin at."""
        return self._groups

    def change(self, groups: Sequence[Hosts]) -> None:
        """Use these from now on; sessions at others go on until they are renewed. Raises as the constructor."""
        if not groups or len({*groups}) < len(groups):
            raise ConfigError(f"groups: got {len(groups)}; want one or more, each once")
        with self._lock:
            self._groups = tuple(groups)
            kept = {hosts: made for hosts, made in self._sessions.items() if any(each.over is None for each in made)}
            self._sessions = kept | {hosts: kept.get(hosts, WeakSet()) for hosts in groups}

    def __call__(self, config: PrivateConfig, mesh: LocalMesh | None = None) -> Parties:
        """A session at one of the groups. Raises the error of the last one that was asked, if none lets it in."""
        error: TransportError | ConfigError = TransportError("groups: none was asked")
        asked: set[Hosts] = set()
        self._mine.last = None
        while (hosts := self._next(asked)) is not None:
            asked.add(hosts)
            within = contextvars.copy_context()
            within.run(WAIT_UNTIL.set, min(WAIT_UNTIL.get(), time.monotonic() + _REACH_S))
            try:
                made = within.run(start_parties, replace(config, hosts=hosts), mesh)
                with self._lock:
                    self._failed.pop(hosts, None)
                    self._sessions.setdefault(hosts, WeakSet()).add(made)
                self._mine.last = hosts
                return made
            except (TransportError, ConfigError) as found:
                error = found
                self._avoid(hosts, full=isinstance(error, PartiesBusy))
            finally:
                with self._lock:
                    self._starting[hosts] -= 1
        raise error

    def avoid_last(self) -> Hosts | None:
        """Ask the group last for a while at which this thread has just begun a session; None: it had not."""
        hosts: Hosts | None = getattr(self._mine, "last", None)
        if hosts is not None:
            self._avoid(hosts)
        return hosts

    def _avoid(self, hosts: Hosts, full: bool = False) -> None:
        with self._lock:
            self._failed[hosts] = time.monotonic()
            (self._full.add if full else self._full.discard)(hosts)

    def avoided(self, parties: Parties) -> bool:
        """Whether the group of a session failed when it was asked last."""
        return parties.config.hosts in self._failed

    def _next(self, asked: set[Hosts]) -> Hosts | None:
        """Where a session is to begin that these have turned away; None: nowhere."""
        counts = self.sessions()
        with self._lock:
            left = [hosts for hosts in self._groups if hosts not in asked]
            busy = counts + self._starting
            best = min(left, key=lambda hosts: (hosts in self._failed, busy[hosts]), default=None)
            if best is not None:
                self._starting[best] += 1
        return best

    def sessions(self) -> Counter[Hosts]:
        """How many go on at each group, those that are left included."""
        with self._lock:
            return Counter({hosts: sum(each.over is None for each in made) for hosts, made in self._sessions.items()})

    def must_move(self, parties: Parties) -> bool:
        """Whether a session's group is unused, failed while others did not, or has more than its part of sessions."""
        found, hosts, failed = self.sessions(), parties.config.hosts, {*self._failed}
        live = sum(each not in failed for each in self._groups)
        if parties.over is not None or not live:
            return False
        left = hosts not in self._groups or (hosts in failed and hosts not in self._full)
        return left or found[hosts] > -(-found.total() // live)

    def call_again(self) -> None:
        """Find out whether the parties of groups that failed some time ago answer again."""
        with self._lock:
            due = [hosts for hosts, at in self._failed.items() if time.monotonic() - at > _AGAIN_S]
        for hosts in due:
            answer = all(map(_answers, hosts))
            with self._lock:
                self._failed.pop(hosts, None)
                if not answer and hosts in self._groups:
                    self._failed[hosts] = time.monotonic()


def _answers(host: str) -> bool:
    """Whether a party hangs up on a caller that says nothing: for one that is frozen, its system accepts calls, too."""
    try:
        with socket.create_connection(parse_address(host), _REACH_S) as calling:
            calling.shutdown(socket.SHUT_WR)
            return not calling.recv(1)
    except OSError:
        return False
