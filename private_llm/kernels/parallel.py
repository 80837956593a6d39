"""Calls of kernels: on addresses of tensors, and on several cores, pieces of one operation on worker threads.

To turn a tensor into a NumPy array takes 1 to 4 µs, against 5 µs for the truncation of 768 elements; so kernels take
addresses. `addresses` is the only place where a tensor becomes one, and it refuses what a flat array would misread.

The kernels release Python's lock, so threads of one process compute side by side. How many an operation may use is the
calling thread's `torch.get_num_threads()`: parties that are threads of one process already keep their cores busy and
set it to their part of the machine; a party with a process of its own leaves it at all cores. Pieces write to
separate memory and are cut the same way for the same number of threads, so results are the same for any number.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels.trace_hook import this_thread

LEAST_S = 200e-6  # least work for a thread: handing a piece over and waiting for it costs 30 to 150 microseconds
TEAM_LEAST_S = 50e-6  # the same where a program is written down, whose pieces a team takes (`teams`)
_SMALL_S = 2 * TEAM_LEAST_S  # work that nobody shares


@cache
def _workers() -> ThreadPoolExecutor:
    """One pool for all parties and sessions of this process; callers compute too, so cores - 1 would do for one."""
    return ThreadPoolExecutor(usable_cores(), "kernel")


if hasattr(os, "register_at_fork"):  # a forked child has no such threads
    os.register_at_fork(after_in_child=_workers.cache_clear)


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_party(parties: int, sessions: int = 1) -> int:
    """Threads for each party of one machine: its cores shared among those that compute at once (two of Trio's)."""
    return max(1, usable_cores() // (min(2, parties) * sessions))


def threads_per_node(alpha: int) -> int:
    """Threads for each node of one machine: its cores shared among alpha CompNodes; AttnNodes work while they wait."""
    return max(1, usable_cores() // alpha)


def nodes_at_once(nodes: int) -> int | None:
    """How many nodes that are threads compute at a time: as many as there are cores; None: all may."""
    return usable_cores() if nodes > usable_cores() else None


def threads(seconds: float) -> int:
    """Threads for an operation that takes one thread about `seconds`."""
    least = LEAST_S if this_thread.hook is None else TEAM_LEAST_S
    return max(1, min(torch.get_num_threads(), int(seconds / least)))


def split_range(total: int, pieces: int, step: int = 1) -> list[tuple[int, int]]:
    """At most `pieces` ranges (first, last), nearly equally long, that cover 0 .. total, cut at multiples of `step`."""
    blocks = -(-total // step)
    pieces = max(1, min(pieces, blocks))
    edges = [min(total, blocks * i // pieces * step) for i in range(pieces + 1)]
    return list(pairwise(edges))


def addresses(*tensors: Tensor) -> list[int]:
    """Addresses of tensors, which the caller keeps meanwhile; sizes are not looked at. Raises UnsupportedOp off the
    CPU, DomainError if not contiguous.
    """
    hook = this_thread.hook
    if hook is not None:
        hook.addressed(tensors)
    found = []
    for t in tensors:
        if not t.is_cpu:
            raise UnsupportedOp(f"an operand is on {t.device}, another on the CPU; want all on one device")
        if not t.is_contiguous():
            shape = tuple(t.shape)
            raise DomainError(f"a kernel's operand of shape {shape} is not contiguous; call .contiguous() first")
        found.append(t.data_ptr())
    return found


def launch(kernel: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401 - addresses, sizes and plans
    """Call a kernel whose tensors are addresses."""
    hook = this_thread.hook
    if hook is not None:
        hook.launched(kernel, arguments)
    kernel(*arguments)


def parallel_for(count: int, unit_s: float, step: int, kernel: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
    """Launch a kernel for 0 .. count on as many threads as are worth it; its last two arguments say which part.

    unit_s: about what one takes a thread. step: parts are cut at multiples of it. arguments: addresses, sizes, plans.
    """
    seconds = count * unit_s
    pieces = 1 if seconds < _SMALL_S else threads(seconds)
    if pieces == 1:  # as `launch`, a call less of thousands
        if this_thread.hook is not None:
            this_thread.hook.launched(kernel, (*arguments, 0, count))
        kernel(*arguments, 0, count)
    else:
        run_parallel(partial(launch, kernel, *arguments), split_range(count, pieces, step))


class _SharedWork:
    """Pieces of an operation on other threads, which write to memory that its caller frees: none may outlast it."""

    def __init__(self, work: Callable[[int, int], None]) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._running = self._done = 0
        self._over = False
        self._failed: BaseException | None = None

    def compute(self, first: int, last: int) -> None:
        """One of them, unless the operation is over."""
        with self._changed:
            if self._over:
                return
            self._running += 1
        try:
            self._work(first, last)
        except BaseException as error:  # noqa: BLE001 - raised by `settle`
            self._failed = self._failed or error
        finally:
            with self._changed:
                self._running -= 1
                self._done += 1
                self._changed.notify_all()

    def settle(self, wanted: int) -> None:
        """Wait for so many pieces and all that run. Raises interrupts, and if some are wanted what a piece raised."""
        failed: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._changed.wait_for(lambda: self._done >= wanted)
                    self._over = True
                    self._changed.wait_for(lambda: not self._running)
                break
            except BaseException as error:  # noqa: BLE001 - raised below, once nobody writes
                failed = failed or error
        failed = failed or (self._failed if wanted else None)
        if failed is not None:
            raise failed


def run_parallel(work: Callable[[int, int], None], ranges: Sequence[tuple[int, int]]) -> None:
    """work(first, last) for all ranges side by side, the first one here; raises what a piece raised, and interrupts,
    once no piece is computed any more.

    All of them here, one after the other, if somebody watches this thread.
    """
    if len(ranges) == 1:
        work(*ranges[0])
        return
    if this_thread.hook is not None:
        this_thread.hook.parallel_region(work, ranges)
        return
    pieces, whole = _SharedWork(work), False
    try:
        for first, last in ranges[1:]:
            _workers().submit(pieces.compute, first, last)
        work(*ranges[0])
        whole = True
    finally:
        pieces.settle(len(ranges) - 1 if whole else 0)
