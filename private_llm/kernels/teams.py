"""Worker threads for programs: some stand ready in each process, and who runs a program borrows a team of them.

Workers wait in compiled code (Numba; Linux) and take a piece of a step within microseconds, without Python's lock; a
pool of Python's takes some 100. They end with the process. A team has one caller at a time and some workers, which
sleep until pieces are posted. Whoever is awake takes the next piece, the caller, too, so a worker that the system wakes
late or not at all delays nobody. What they share are words of 64 bits, read and written in one order that all see
(`sequentially consistent`); those that change often have a line of the cache each.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch
from llvmlite import ir
from numba import types

from private_llm.kernels.address import SIGNED, flat
from private_llm.kernels.compiling import compiled
from private_llm.kernels.emitting import I64, IrValue, emitted, pointer

HERE = sys.platform == "linux" and hasattr(os, "eventfd")  # whether there are teams

_LINE = 8
STATE, ROW, FINISHED, WAITING, DONE, WORKERS = (_LINE * n for n in range(6))
"""Words of a team. STATE: how many rows were posted, and in the lowest `_BITS` bits how many pieces nobody has taken.
ROW: the address of the row that was posted last. FINISHED: how many of its pieces are done. WAITING: whether the
caller sleeps until the counter (of the operating system) number DONE is raised. WORKERS: how many there are.
"""
ASLEEP, WAKE = 0, 1  # words of a worker: whether it sleeps until the counter number WAKE is raised
SCRATCH = _LINE - 1  # the last word of a line of DONE or of a worker: what is written to counters and read of them

_BITS = 16
_LEFT = (1 << _BITS) - 1
_TRIES = 3000  # how often somebody who waits looks before sleeping: some 10 us; to be woken takes 30 and more


_write = types.ExternalFunction("write", types.intp(types.intc, types.uintp, types.uintp))
_read = types.ExternalFunction("read", types.intp(types.intc, types.uintp, types.uintp))


def word_of(number: int, word: int) -> int:
    """A worker's word, among those of its team; the first one of nobody: how many words there are."""
    return WORKERS + _LINE * (number + 1) + word


@compiled
def _worker(team: int, number: int) -> int:
    """Where the words of a worker begin."""
    return team + 8 * (WORKERS + _LINE * (number + 1))


@emitted(types.int64, types.int64)
def call(builder: IrValue, function: IrValue, row: IrValue) -> None:
    """Call the function at an address with the address of a row."""
    kind = ir.FunctionType(ir.VoidType(), [I64.as_pointer()])
    builder.call(pointer(builder, function, kind), [pointer(builder, row, I64)])


@emitted(types.int64, returns=types.int64)
def _load(builder: IrValue, address: IrValue) -> IrValue:
    return builder.load_atomic(pointer(builder, address, I64), "seq_cst", 8)


@emitted(types.int64, types.int64, returns=types.int64)
def _exchange(builder: IrValue, address: IrValue, value: IrValue) -> IrValue:
    """Write a word, and return the one before."""
    return builder.atomic_rmw("xchg", pointer(builder, address, I64), value, "seq_cst")


@emitted(types.int64, returns=types.int64)
def _raised(builder: IrValue, address: IrValue) -> IrValue:
    """Add one to a word, and return the sum."""
    before = builder.atomic_rmw("add", pointer(builder, address, I64), I64(1), "seq_cst")
    return builder.add(before, I64(1))


@emitted(types.int64, types.int64, types.int64, returns=types.boolean)
def _replaced(builder: IrValue, address: IrValue, before: IrValue, after: IrValue) -> IrValue:
    """Write `after` where `before` is; whether it was."""
    pair = builder.cmpxchg(pointer(builder, address, I64), before, after, "seq_cst", "seq_cst")
    return builder.extract_value(pair, 1)


@compiled
def _raise(counter: int, scratch: int) -> None:
    """Wake who sleeps at a counter."""
    flat(scratch, 1, SIGNED)[0] = 1
    _write(counter, scratch, 8)


@compiled
def _sleep(counter: int, scratch: int) -> None:
    """Until a counter is raised; it is 0 then."""
    while _read(counter, scratch, 8) != 8:  # a signal came
        pass


