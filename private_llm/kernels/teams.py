"""Worker threads for programs: some stand ready in each process, and who runs a program borrows a team of them.

Workers wait in compiled code (`backends/cpu/team.py`) and take a piece of a step within microseconds, without Python's
lock; a pool of Python's takes some 100. They end with the process.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch

from private_llm.kernels.backends.cpu import team as cpu

HERE = sys.platform == "linux" and hasattr(os, "eventfd")
"""Whether there are teams."""

_LINE = 64
_lock = threading.Lock()
_idle: list[Team] = []


class Team:
    """Workers that compute pieces for one caller at a time; fewer, where the system gives no more."""

    def __init__(self, workers: int) -> None:
        room = np.zeros(cpu.words(workers) + _LINE // 8, np.int64)
        self._words = room[-(room.ctypes.data // 8) % (_LINE // 8) :]
        self.address = int(self._words.ctypes.data)
        """What compiled code takes for it."""
        self.wanted, self.workers = workers, 0
        with suppress(OSError, RuntimeError):  # counters and threads are not unlimited
            self._words[cpu.DONE] = os.eventfd(0, os.EFD_CLOEXEC)
            while self.workers < workers:
                counter = os.eventfd(0, os.EFD_CLOEXEC)
                self._words[cpu.word_of(self.workers, cpu.WAKE)] = counter
                try:
                    threading.Thread(target=self._serve, args=(self.workers,), name="team", daemon=True).start()
                except RuntimeError:
                    os.close(counter)
                    raise
                self.workers += 1
        self._words[cpu.WORKERS] = self.workers

    def _serve(self, number: int) -> None:
        cpu.serve(self.address, number)


@contextmanager
def lent(pieces: int) -> Iterator[int]:
    """The address of a team for a step of so many pieces, that nobody else uses meanwhile; 0 for one piece."""
    if pieces < 2 or not HERE:
        yield 0
        return
    with _lock:
        found = next((team for team in _idle if team.wanted >= pieces - 1), None)
        if found is not None:
            _idle.remove(found)
    if found is None:
        found = Team(max(pieces, torch.get_num_threads()) - 1)
    try:
        yield found.address if found.workers else 0
    finally:
        with _lock:
            _idle.append(found)


if hasattr(os, "register_at_fork"):  # a forked child has no such threads

    def _forget() -> None:
        global _lock
        _lock = threading.Lock()
        _idle.clear()

    os.register_at_fork(after_in_child=_forget)
