"""Frames of plain sockets and of links between threads, written and read by compiled programs (Numba, GIL-free; Linux).

A frame of a socket is what `net/wire.py` says: 8 words of header, of which two are the same for a whole connection,
then the number of the frame and the number of elements (both big-endian), and 4 words of tag; then 64-bit elements.

A link between threads (x86-64) is a ring of words (`connection.ROOM`) with one writer and one reader, and a counter of
the operating system, which says how many messages there are (`net/memory_link.py`). Stores of one core are seen by
others in the order in which they were made.

Nothing here decides what a peer did wrong. What is not simply there, or not exactly the awaited frame, is left to
Python: a note, another header, a broken connection, silence. A full one is waited for, unless the peer has written.
"""

import numpy as np
from numba import types

from private_llm.kernels.address import SIGNED, Array, flat
from private_llm.kernels.compiling import compiled
from private_llm.net import connection as word

_DO_NOT_WAIT, _NO_SIGNAL = 0x40, 0x4000
_POLLIN, _POLLOUT, _POLLERR = np.int64(1), np.int64(4), np.int64(8)
_NONE = np.int64(0)  # typed: for numbers as they are Numba would compile a function once more
_MONOTONIC = 1
_TRIES = 60
"""How often a message is looked for before the thread sleeps, if the last one came soon: for some 15 us. A sleep and
its end take 50, and a step waits for hundreds of messages. Three parties on two cores that looked for 40 us took 3 %
longer for a token, because the third one could have computed meanwhile; 5 us cost as much."""
_SOON_NS = 200_000  # a sleep that was no longer was hardly worth it

_send = types.ExternalFunction("sendmsg", types.intp(types.intc, types.uintp, types.intc))
_recv = types.ExternalFunction("recv", types.intp(types.intc, types.uintp, types.uintp, types.intc))
_clock = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.uintp))
_poll = types.ExternalFunction("poll", types.intc(types.uintp, types.uintp, types.intc))
_copied = types.ExternalFunction("memmove", types.uintp(types.uintp, types.uintp, types.uintp))
"""_copied(to, source, bytes), by address."""


@compiled
def _turned(number: int) -> int:
    """A number that is not negative, with its bytes in the other order."""
    made = 0
    for _ in range(8):
        made = (made << 8) | (number & 255)
        number >>= 8
    return made


@compiled
def send(link: int, payload: int, count: int, tag: Array) -> bool:
    """Write a frame to the connection at address `link`: payload [count] (address), tag [4]. False: Python does it.

    One that is full is waited for, unless there is something to read from the same peer, who may be waiting, too.
    """
    row = flat(link, word.FIELDS, SIGNED)
    size = 8 * count
    if row[word.OUT] < 0 or size > word.LARGEST:
        return False
    head = flat(row[word.OUT_HEAD], word.HEADER_WORDS, SIGNED)
    head[2], head[3] = _turned(row[word.SENT]), _turned(count)
    for n in range(4):
        head[4 + n] = tag[n]
    done = max(_written(row, link, payload, size, _NONE), 0)
    while done < word.HEADER + size and _waited(row, link, row[word.OUT], _POLLOUT, row[word.IN]):
        more = _written(row, link, payload, size, done)
        if more <= 0:  # broken, which Python finds out
            break
        done += more
    if done == word.HEADER + size:
        row[word.SENT] += 1
        row[word.WRITTEN] += done
        return True
    row[word.OUT_PART], row[word.OUT_PLACE], row[word.OUT_SIZE] = done, payload, size
    return False


@compiled
def _written(row: Array, link: int, payload: int, size: int, done: int) -> int:
    """Bytes of a frame, its header first, that the operating system took after the first `done`; -1 for none."""
    # struct msghdr: no name, two pieces, no control data; after it the pieces
    for n in range(7):
        row[word.SYSTEM + n] = 0
    row[word.SYSTEM + 2], row[word.SYSTEM + 3] = link + 8 * (word.SYSTEM + 7), 2
    head, body = min(done, word.HEADER), max(done - word.HEADER, 0)
    row[word.SYSTEM + 7], row[word.SYSTEM + 8] = row[word.OUT_HEAD] + head, word.HEADER - head
    row[word.SYSTEM + 9], row[word.SYSTEM + 10] = payload + body, size - body
    return int(_send(row[word.OUT], link + 8 * word.SYSTEM, _DO_NOT_WAIT | _NO_SIGNAL))


@compiled
def _now(link: int) -> int:
    """Nanoseconds of a clock that only goes forward."""
    time = flat(link + 8 * (word.SYSTEM + 1), 2, SIGNED)
    _clock(_MONOTONIC, link + 8 * (word.SYSTEM + 1))
    return int(time[0] * 1_000_000_000 + time[1])


