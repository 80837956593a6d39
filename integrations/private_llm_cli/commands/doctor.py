"""`private-llm doctor`: what this machine can do, measured in about two seconds, and what to expect trouble from."""

import os
import platform
import socket
import statistics
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding

from private_llm.config import VERSION
from private_llm.kernels import matmul, ops
from private_llm.kernels.parallel import usable_cores
from private_llm.ring.prg import Seed
from private_llm.ring.ring import RING64
from private_llm_cli.commands.output import progress_bar

_PACKAGES = ("torch", "transformers", "accelerate", "numba", "triton", "cryptography", "safetensors", "numpy")
_FLAGS = ("aes", "vaes", "avx2", "avx512f", "avx512_vnni", "amx_int8", "amx_bf16", "neon", "asimd")


def examine() -> dict[str, Any]:
    """Versions, processor and speeds of this machine as a JSON-able mapping, with warnings."""
    report: dict[str, Any] = {"private_llm": VERSION, "python": platform.python_version()}
    report.update({name: _version(name) for name in _PACKAGES})
    report["cpu"] = cpu_model()
    flags = (cpu_field("flags") or cpu_field("Features")).split()
    report["cpu_flags"] = [flag for flag in _FLAGS if flag in flags]
    report["cores"] = usable_cores()
    report["ring_matmul_kernel"] = matmul.kernel_name()
    report["memory_gib"] = round(memory_gib(), 1)
    report["torch_threads"] = torch.get_num_threads()
    report["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    speeds: tuple[tuple[str, Callable[[], float]], ...] = (
        ("prg_gb_per_s", prg_speed),
        ("ring_matmul_gmac_per_s", matmul_speed),
        ("float32_matmul_gmac_per_s", float_speed),
        ("loopback_latency_us", loopback_latency),
    )
    with progress_bar(len(speeds)) as step:
        for name, measured in speeds:
            report[name] = round(measured(), 2)
            step(name)
    report["warnings"] = _warnings(report)
    return report


def machine() -> str:
    """Processor, its generation and the units that products run on, usable cores, memory, system, in one line.
    Processors of one name may differ by a factor of seven.
    """
    flags = cpu_field("flags").split()
    family, amx = cpu_field("cpu family"), "with" if "amx_int8" in flags else "without"
    width = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX2"
    generation = f" (family {family}, {width}) {amx} AMX" if family else ""  # else ARM, or Linux does not tell
    return f"{cpu_model()}{generation}, {usable_cores()} cores, {memory_gib():.0f} GiB, {platform.system()}"


def cpu_model() -> str:
    """The processor's own name, or, as ARM's have none, the compiler's."""
    return cpu_field("model name") or str(binding.get_host_cpu_name())


def cpu_field(name: str) -> str:
    """A field of Linux's description of the first core, or an empty string."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return ""
    for line in info.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def memory_gib() -> float:
    """Physical memory."""
    if not hasattr(os, "sysconf"):
        return 0.0
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def prg_speed() -> float:
    """GB of random ring elements per second on one core."""
    stream = Seed.fresh().stream("doctor")
    count = 1 << 21
    return count * 8 / _best(lambda: stream.elements(count, RING64)) / 1e9


def matmul_speed() -> float:
    """Billion 64-bit multiply-adds per second of the ring matrix product, 128 x 768 x 768."""
    m, k, n = 128, 768, 768
    stream = Seed.fresh().stream("doctor")
    x, y = stream.elements(m * k, RING64).view(m, k), stream.elements(k * n, RING64).view(k, n)
    return m * k * n / _best(lambda: ops.ring_matmul(x, y)) / 1e9


def float_speed() -> float:
    """Billion float32 multiply-adds per second of torch's matrix product, 128 x 768 x 768."""
    m, k, n = 128, 768, 768
    x, y = torch.ones(m, k), torch.ones(k, n)
    return m * k * n / _best(lambda: torch.matmul(x, y)) / 1e9


def loopback_latency() -> float:
    """Microseconds for eight bytes over a TCP connection of this machine, one way (half a round trip, median)."""
    rounds, payload = 300, bytes(8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        echo = threading.Thread(target=_echo, args=(server, rounds), daemon=True)
        echo.start()
        times = []
        with socket.create_connection(server.getsockname()) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(rounds):
                started = time.perf_counter()
                link.sendall(payload)
                link.recv(8, socket.MSG_WAITALL)
                times.append(time.perf_counter() - started)
        echo.join(5)
    return statistics.median(times) / 2 * 1e6


def _echo(server: socket.socket, rounds: int) -> None:
    link, _ = server.accept()
    with link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(rounds):
            link.sendall(link.recv(8, socket.MSG_WAITALL))


def _best(work: Callable[[], object], repeat: int = 5) -> float:
    work()
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _warnings(report: dict[str, Any]) -> list[str]:
    """What a user should know before measuring or deploying here."""
    found = []
    if report["cores"] < 2:
        found.append("one core: the parties run one after the other, so times are about three times the possible ones")
    if report["cpu_flags"] and "aes" not in report["cpu_flags"]:  # without any, the system does not tell
        found.append("no AES instructions: random streams and comparison keys will be many times slower")
    if report["memory_gib"] < 4:
        found.append("less than 4 GiB of memory: three parties hold each weight in 16 bytes each, 48 bytes in sum")
    if report["transformers"] is None:
        found.append("transformers is not installed: models cannot be loaded (pip install transformers)")
    if report["prg_gb_per_s"] < 0.5:
        found.append(
            f"random streams run at {report['prg_gb_per_s']} GB/s; several GB/s are usual with AES instructions"
        )
    if report["gpus"] and report["triton"] is None:
        found.append("a GPU without triton: its kernels cannot run (pip install triton)")
    return found
