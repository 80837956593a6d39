"""What a connection is to a compiled program: a row of 64-bit words (`frames.py`), lent by its two ends in Python."""

from __future__ import annotations

import platform
import sys

HERE = sys.platform == "linux" and sys.maxsize > 1 << 32 and platform.machine() in {"x86_64", "aarch64"}
"""Whether sockets have the constants and structures that compiled programs know."""

HEADER_WORDS = 8
HEADER = 8 * HEADER_WORDS
INLINE = 64 << 10
"""Bytes of the largest payload that a program writes; a larger one may have to wait until its reader has room."""

FIELDS = 32
(
    OUT, SENT, OUT_HEAD, WRITTEN, OUT_PLACE, OUT_SIZE, OUT_PART,
    IN, TAKEN, BUFFER, START, END, SIZE, IN_HEAD, IN_SESSION, PLACE, IN_PART, SOON, WAIT_MS,
    SYSTEM,
) = range(20)  # fmt: skip
"""Words of a connection. OUT, IN: numbers of the sockets, -1 for none. SENT, TAKEN: frames so far. OUT_HEAD: where the
header to be sent is, its first two words filled in. WRITTEN: bytes of whole frames. OUT_PART: bytes of the next frame
that were written before the connection was full, 0 if none; its payload is OUT_SIZE bytes at OUT_PLACE.

BUFFER, START, END, SIZE: what was read ahead. IN_HEAD, IN_SESSION: the first two words of every header that comes.
IN_PART: bytes of a payload that lie at PLACE before it stalled, its header taken; -1 if there is none. SOON: whether
the last message came almost at once. WAIT_MS: how long to wait. From SYSTEM on: structures for the operating system.
"""
