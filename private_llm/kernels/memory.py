"""The process's memory allocator, set for tensors of many megabytes that come and go at every operation."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from pathlib import Path

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Parameter names of mallopt(3)."""
_MAPPED_FROM = 1 << 30
_KEPT = (1 << 31) - 1
_GROWTH = 256 << 20
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
    process keeps up to 2 GB of freed memory per arena; blocks from 1 GB on are still unmapped. Holds for the
    whole process, the arenas of its threads included, so an application decides on it (a party does at its start).
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_MMAP_THRESHOLD, _MAPPED_FROM), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, _GROWTH))
    done = [mallopt(name, value) for name, value in settings]
    return all(done)
