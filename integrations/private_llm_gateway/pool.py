"""A pool of sessions with the same parties: each request has one to itself while it runs.

A session that failed is renewed before it is used again, by whoever uses it next, so that parties that come back are
found without a restart. Sessions that are not known to have ended are used first.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from private_llm_hf.client.party_groups import PartyGroups

from private_llm.errors import (
    ConfigError,
    PartiesBusy,
    PartyFailed,
    PrivateLLMError,
    ProtocolAbort,
    ShareFileError,
    TransportError,
)

_LOG = logging.getLogger("private_llm")
_LOOK_S = 0.1  # how often a waiting request looks whether its client is still there
_TRIES = 3
_PAUSE_S = 0.2  # between tries to join the parties, which end what has just begun where they form their links anew


class PoolBusy(Exception):
    """No session came free in time."""


class Abandoned(Exception):
    """The client went away before there was a session, or while its prompt was read."""


def tried(join: Callable[[], Any], groups: PartyGroups | None = None) -> Any:  # noqa: ANN401
    """The result of `join`, called again if a party ends the session as it begins, or a group holds something else."""
    for _ in range(_TRIES - 1):
        try:
            return join()
        except PartyFailed as error:
            _LOG.debug("a session ended as it began: %s", error)
            time.sleep(_PAUSE_S)
        except (ConfigError, ShareFileError) as error:
            left = None if groups is None else groups.avoid_last()
            if left is None:
                raise
            _LOG.warning("the parties at %s are left out for a while: %s", ", ".join(left), error)
    return join()


class SessionPool:
    """Private models on up to `size` sessions, at `groups` of parties, if any. Thread-safe. Raises ConfigError."""

    def __init__(self, first: Any, size: int, groups: PartyGroups | None = None) -> None:  # noqa: ANN401
        if size < 1:
            raise ConfigError(f"sessions: got {size}; want at least 1")
        opening: Callable[[], Any] | None = getattr(first, "open_session", None)
        if opening is None and size > 1:
            raise ConfigError(f"sessions: got {size}; these parties serve one session at a time, so want 1")
        self.first, self.size, self.groups, self._opening = first, size, groups, opening
        self._idle, self._all = [first], [first]
        self._opened = 1
        self._ended: set[int] = set()
        self._waiting = 0
        self._trouble = self._healing = False
        self._changed = threading.Condition()
        self._closed = False

    @property
    def in_use(self) -> int:
        """Sessions that serve a request now."""
        with self._changed:
            return self._opened - len(self._idle)

    @property
    def healthy(self) -> bool:
        """Whether the parties did what was asked last."""
        with self._changed:
            return not self._trouble and not self._closed

    @contextmanager
    def session(
        self, timeout_s: float, gone: Callable[[], bool] = lambda: False, fits: Callable[[Any], int] = lambda model: 0
    ) -> Iterator[Any]:
        """A private model for one request, of those that are free the one that `fits` best. gone: whether nobody waits
        any more. Where parties let no further session in, others give theirs back. Raises PoolBusy after `timeout_s`,
        Abandoned, and what `renew` and opening a session raise.
        """
        until, full = time.monotonic() + timeout_s, False
        while True:
            model = self._take(until, gone, fits, full)
            try:
                found = self._live(model)
                break
            except PartiesBusy:
                with self._changed:
                    full = self._opened > len(self._idle) or any(id(each) not in self._ended for each in self._idle)
                if not full:
                    raise
        with self._using(found):
            yield found

    @contextmanager
    def spare_session(self) -> Iterator[Any]:
        """A further private model for a request that has one; None if somebody waits for it. Raises as `session`."""
        with self._changed:
            none = self._waiting or self._closed or (not self._idle and self._opened == self.size)
            model = None if none else self._pop()
        if none:
            yield None
            return
        found = self._live(model)
        with self._using(found):
            yield found

    @property
    def renews(self) -> bool:
        """Whether a session that ended can be followed by another."""
        return hasattr(self.first, "reconnect")

    def renew(self, model: Any) -> None:  # noqa: ANN401
        """Give a model a new session. Raises PartyFailed and other errors of the library."""
        with self._changed:
            self._ended.add(id(model))
        if not self.renews:
            raise PartyFailed("the session with the parties is over; start the gateway again")
        tried(model.reconnect, self.groups)
        with self._changed:
            self._ended.discard(id(model))
            self._trouble = False

    def heal(self) -> None:
        """After a failure: renew a session that ended in the background, unless that is being done."""
        with self._changed:
            ended = [model for model in self._idle if id(model) in self._ended]
            if self._healing or self._closed or not self._trouble or not ended:
                return
            self._healing = True
            self._idle.remove(ended[0])
        threading.Thread(target=self._heal, args=(ended[0],), name="renew", daemon=True).start()

    def _heal(self, model: Any) -> None:  # noqa: ANN401
        try:
            self.renew(model)
        except (PrivateLLMError, OSError) as error:
            _LOG.warning("the parties still cannot be reached: %s", error)
        finally:
            with self._changed:
                self._healing = False
                self._idle.append(model)
                self._changed.notify()

    def regroup(self) -> None:
        """Replace idle sessions that are better at another group of parties, one after the other: each by one that has
        begun there.
        """
        while self.groups is not None and self._opening is not None:
            with self._changed:
                crowded = [model for model in self._idle if self.groups.must_move(model.parties)]
                if self._closed or not crowded:
                    return
                old = kept = crowded[0]
                self._idle.remove(old)
            left: Any = None
            try:
                left = tried(self._opening, self.groups)
            except (PrivateLLMError, OSError) as error:
                _LOG.debug("a session stays where it is: %s", error)
            finally:
                with self._changed:
                    if left is not None and not self._closed and left.parties.config.hosts != old.parties.config.hosts:
                        kept, left = left, old
                    self._all = [kept if model is old else model for model in self._all]
                    self._idle.append(kept)
                    self._changed.notify()
            if left is not None:
                left.close()
            if kept is old:
                return

    def _live(self, model: Any) -> Any:  # noqa: ANN401
        """This model, on a new session if its own ended; without one, a model on a session that is counted already."""
        if model is None:
            return self._open()
        try:
            with self._changed:
                ended = id(model) in self._ended
            if ended:
                self.renew(model)
        except BaseException as error:
            with self._changed:
                failed = isinstance(error, TransportError | ProtocolAbort) and not isinstance(error, PartiesBusy)
                self._trouble = self._trouble or failed
                self._idle.append(model)
                self._changed.notify()
            raise
        return model

    @contextmanager
    def _using(self, model: Any) -> Iterator[None]:  # noqa: ANN401
        """Give a model back in the end."""
        try:
            yield
            with self._changed:
                self._trouble = False
        except PrivateLLMError as error:
            failed = isinstance(error, TransportError | ProtocolAbort)
            with self._changed:
                self._trouble = self._trouble or failed
                # also when the parties refuse a call
                if failed or getattr(getattr(model, "parties", None), "over", None) is not None:
                    self._ended.add(id(model))
            raise
        finally:
            with self._changed:
                self._idle.append(model)
                self._changed.notify()

    def close(self) -> None:
        """End all sessions."""
        with self._changed:
            self._closed = True
            models, self._all = self._all, []
            self._changed.notify_all()
        for model in models:
            model.close()

    def _take(self, until: float, gone: Callable[[], bool], fits: Callable[[Any], int], full: bool) -> Any:  # noqa: ANN401
        """As `_pop`, as soon as there is one. full: the parties let no further session in; want one that goes on."""

        def wait() -> bool:
            if full and self._opened > len(self._idle):
                return all(id(model) in self._ended for model in self._idle)
            return not self._idle and (self._opened == self.size or self._closed)

        with self._changed:
            self._waiting += 1
            try:
                while wait():
                    self._check(until, gone)
                    self._changed.wait(_LOOK_S)
                self._check(until, gone, waited=False)
            finally:
                self._waiting -= 1
            return self._pop(fits)

    def _pop(self, fits: Callable[[Any], int] = lambda model: 0) -> Any:  # noqa: ANN401
        """An idle model whose session goes on if there is one, of those that fit alike one at the group of parties with
        the fewest requests; None counts a session that is to be opened.
        """
        if not self._idle:
            self._opened += 1
            return None
        live = [at for at, model in enumerate(self._idle) if id(model) not in self._ended]
        if self.groups is None:
            return self._idle.pop(max(live, key=lambda at: (fits(self._idle[at]), at), default=-1))
        groups = [model.parties.config.hosts for model in self._idle]
        free, works = Counter(groups), [not self.groups.avoided(model.parties) for model in self._idle]
        return self._idle.pop(
            max(live, key=lambda at: (works[at], fits(self._idle[at]), free[groups[at]], at), default=-1)
        )

    def _open(self) -> Any:  # noqa: ANN401
        """A model on a new session, which is counted already."""
        try:
            made = tried(self._opening, self.groups)  # type: ignore[arg-type]
        except BaseException as error:
            with self._changed:
                self._opened -= 1
                self._trouble = self._trouble or not isinstance(error, PartiesBusy)
                self._changed.notify()
            raise
        with self._changed:
            self._all.append(made)
            self._trouble = False
        return made

    def _check(self, until: float, gone: Callable[[], bool], waited: bool = True) -> None:
        if self._closed:
            raise PartyFailed("the gateway is closing")
        if gone():
            raise Abandoned
        if waited and time.monotonic() > until:
            raise PoolBusy
