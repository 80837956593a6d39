"""The allocator's settings, in a process of their own: they cannot be taken back."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from private_llm.kernels.address import ARENAS

CODE = """
import resource, torch
from private_llm.kernels.address import tune_allocator
assert tune_allocator() is {glibc}
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    x = torch.ones(12 << 20, dtype=torch.int64)
    del x
before = faults()
for _ in range(10):
    x = torch.ones(12 << 20, dtype=torch.int64)
    del x
print(faults() - before)
"""


THREADS = """
import os, threading, torch
from pathlib import Path
from private_llm.kernels.address import trim_allocator, tune_allocator
assert tune_allocator() is {glibc}
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def work(there):
    made = [torch.ones(1 << 20, dtype=torch.int64) for _ in range(4)]
    there.wait()
before = resident()
there = threading.Barrier(16)
threads = [threading.Thread(target=work, args=(there,)) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
kept = resident() - before
assert trim_allocator() is {glibc}
print(kept, resident() - before)
"""


def printed(code: str) -> list[int]:
    """The numbers that a process of its own prints, with the allocator's own defaults; skipped without glibc."""
    glibc = platform.libc_ver()[0] == "glibc"
    made = subprocess.run(
        [sys.executable, "-c", code.format(glibc=glibc)],
        env={name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    if not glibc:
        pytest.skip("another malloc than glibc's")
    return [int(number) for number in made.stdout.split()]


@pytest.mark.full
def test_freed_tensors_are_used_again() -> None:
    """Once the heap has settled, ten tensors of 96 MB cost less than one mapped anew: 24,576 faults of 4 kB."""
    assert printed(CODE)[0] < 24_576


@pytest.mark.full
def test_threads_that_ended_give_their_memory_back() -> None:
    """Sixteen threads with 32 MB each: what they freed stays for the next ones, until it is given back.

    All but the main heap keep the end of their last piece, which has 64 MB.
    """
    kept, trimmed = printed(THREADS)
    assert kept > 400 << 20
    assert trimmed < (ARENAS - 1) * (64 << 20)
