"""One direction between two threads of one process: tensors as they are, and frames that compiled programs write.

Messages are numbered. Each is either an object of Python's, or a frame in a ring of memory that the program of one
party writes and that of another reads, without Python's lock (`frames.py`). A counter of the
operating system says how many are there; who waits, waits for it. Without such counters everything is an object.
"""

import contextlib
import ctypes
import functools
import os
import queue
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from private_llm.net import connection as word
from private_llm.net.direct import Row
from private_llm.net.transport import Ready

Item = tuple[str, Tensor, bool, Ready | None]
"""A tag, a payload, whether the writer counts its bytes until they are read, and when a payload on a GPU is there."""

_WAIT_MS = 200  # how long a program waits, all in all, before Python does
_LONGEST_MS = 2**31 - 1  # that the operating system can wait; some 25 days


class ObjectLink:
    """A queue of tensors with one reader and one writer; anybody may call `wake`."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._first: deque[Item | None] = deque()
        self.put = self._items.put

    def get(self, timeout: float | None = None) -> Item | None:
        """The next one; None after `wake`. Raises queue.Empty if there is none in time."""
        return self._first.popleft() if self._first else self._items.get(timeout=timeout)

    def wait(self) -> None:
        """Until there is one."""
        if not self._first:
            self._first.append(self._items.get())

    def empty(self) -> bool:
        """Whether `get` would wait."""
        return not self._first and self._items.empty()

    def wake(self) -> None:
        """Let the reader's `get` or `wait` return."""
        self._items.put(None)


@functools.cache
def _calls() -> ctypes.PyDLL:
    """The C library, called with Python's lock held: giving it up for a microsecond would cost milliseconds."""
    found = ctypes.PyDLL(None)
    found.eventfd_write.argtypes = [ctypes.c_int, ctypes.c_uint64]
    found.eventfd_read.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_uint64)]
    return found


class MemoryLink:
    """As `ObjectLink`, but its two ends can be lent to programs (`Writer`, `Reader`), but not once it was woken.

    counter: of messages, at the operating system. written, read: messages so far; the writer's and the reader's alone.
    counted: whether the next one is subtracted from the counter already. ended: it was woken.
    """

    def __init__(self) -> None:
        self.counter = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # not when the interpreter ends: threads of parties may still run, and write to the next file of this number
        weakref.finalize(self, os.close, self.counter).atexit = False
        self.ended = False
        self._poll = select.poll()
        self._poll.register(self.counter, select.POLLIN)
        self._objects: deque[Item] = deque()
        self.written = self.read = 0
        self.counted = False
        self._ring: Row | None = None
        self._place = 0
        self._making = threading.Lock()
        self._add: Callable[[], int] = functools.partial(_calls().eventfd_write, self.counter, 1)
        taken = ctypes.pointer(ctypes.c_uint64())
        self._take: Callable[[], int] = functools.partial(_calls().eventfd_read, self.counter, taken)  # 0 if it could

    def put(self, item: Item) -> None:
        """As `ObjectLink`."""
        self._objects.append(item)
        self.written += 1
        self._add()

    def wake(self) -> None:
        """As `ObjectLink`; from now on no end is lent."""
        self.ended = True
        self._add()

    def empty(self) -> bool:
        """As `ObjectLink`."""
        self.counted = self.counted or not self._take()
        return not self.counted

    def wait(self) -> None:
        """As `ObjectLink`."""
        while self.empty():
            self._poll.poll()

    def get(self, timeout: float | None = None) -> Item | None:
        """As `ObjectLink`."""
        if not self.counted and self._take():
            self._poll.poll(None if timeout is None else min(timeout * 1000, _LONGEST_MS))
            if self._take():
                raise queue.Empty
        self.counted = False
        self.read += 1
        ring = self._ring
        if ring is not None and ring[word.TAIL] != ring[word.HEAD]:
            head = _front(ring, 0, word.HEADER_WORDS)
            if head[word.NUMBER] == self.read:
                return self._taken(ring, head)
        return self._objects.popleft() if self._objects else None

    def _taken(self, ring: Row, head: Row) -> Item:
        count = int(head[word.COUNT])
        payload = torch.from_numpy(_front(ring, word.HEADER_WORDS, count))
        ring[word.TAIL] += word.frame_words(count)
        return head[word.TAG : word.TAG + word.TAG_WORDS].tobytes().rstrip(b"\0").decode(), payload, False, None

    def place(self) -> int:
        """The address of the ring, which is made when an end is lent first."""
        if not self._place:
            with self._making:
                if self._ring is None:
                    self._ring = np.zeros(word.RING_STATE + word.ROOM, np.int64)
                self._place = int(self._ring.ctypes.data)
        return self._place


def _front(ring: Row, skip: int, count: int) -> Row:
    """A copy of `count` words of a ring after its first `skip`."""
    places = (int(ring[word.TAIL]) + skip + np.arange(count)) % word.ROOM
    made: Row = ring[word.RING_STATE + places]
    return made


class Writer:
    """The end of a link that puts, for programs."""

    def __init__(self, link: MemoryLink) -> None:
        self._link = link

    def lend(self, row: Row) -> None:
        """Let a program write frames, until `take_back`."""
        link = self._link
        if not link.ended:
            row[word.KIND], row[word.SENT] = word.MEMORY, link.written
            row[word.OUT_HEAD] = link.place()
            row[word.OUT] = link.counter

    def take_back(self, row: Row) -> None:
        """The end of `lend`."""
        if row[word.OUT] >= 0:
            self._link.written = int(row[word.SENT])
            row[word.OUT] = -1


class Reader:
    """The end of a link that gets, for programs."""

    def __init__(self, link: MemoryLink) -> None:
        self._link = link

    def lend(self, row: Row) -> None:
        """Let a program read frames, until `take_back`."""
        link = self._link
        if not link.ended:
            row[word.KIND], row[word.TAKEN], row[word.COUNTED] = word.MEMORY, link.read, link.counted
            row[word.IN_HEAD], row[word.WAIT_MS], row[word.WAITED] = link.place(), _WAIT_MS, 0
            row[word.IN] = link.counter

    def take_back(self, row: Row) -> None:
        """The end of `lend`."""
        if row[word.IN] >= 0:
            self._link.read, self._link.counted = int(row[word.TAKEN]), bool(row[word.COUNTED])
            row[word.IN] = -1


def new_link(*, lent: bool) -> ObjectLink | MemoryLink:
    """A link; lent: whether programs at both ends may want to use it."""
    if lent and word.IN_MEMORY:
        with contextlib.suppress(OSError):  # no counter is free
            return MemoryLink()
    return ObjectLink()
