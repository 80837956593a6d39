"""Arrays over addresses inside Numba kernels (`parallel` takes a tensor's), and the process's memory allocator."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from private_llm.kernels.compiling import compiled

Array = np.ndarray[Any, Any]
Zero = np.unsignedinteger[Any]  # names the type of an operand's elements
Read = int
Written = int
Keys = int
Plan = Array
IndexTable = Array
Flags = Array
Words1 = Array
Words2 = Array
"""What a kernel's arguments are, read off its annotations (`steps`, `ahead`): addresses of what is read, of what is
written (and may be read), of a module's round keys; int64 [n] and [n, 4], uint8 [n], and uint64 of 1 or 2 dimensions.
"""


@intrinsic
def flat(typing_context, address, count, zero):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Array [count] of the type of `zero` over the memory at `address`."""
    array = types.Array(zero, 1, "C")
    signature = array(address, count, zero)

    def codegen(context: Any, builder: Any, _: Any, arguments: Any) -> Any:  # noqa: ANN401
        place, length, _ = arguments
        made = make_array(array)(context, builder)
        size = context.get_constant(types.intp, zero.bitwidth // 8)
        pointer = builder.inttoptr(place, made.data.type)
        populate_array(made, pointer, [length], [size], size, meminfo=None)
        return made._getvalue()

    return signature, codegen


WORD, SIGNED = np.uint64(0), np.int64(0)  # the `zero` of words, and of signed ones
ZERO: dict[torch.dtype, Zero] = {torch.int64: WORD, torch.int32: np.uint32(0)}
"""That of ring elements, which kernels see as unsigned."""


@compiled
def table(address: int, rows: int, words: int) -> Array:
    """Array [rows, words] of 64-bit words."""
    made: Array = flat(address, rows * words, WORD).reshape(rows, words)
    return made


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # parameter names of mallopt(3)
_MAPPED_FROM = 1 << 30
_KEPT = (1 << 31) - 1
_GROWTH = 256 << 20
ARENAS = 4  # heaps of the process: each thread would get one, up to eight per core, and keep what it freed there
_CONTAINER = Path("/sys/fs/cgroup/memory.max")  # where Linux says how much memory a container may use


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
    process keeps up to 2 GB of freed memory in each of at most `ARENAS` heaps, until `trim_allocator` at the end of a
    session; blocks from 1 GB on are still unmapped. Holds for the whole process, its threads included, so an
    application decides on it (a party does at its start). Heaps that are there already stay.
    """
    glibc = _glibc()
    if glibc is None:
        return False
    settings = ((_MMAP_THRESHOLD, _MAPPED_FROM), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, _GROWTH), (_ARENA_MAX, ARENAS))
    done = [glibc.mallopt(name, value) for name, value in settings]
    return all(done)


def trim_allocator() -> bool:
    """Return freed memory to the system at the end of a session; False where malloc is another one than glibc's."""
    glibc = _glibc()
    if glibc is None:
        return False
    glibc.malloc_trim(0)
    return True


@cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