@compiled
def piece(row: int, number: int) -> None:
    """Compute a piece of the row at an address: pieces, where each begins (in words), and after it their steps, how
    many, and for each how many words, its function and what it takes.
    """
    words = flat(row, 1 << 40, SIGNED)
    at = words[1 + number]
    count = words[at]
    at += 1
    for _ in range(count):
        call(words[at + 1], row + 8 * (at + 2))
        at += 1 + words[at]


@compiled
def _taken(team: int) -> bool:
    """Compute one of the pieces that nobody has taken; False if there is none."""
    state = _load(team + 8 * STATE)
    while state & _LEFT:
        # as long as this piece is not taken, nobody posts another row
        row = _load(team + 8 * ROW)
        if _replaced(team + 8 * STATE, state, state - 1):
            pieces = flat(row, 1, SIGNED)[0]
            piece(row, (state & _LEFT) - 1)
            if _raised(team + 8 * FINISHED) == pieces and _exchange(team + 8 * WAITING, 0):
                words = flat(team, WORKERS, SIGNED)
                _raise(words[DONE], team + 8 * (WAITING + SCRATCH))
            return True
        state = _load(team + 8 * STATE)
    return False


@compiled
def alone(row: int) -> None:
    """Compute all pieces of the row at an address, one after the other."""
    for number in range(flat(row, 1, SIGNED)[0]):
        piece(row, number)


@compiled
def together(team: int, row: int) -> None:
    """Compute all pieces of the row at an address with the team at another; on Linux only."""
    pieces = flat(row, 1, SIGNED)[0]
    words = flat(team, WORKERS + 1, SIGNED)
    posted = _load(team + 8 * STATE) >> _BITS
    _exchange(team + 8 * ROW, row)
    _exchange(team + 8 * FINISHED, 0)
    _exchange(team + 8 * STATE, ((posted + 1) << _BITS) | pieces)
    for number in range(min(pieces - 1, words[WORKERS])):
        worker = _worker(team, number)
        if _exchange(worker + 8 * ASLEEP, 0):
            _raise(flat(worker, _LINE, SIGNED)[WAKE], team + 8 * (DONE + SCRATCH))
    while _taken(team):
        pass
    for _ in range(_TRIES):
        if _load(team + 8 * FINISHED) == pieces:
            return
    while True:
        _exchange(team + 8 * WAITING, 1)
        done = _load(team + 8 * FINISHED) == pieces
        # done: unless somebody saw it waiting, and wakes it; not done: a worker of the row before may wake it, too
        if not done or not _exchange(team + 8 * WAITING, 0):
            _sleep(words[DONE], team + 8 * (DONE + SCRATCH))
        if done:
            return


@compiled
def serve(team: int, number: int) -> None:
    """Take pieces, as long as the process lives."""
    worker = _worker(team, number)
    own = flat(worker, _LINE, SIGNED)
    while True:
        if _taken(team):
            continue
        tries = _TRIES
        while tries and not _load(team + 8 * STATE) & _LEFT:
            tries -= 1
        if tries:
            continue
        _exchange(worker + 8 * ASLEEP, 1)
        if _load(team + 8 * STATE) & _LEFT:
            _exchange(worker + 8 * ASLEEP, 0)
        else:
            _sleep(own[WAKE], worker + 8 * SCRATCH)


# -- in Python --------------------------------------------------------------------------------------------------------
_lock = threading.Lock()
_idle: list[Team] = []


class Team:
    """Workers that compute pieces for one caller at a time; fewer, where the system gives no more."""

    def __init__(self, workers: int) -> None:
        room = np.zeros(word_of(workers, 0) + _LINE, np.int64)
        self._words = room[-(room.ctypes.data // 8) % _LINE :]
        self.address = int(self._words.ctypes.data)  # what compiled code takes for it
        self.wanted, self.workers = workers, 0
        with suppress(OSError, RuntimeError):  # counters and threads are not unlimited
            self._words[DONE] = os.eventfd(0, os.EFD_CLOEXEC)
            while self.workers < workers:
                counter = os.eventfd(0, os.EFD_CLOEXEC)
                self._words[word_of(self.workers, WAKE)] = counter
                try:
                    threading.Thread(target=self._serve, args=(self.workers,), name="team", daemon=True).start()
                except RuntimeError:
                    os.close(counter)
                    raise
                self.workers += 1
        self._words[WORKERS] = self.workers

    def _serve(self, number: int) -> None:
        serve(self.address, number)


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