@compiled
def _waited(row: Array, link: int, descriptor: int, event: int, other: int) -> bool:
    """Sleep until a descriptor is ready; False after WAIT_MS, a broken connection, or once `other` (-1: none) is."""
    left = max(0, row[word.WAIT_MS] - row[word.WAITED] // 1_000_000)
    began = _now(link)
    # struct pollfd: the number, and what is awaited; the upper 16 bits are what has come
    row[word.SYSTEM], row[word.SYSTEM + 1] = descriptor | (event << 32), (other & 0xFFFFFFFF) | (_POLLIN << 32)
    _poll(link + 8 * word.SYSTEM, 2 if other >= 0 else 1, left)
    come = row[word.SYSTEM] >> 48
    row[word.WAITED] += _now(link) - began
    return bool(come != 0 and (come & _POLLERR) == 0)


@compiled
def _paused(row: Array, link: int) -> bool:
    """Sleep for a millisecond; False as soon as there is something to read, and after WAIT_MS in all sleeps."""
    if row[word.WAITED] >= row[word.WAIT_MS] * 1_000_000:
        return False
    began = _now(link)
    row[word.SYSTEM] = (row[word.IN] & 0xFFFFFFFF) | (_POLLIN << 32)
    come = _poll(link + 8 * word.SYSTEM, 1, 1)
    row[word.WAITED] += _now(link) - began
    return bool(come == 0)


@compiled
def _slept(row: Array, link: int) -> bool:
    """Sleep until there is something to read, as `_waited`; SOON says whether that was almost at once."""
    before = row[word.WAITED]
    ready = _waited(row, link, row[word.IN], _POLLIN, _NONE - 1)
    row[word.SOON] = row[word.WAITED] - before < _SOON_NS
    return bool(ready)


@compiled
def _read(row: Array, link: int, to: int, size: int) -> int:
    """Bytes that were read, at least one; 0 or less if there are none within the time, or never again."""
    tries = _TRIES if row[word.SOON] else 1
    for _ in range(tries):
        got = _recv(row[word.IN], to, size, _DO_NOT_WAIT)
        if got >= 0:
            return int(got)
    return int(_recv(row[word.IN], to, size, _DO_NOT_WAIT)) if _slept(row, link) else 0


@compiled
def receive(link: int, payload: int, count: int, tag: Array) -> bool:
    """Read a frame from a connection, which must be this one, to payload [count] (address). False: Python does it."""
    row = flat(link, word.FIELDS, SIGNED)
    if row[word.IN] < 0:
        return False
    if row[word.SIZE] - row[word.START] < word.HEADER:
        _copied(row[word.BUFFER], row[word.BUFFER] + row[word.START], row[word.END] - row[word.START])
        row[word.START], row[word.END] = 0, row[word.END] - row[word.START]
    while row[word.END] - row[word.START] < word.HEADER:
        if row[word.START] == row[word.END]:
            row[word.START] = row[word.END] = 0
        got = _read(row, link, row[word.BUFFER] + row[word.END], row[word.SIZE] - row[word.END])
        if got <= 0:
            return False
        row[word.END] += got
    head = flat(row[word.BUFFER] + row[word.START], word.HEADER_WORDS, SIGNED)
    same = head[0] == row[word.IN_HEAD] and head[1] == row[word.IN_SESSION]
    same &= head[2] == _turned(row[word.TAKEN]) and head[3] == _turned(count)
    for n in range(4):
        same &= head[4 + n] == tag[n]
    if not same:
        return False
    row[word.START] += word.HEADER
    row[word.TAKEN] += 1
    size = 8 * count
    done = min(size, row[word.END] - row[word.START])
    _copied(payload, row[word.BUFFER] + row[word.START], done)
    row[word.START] += done
    while done < size:
        got = _read(row, link, payload + done, size - done)
        if got <= 0:
            row[word.PLACE], row[word.IN_PART] = payload, done
            return False
        done += got
    return True


# -- links between threads --------------------------------------------------------------------------------------------
_raise = types.ExternalFunction("write", types.intp(types.intc, types.uintp, types.uintp))
_lower = types.ExternalFunction("read", types.intp(types.intc, types.uintp, types.uintp))


@compiled
def _words(count: int) -> int:
    """`connection.frame_words`."""
    return word.HEADER_WORDS * (1 + (count + word.HEADER_WORDS - 1) // word.HEADER_WORDS)


@compiled
def put(link: int, payload: int, count: int, tag: Array) -> bool:
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
        if row[word.COUNTED] or not _paused(row, link):
            return False
    head = word.RING_STATE + at % word.ROOM
    ring[head + word.NUMBER], ring[head + word.COUNT] = row[word.SENT] + 1, count
    for n in range(word.TAG_WORDS):
        ring[head + word.TAG + n] = tag[n]
    begin = (at + word.HEADER_WORDS) % word.ROOM
    first = min(count, word.ROOM - begin)
    frames_at = row[word.OUT_HEAD] + 8 * word.RING_STATE
    _copied(frames_at + 8 * begin, payload, 8 * first)
    _copied(frames_at, payload + 8 * first, 8 * (count - first))
    ring[word.HEAD] = at + size
    row[word.SENT] += 1
    row[word.SYSTEM] = 1
    _raise(row[word.OUT], link + 8 * word.SYSTEM, 8)
    return True


@compiled
def _counted(row: Array, link: int) -> bool:
    """Subtract the next message from the counter; False if there is none within the time."""
    for _ in range(_TRIES if row[word.SOON] else 1):
        if _lower(row[word.IN], link + 8 * word.SYSTEM, 8) == 8:
            return True
    return bool(_slept(row, link) and _lower(row[word.IN], link + 8 * word.SYSTEM, 8) == 8)


@compiled
def take(link: int, payload: int, count: int, tag: Array) -> bool:
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
    _copied(payload, frames_at + 8 * begin, 8 * first)
    _copied(payload + 8 * first, frames_at, 8 * (count - first))
    ring[word.TAIL] = at + _words(count)
    row[word.TAKEN] += 1
    row[word.COUNTED] = 0
    return True
