"""What a connection is to a compiled program: a row of 64-bit words (`frames.py`), lent by its two ends in Python."""

import os
import platform
import sys

HERE = sys.platform == "linux" and sys.maxsize > 1 << 32 and platform.machine() in {"x86_64", "aarch64"}
"""Whether sockets have the constants and structures that compiled programs know."""
IN_MEMORY = HERE and hasattr(os, "eventfd") and platform.machine() == "x86_64"
"""Whether links between threads are lent: their ring needs stores to be seen in the order in which they were made."""

HEADER_WORDS = 8
HEADER = 8 * HEADER_WORDS
INLINE = 64 << 10  # bytes of the largest payload that Python writes; a larger one may wait until its reader has room
LARGEST = 4 << 20
"""Bytes of the largest payload that a program writes: as many as Unix sockets keep (`net/addresses.py`), so that two
who send to each other at the same time need not wait; others go on in Python."""

FIELDS = 40
SOCKET, MEMORY = range(2)  # KIND: what the connection is made of
(
    KIND, OUT, SENT, OUT_HEAD, WRITTEN, OUT_PLACE, OUT_SIZE, OUT_PART,
    IN, TAKEN, BUFFER, START, END, SIZE, IN_HEAD, IN_SESSION, PLACE, IN_PART, COUNTED, SOON, WAIT_MS, WAITED,
    SYSTEM,
) = range(23)  # fmt: skip
"""Words of a connection. OUT, IN: numbers of the sockets, -1 for none. SENT, TAKEN: frames so far. OUT_HEAD: where the
header to be sent is, its first two words filled in. WRITTEN: bytes of whole frames. OUT_PART: bytes of the next frame
that were written before the connection was full, 0 if none; its payload is OUT_SIZE bytes at OUT_PLACE.

BUFFER, START, END, SIZE: what was read ahead. IN_HEAD, IN_SESSION: the first two words of every header that comes.
IN_PART: bytes of a payload that lie at PLACE before it stalled, its header taken; -1 if there is none. SOON: whether
the last message came almost at once. WAIT_MS: how long to wait, all in all; WAITED: ns so far. From SYSTEM on:
structures for the operating system, at most 11 words.

In memory OUT and IN are the counters, OUT_HEAD and IN_HEAD where the rings are; COUNTED: whether the next message is
subtracted from the counter already.
"""

HEAD, TAIL, RING_STATE = 0, 8, 16
"""Words of a ring before its frames: how many words were ever written, and read, each in a line of the cache."""
ROOM = 1 << 16  # words of frames in a ring
TAG_WORDS = 4
NUMBER, COUNT, TAG = 0, 1, 2  # a frame's header in a ring: number of the message, from 1 on, elements, tag


def frame_words(count: int) -> int:
    """Words of a frame of `count` elements in a ring: whole headers, so that no header is cut in two."""
    return HEADER_WORDS * (1 + -(-count // HEADER_WORDS))
