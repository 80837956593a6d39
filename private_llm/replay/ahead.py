"""Kernels of a protocol, compiled ahead and side by side by processes of their own, while weights are read and shared.

They write to the folder of `compiling`, where this process finds them. Of what it needs earlier it compiles itself what
nobody compiles yet, and waits for the rest. Steps of programs come after the kernels: until all are there
(`are_compiling`), a session computes without programs (`replay`). Only what the protocol uses is compiled ahead, and
once it is kept, no process starts. The processes end with this one, or when they are done.

That is for words of 64 bits: on the ring of 32, which networks of convolutions use, few kernels run.
"""

import contextlib
import hashlib
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from llvmlite import binding
from numba import config, types

from private_llm.config import PrivateConfig
from private_llm.importing import python_like_this
from private_llm.kernels import compiling
from private_llm.kernels.parallel import usable_cores
from private_llm.protocols.registry import DEALER, QUAD, TRIO

_CHILD = "from private_llm.replay.ahead import main; main()"
_MOST = 4  # processes at most: more would import for longer than they compile
_PARTIES = {table.party.name: table.party for table in (TRIO, QUAD, DEALER)}  # the protocols that use these kernels


def compile_ahead(config: PrivateConfig, party: bool = False) -> None:
    """Start to compile what parties of this process or machine use on its processors, unless it is kept; returns at
    once, and does nothing a second time. party: this process is one; else parties may run on other hosts.
    """
    here = party or (config.party_mode in ("auto", "threads", "processes") and not config.hosts)
    if here and config.device == "cpu" and config.device_map is None and config.ring == 64:
        _start(config.protocol)


@cache
def _start(protocol: str) -> None:
    cores = min(_MOST, usable_cores())
    if protocol not in _PARTIES or cores < 2 or compiling.FOLDER is None or _mark(protocol).exists():
        return
    command, environment = python_like_this(_CHILD, protocol, str(cores))
    with contextlib.suppress(OSError):  # then this process compiles alone
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # ends with this process, which ends them
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )
        threading.Thread(target=_wait, args=(child,), name="kernels ahead", daemon=True).start()


def _wait(child: subprocess.Popen[bytes]) -> None:
    _compiling.append(child)
    child.wait()
    _compiling.remove(child)


_compiling: list[subprocess.Popen[bytes]] = []
if hasattr(os, "register_at_fork"):  # a forked child has no such thread
    os.register_at_fork(after_in_child=_compiling.clear)


def are_compiling() -> bool:
    """Whether processes that this one started still compile."""
    return bool(_compiling)


def _mark(protocol: str) -> Path:
    """The file that says that all is kept, for this processor."""
    processor = f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
    names = f"{processor} {config.CPU_NAME} {config.CPU_FEATURES}"
    digest = hashlib.sha256(names.encode()).hexdigest()[:16]
    return Path(compiling.FOLDER or "") / f"{protocol}-{digest}.ahead"


# -- in the processes -------------------------------------------------------------------------------------------------
def main() -> None:
    """Import, fork so many processes as the last argument says, and note when all is kept."""
    protocol, processes = sys.argv[1], int(sys.argv[2])
    todo = list(jobs(protocol))
    numbers, write = os.pipe()
    os.write(write, bytes(range(len(todo))))  # a process takes the next one whenever it is done with another
    os.close(write)
    children = [os.fork() or _work(todo, numbers) for _ in range(processes)]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if not any(statuses):
        _mark(protocol).touch(mode=0o600)
    os._exit(0)  # at once: an orderly end of the interpreter takes a second


def _work(todo: list[tuple[Any, tuple[Any, ...]]], numbers: int) -> NoReturn:
    """What a process does, which exits with 1 if a kernel was not compiled."""
    failed = 1
    try:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        while number := os.read(numbers, 1):
            kernel, types_of = todo[number[0]]
            _ = kernel.compile(types_of) if types_of else kernel.address
        failed = 0
    finally:
        os._exit(failed)


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)


# -- what is compiled -------------------------------------------------------------------------------------------------
def jobs(protocol: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Kernels with types of arguments, and steps (`CompiledStep`) with none, in a session's order, longest first."""
    from private_llm.kernels import comparison_keys, steps
    from private_llm.kernels.bits import cpu as bits
    from private_llm.kernels.fields.cpu import KERNELS as FIELDS
    from private_llm.kernels.matmul import amx, seeded_cpu
    from private_llm.kernels.matmul import cpu as matmul
    from private_llm.kernels.prg import aes
    from private_llm.kernels.waves import cpu as waves
    from private_llm.replay import runner

    party = _PARTIES[protocol]
    checks = [kernel for name, kernel in FIELDS.items() if name.startswith("check")]
    seldom = [waves.hidden, waves.summed, FIELDS["wraps"], FIELDS["widened"]]
    often = [
        matmul.row_product, *(each for each in FIELDS.values() if each not in (*checks, *seldom)), matmul.dot_product,
        bits.transpose_bits, bits.block_carries, bits.block_monomials, bits.join_products, bits.join_carries,
        bits.inject_products, bits.inject_terms, waves.placed, waves.weighed,
    ]  # fmt: skip
    needed = [aes.write_bytes, aes.expand] * aes.usable() + [amx.product] * amx.usable() + checks * party.compares
    needed += [comparison_keys.expand] * (aes.usable() and not party.one_hot)
    last = [seeded_cpu.in_register_tiles] * aes.usable()  # where weights rest as seeds; elsewhere it cannot be compiled
    for kernel in (*needed, *often, *seldom):
        yield kernel, _types(kernel)
    if party.can_repeat:
        yield runner.run, _types(runner.run)
        yield steps.combine, ()
    for kernel in last:
        yield kernel, _types(kernel)
    if party.can_repeat:
        for kernel in (*often, *seldom, *last):
            yield steps.step_of(kernel)[0], ()
        yield steps.sum_last, ()
        yield steps.gather, ()


def _types(kernel: Any) -> tuple[Any, ...]:  # noqa: ANN401 - Numba ships no types
    """Of a kernel's arguments, as they are annotated (`kernels.address`)."""
    known = {
        "bool": types.boolean, "Zero": types.uint64, "Plan": types.int64[::1], "IndexTable": types.int64[:, ::1],
        "Flags": types.uint8[::1], "Words1": types.uint64[::1], "Words2": types.uint64[:, ::1],
    }  # fmt: skip
    taken = inspect.signature(kernel.py_func).parameters.values()
    return tuple(known.get(str(each.annotation), types.int64) for each in taken)
