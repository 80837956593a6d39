"""Frames between threads, written and read by compiled programs, without Python's lock (Numba; Linux on x86-64).

A ring of words (`connection.ROOM`) has one writer and one reader, and a counter of the operating system says how many
messages there are (`net/memory_link.py`). Stores of one core are seen by others in the order in which they were made.
What is not in the ring, or not exactly the awaited frame, is left to Python.
"""

from __future__ import annotations

from numba import types

from private_llm.kernels.address import SIGNED, Array, flat
from private_llm.kernels.backends.cpu import connection as word
from private_llm.kernels.backends.cpu.frames import TRIES, copied, paused, slept
from private_llm.kernels.compiling import compiled

_write = types.ExternalFunction("write", types.intp(types.intc, types.uintp, types.uintp))
_read = types.ExternalFunction("read", types.intp(types.intc, types.uintp, types.uintp))


@compiled
def _words(count: int) -> int:
    """`connection.frame_words`."""
    return word.HEADER_WORDS * (1 + (count + word.HEADER_WORDS - 1) // word.HEADER_WORDS)


@compiled
def send(link: int, payload: int, count: int, tag: Array) -> bool:
    """Write a frame to the connection at address `link`: payload [count] (address), tag [4]. False: Python does it.

    Room is waited for, unless there is something to read from the same peer, who may be waiting, too.
    """
    row = flat(link, word.FIELDS, SIGNED)
    size = _words(count)
    if row[word.OUT] < 0 or size > word.ROOM:
        return False
    ring = flat(row[word.OUT_HEAD], word.RING_STATE + word.ROOM, SIGNED)
    at = ring[word.HEAD]
    while size > word.ROOM - (at - ring[word.TAIL]):
        if row[word.COUNTED] or not paused(row, link):
            return False
    head = word.RING_STATE + at % word.ROOM
    ring[head + word.NUMBER], ring[head + word.COUNT] = row[word.SENT] + 1, count
    for n in range(word.TAG_WORDS):
        ring[head + word.TAG + n] = tag[n]
    begin = (at + word.HEADER_WORDS) % word.ROOM
    first = min(count, word.ROOM - begin)
    frames_at = row[word.OUT_HEAD] + 8 * word.RING_STATE
    copied(frames_at + 8 * begin, payload, 8 * first)
    copied(frames_at, payload + 8 * first, 8 * (count - first))
    ring[word.HEAD] = at + size
    row[word.SENT] += 1
    row[word.SYSTEM] = 1
    _write(row[word.OUT], link + 8 * word.SYSTEM, 8)
    return True


@compiled
def _counted(row: Array, link: int) -> bool:
    """Subtract the next message from the counter; False if there is none within the time."""
    for _ in range(TRIES if row[word.SOON] else 1):
        if _read(row[word.IN], link + 8 * word.SYSTEM, 8) == 8:
            return True
    return bool(slept(row, link) and _read(row[word.IN], link + 8 * word.SYSTEM, 8) == 8)


@compiled
def receive(link: int, payload: int, count: int, tag: Array) -> bool:
    """Read a frame from a connection, which must be this one, to payload [count] (address). False: Python does it."""
    row = flat(link, word.FIELDS, SIGNED)
    if row[word.IN] < 0:
        return False
    if not row[word.COUNTED]:
        if not _counted(row, link):
            return False
        row[word.COUNTED] = 1
    ring = flat(row[word.IN_HEAD], word.RING_STATE + word.ROOM, SIGNED)
    at = ring[word.TAIL]
    if ring[word.HEAD] == at:
        return False
    head = word.RING_STATE + at % word.ROOM
    same = ring[head + word.NUMBER] == row[word.TAKEN] + 1 and ring[head + word.COUNT] == count
    for n in range(word.TAG_WORDS):
        same &= ring[head + word.TAG + n] == tag[n]
    if not same:
        return False
    begin = (at + word.HEADER_WORDS) % word.ROOM
    first = min(count, word.ROOM - begin)
    frames_at = row[word.IN_HEAD] + 8 * word.RING_STATE
    copied(payload, frames_at + 8 * begin, 8 * first)
    copied(payload + 8 * first, frames_at, 8 * (count - first))
    ring[word.TAIL] = at + _words(count)
    row[word.TAKEN] += 1
    row[word.COUNTED] = 0
    return True
