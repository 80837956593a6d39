"""Closing what nobody holds any more, in a thread of its own.

Python collects garbage in any thread and inside any lock. To close a session means to send, to wait for threads and to
take locks: where garbage is collected, that could wait for ever for a lock that the same thread holds.
"""

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable

from private_llm.forks import Origin

_LOG = logging.getLogger("private_llm")


class _Closer:
    """The thread that closes what was dropped in this process."""

    def __init__(self) -> None:
        self.origin = Origin()
        self.dropped: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # `put` takes no lock of Python's
        threading.Thread(target=self._run, name="closing what was dropped", daemon=True).start()

    def _run(self) -> None:
        while True:
            close = self.dropped.get()
            try:
                close()
            except Exception as error:  # noqa: BLE001 - whatever it is, nobody is left to be told
                _LOG.warning("a session that nobody held did not end in order: %s", type(error).__name__)
            atexit.unregister(close)


_closers: list[_Closer] = []
_making = threading.Lock()


def _closer() -> _Closer:
    """This process's; threads do not live on in forks."""
    with _making:
        if not _closers or not _closers[-1].origin.here:
            _closers[:] = [_Closer()]
        return _closers[-1]


def close_when_dropped(owner: object, close: Callable[[], object]) -> Callable[[], None]:
    """Call `close` soon after nobody holds `owner` any more, or when the interpreter ends; the result does so at once.

    close: may wait and take locks; must not hold `owner`; may be called again.
    """
    last = weakref.finalize(owner, _closer().dropped.put, close)
    last.atexit = False  # that thread would not come to it
    atexit.register(close)

    def now() -> None:
        last.detach()
        close()
        atexit.unregister(close)

    return now
