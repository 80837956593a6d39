"""Whoever waits for kernels to be compiled is told why: by a bar on stderr, or by one line where that is no terminal.

It comes once compilations have taken two seconds, and goes when nothing is compiled any more. What shows progress of
its own takes its place (`shown_by`), and so does whoever writes an answer to the same terminal.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

PATIENCE_S = 2.0  # how long compilations may take before something is said
_IDLE_S = 1.0  # between two compilations that count as one wait
_TICK_S = 0.1

Tell = Callable[[str], None]  # takes the name of a kernel just before it is compiled


class _Note:
    def __init__(self) -> None:
        self.others: list[Tell | None] = []  # who shows it instead, the last one; None: nobody
        self.said = False
        self.of_client = False  # whether this process writes on the terminal of a client, which writes texts there
        self.begin_anew()

    def begin_anew(self) -> None:
        self._lock, self._clear = threading.Lock(), threading.Event()
        self._clear.set()  # no bar is on the terminal
        self._running, self._idle_since, self._name = 0, 0.0, ""
        self._shown = False

    def begins(self, name: str, why: Callable[[], str]) -> None:
        """This kernel is compiled, or read from disk."""
        with self._lock:
            self._running, self._name = self._running + 1, name
            begin, self._shown = not self._shown, True
        if begin:
            try:
                threading.Thread(target=self._show, args=(why,), name="compiling", daemon=True).start()
            except RuntimeError:  # no thread is left for a note
                self._shown = False

    def ends(self) -> None:
        with self._lock:
            self._running, self._idle_since = self._running - 1, time.monotonic()

    def _over(self) -> bool:
        with self._lock:
            if self._running or time.monotonic() - self._idle_since < _IDLE_S:
                return False
            self._shown = False
            return True

    def _show(self, why: Callable[[], str]) -> None:
        begun = time.monotonic()
        while not self._over():
            time.sleep(_TICK_S)
            if time.monotonic() - begun < PATIENCE_S:
                continue
            with self._lock:
                if self.others:
                    continue
                self._clear.clear()
            try:
                with suppress(OSError, ValueError):  # stderr is gone
                    if sys.stderr.isatty():
                        self._bar(begun)
                    elif not self.said:
                        self.said = True
                        sys.stderr.write(f"{why()}\n")
                        sys.stderr.flush()
            finally:
                self._clear.set()

    def take(self, tell: Tell | None) -> None:
        """From now on `tell` shows it, on a terminal without a bar."""
        with self._lock:
            self.others.append(tell)
        self._clear.wait(_IDLE_S)

    def answers(self) -> None:
        """A party hands over an answer: a client on its terminal may write the text, so nothing is shown now."""
        if self.of_client and not self.others:
            self.take(None)

    def _bar(self, begun: float) -> None:
        """Until others show it, or nothing has been compiled for a while."""
        from rich.console import Console  # which takes a while to import
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            TextColumn("{task.fields[spent]:.0f}s"),
        )
        console = Console(stderr=True)
        with Progress(
            *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
        ) as bar:  # fmt: skip
            task = bar.add_task("", total=None, spent=0.0)
            while not self.others and (self._running or time.monotonic() - self._idle_since < _IDLE_S):
                bar.update(task, description=f"compiling kernels: {self._name}", spent=time.monotonic() - begun)
                time.sleep(_TICK_S)


NOTE = _Note()


@contextmanager
def shown_by(tell: Tell | None) -> Iterator[None]:
    """Inside, `tell` shows what is compiled in this process; None: nobody does."""
    NOTE.take(tell)
    try:
        yield
    finally:
        NOTE.others.remove(tell)


class Streamed:
    """A streamer of transformers'; from an answer's first token to `close` nobody tells its terminal of kernels."""

    def __init__(self, streamer: Any) -> None:  # noqa: ANN401 - transformers' own
        self._streamer, self._given, self._quiet = streamer, 0, ExitStack()

    def put(self, value: object) -> None:
        """The prompt, then each token."""
        self._given += 1
        if self._given == 2:
            self._quiet.enter_context(shown_by(None))
        self._streamer.put(value)

    def end(self) -> None:
        """As the streamer."""
        self._streamer.end()

    def close(self) -> None:
        """The answer is over."""
        self._quiet.close()


if hasattr(os, "register_at_fork"):  # a forked child has no such thread, and perhaps its lock
    os.register_at_fork(after_in_child=NOTE.begin_anew)
