"""The process's memory allocator, set for tensors of many megabytes that come and go at every operation.

A session keeps what it frees, for its next operation; the end of a session gives it back to the system.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from functools import cache
from pathlib import Path

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
"""Parameter names of mallopt(3)."""
_MAPPED_FROM = 1 << 30
_KEPT = (1 << 31) - 1
_GROWTH = 256 << 20
ARENAS = 4
"""Heaps of the process. Every thread would get one of its own, up to eight per core, and keep what it freed there."""
_CONTAINER = Path("/sys/fs/cgroup/memory.max")
"""Where Linux says how much memory a container may use."""


def memory_bytes() -> int:
    """Main memory of this machine, or of the container that this process runs in."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
        return min(whole, int(_CONTAINER.read_text()))
    return whole


def tune_allocator() -> bool:
    """Let glibc keep freed memory instead of returning it to the kernel; False where malloc is another one.

    By default every freed block of more than 32 MB (at first, 128 kB) is unmapped, and each new one costs a page
    fault per 4 kB: measured, half or more of the time of a chain of operations on 8 to 32 MB tensors. Afterwards the
    process keeps up to 2 GB of freed memory in each of at most `ARENAS` heaps, until `trim_allocator`; blocks from
    1 GB on are still unmapped. Holds for the whole process, its threads included, so an application decides on it (a
    party does at its start). Heaps that are there already stay.
    """
    glibc = _glibc()
    if glibc is None:
        return False
    settings = ((_MMAP_THRESHOLD, _MAPPED_FROM), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, _GROWTH), (_ARENA_MAX, ARENAS))
    done = [glibc.mallopt(name, value) for name, value in settings]
    return all(done)


def trim_allocator() -> bool:
    """Return freed memory to the system; False where malloc is another one than glibc's.

    For the end of a session. All heaps but the first keep the end of their last piece: 64 MB each at most.
    """
    glibc = _glibc()
    if glibc is None:
        return False
    glibc.malloc_trim(0)
    return True


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
