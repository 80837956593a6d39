"""What a call takes on a GPU and at the parties' threads: PyTorch's profiler, and samples of where threads stand.

The profiler says what the GPU did and how long calls of CUDA took; it sees no Python. Samples see Python alone: each
party's thread, every millisecond, by the line and the functions in which it stands. They need Python's lock, so they
come a little too often where a thread has just let go of it.
"""

import linecache
import re
import statistics
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from gpu_compared import PARTS
from torch.profiler import ProfilerActivity, profile

GPU = torch.cuda.is_available()
_PAUSE_S = 1e-3
_CALLS = {  # of CUDA on the CPU, by name
    "launching": re.compile(r"LaunchKernel|GraphLaunch|LaunchCooperative"),
    "copying": re.compile(r"Memcpy|Memset"),
    "waiting": re.compile(r"Synchronize|EventQuery|StreamQuery|WaitEvent"),
}
_MASKS = re.compile(r"^_*(draw|fill|masks|stretch|keystream|chacha|counter)")
_COPIES = re.compile(r"\.cpu\(|\.copy_\(|\.to\(|pin_memory|from_numpy")
_GPU_WAITS = re.compile(r"synchronize\(|\.query\(")
_LAUNCHES = re.compile(r"\.replay\(|\]\(|\.run\(")
_WAITING_FILES = ("/threading.py", "/queue.py", "/selectors.py", "/socket.py", "/private_llm/net/")


def synchronize() -> None:
    """Wait until the GPU has done what it was given."""
    if GPU:
        torch.cuda.synchronize()


def gpu_work(call: Callable[[], object], parties: int, calls: int = 1) -> dict[str, Any]:
    """What one of `calls` equal calls does, by the profiler; milliseconds and counts.

    busy_ms: in which the GPU does anything; gpu: its kernels and copies by kind, summed. host, per party: calls of CUDA
    in the parties' threads. slowest: kernels by name.
    """
    with profile(activities=[ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU]) as profiled:
        call()
        synchronize()
    took: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    names: defaultdict[str, list[float]] = defaultdict(list)
    spans: list[tuple[float, float]] = []
    for event in profiled.events() or ():
        taken = event.time_range.elapsed_us() / 1e3 / calls
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            kind = "gpu " + _kind(event.name)
            if kind == "gpu kernels":
                names[event.name].append(taken)
        else:
            kind = "host " + next((kind for kind, name in _CALLS.items() if name.search(event.name)), "other")
            taken /= parties
        took[kind] += taken
        counts[kind] += 1
        if "GraphLaunch" in event.name:
            counts["graphs"] += 1
    slowest = sorted(names.items(), key=lambda each: -sum(each[1]))[:12]
    return {
        "busy_ms": round(_union(spans) / 1e3 / calls, 3),
        "gpu_ms": {kind[4:]: round(took[kind], 3) for kind in took if kind.startswith("gpu ")},
        "gpu_counts": {kind[4:]: round(counts[kind] / calls, 1) for kind in counts if kind.startswith("gpu ")},
        "launches_per_party": round(counts["gpu kernels"] / calls / parties, 1),
        "graphs_per_party": round(counts["graphs"] / calls / parties, 1),
        "host_ms_per_party": {kind: round(took[f"host {kind}"], 3) for kind in _CALLS},
        "host_calls_per_party": {kind: round(counts[f"host {kind}"] / calls / parties, 1) for kind in _CALLS},
        "slowest": [[name[:80], round(len(each) / calls, 1), round(sum(each), 3)] for name, each in slowest],
    }


def _kind(name: str) -> str:
    """Of a GPU's event: "kernels", or the copy with the memories between which it is."""
    return (
        name.replace("Memcpy", "copies")
        if name.startswith("Memcpy")
        else "memsets"
        if name.startswith("Memset")
        else "kernels"
    )


def _union(spans: list[tuple[float, float]]) -> float:
    """Length of all spans together, where they overlap once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def stacks() -> dict[str, list[str]]:
    """Where each thread stands: its last lines."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): [line.strip() for line in traceback.format_stack(frame)[-4:]]
        for ident, frame in sys._current_frames().items()
    }


class Samples(threading.Thread):
    """While the context lasts: in which part of a call each party's thread stands, every millisecond."""

    def __init__(self) -> None:
        super().__init__(name="samples", daemon=True)
        self._ended = threading.Event()
        self._found: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.lines: Counter[str] = Counter()
        self._switch = sys.getswitchinterval()

    def __enter__(self) -> "Samples":
        sys.setswitchinterval(_PAUSE_S / 2)  # a thread that computes in Python lets this one look
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()
        sys.setswitchinterval(self._switch)

    def run(self) -> None:
        """Look at all threads until the context ends."""
        while not self._ended.wait(_PAUSE_S):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                name = names.get(ident, "")
                if name.startswith("party"):
                    self._found[name][_part(frame)] += 1
                    self.lines[_place(frame)] += 1

    def shares(self, wall_s: float) -> dict[str, Any]:
        """Milliseconds of a call of `wall_s` by part: the parties' mean, and of each; and the lines met most."""
        if not self._found:
            return {"parts_ms": None}
        by_party = {
            name: {part: round(1e3 * wall_s * found[part] / found.total(), 3) for part in PARTS}
            for name, found in sorted(self._found.items())
        }
        total = self.lines.total()
        return {
            "parts_ms": {part: round(statistics.mean(each[part] for each in by_party.values()), 3) for part in PARTS},
            "parts_ms_by_party": by_party,
            "samples": total,
            "lines": [[place, round(count / total, 3)] for place, count in self.lines.most_common(16)],
        }


def _place(frame: FrameType) -> str:
    """The innermost three functions."""
    found: list[str] = []
    at: FrameType | None = frame
    while at is not None and len(found) < 3:
        found.append(f"{at.f_code.co_filename.rsplit('/', 1)[-1]}:{at.f_code.co_name}:{at.f_lineno}")
        at = at.f_back
    return " < ".join(found)


def _part(frame: FrameType) -> str:
    """Masks before all else, then what the innermost line does, then what its callers wait for."""
    code = [frame.f_code]
    at = frame.f_back
    while at is not None and len(code) < 12:
        code.append(at.f_code)
        at = at.f_back
    if any(_MASKS.match(each.co_name) or each.co_filename.endswith("/ring/prg.py") for each in code):
        return "masks"
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if _COPIES.search(line):
        return "copying"
    if _GPU_WAITS.search(line):
        return "waiting for the GPU"
    if any(each.co_filename.endswith(_WAITING_FILES[:-1]) or _WAITING_FILES[-1] in each.co_filename for each in code):
        return "waiting for messages"
    if _LAUNCHES.search(line) or "/triton/" in frame.f_code.co_filename:
        return "launching"
    return "Python"


# -- small things -------------------------------------------------------------------------------------------------
def microseconds(call: Callable[[], object], times: int = 200) -> float:
    """Median of a call, the GPU not waited for unless the call does."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    synchronize()
    return round(1e6 * statistics.median(found), 1)


def copy_rates(device: str, tiny: bool) -> dict[str, float]:
    """GB/s of copies of 256 MB, and within the device bytes read and written."""
    size = 1 << (12 if tiny else 28)
    here, there = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8, device=device)
    pinned, other = torch.zeros(size, dtype=torch.uint8, pin_memory=GPU), torch.empty_like(there)

    def rate(to: torch.Tensor, frm: torch.Tensor, count: float) -> float:
        to.copy_(frm)
        synchronize()
        began = time.perf_counter()
        for _ in range(4):
            to.copy_(frm)
        synchronize()
        return round(4 * count / (time.perf_counter() - began) / 1e9, 1)

    return {
        "pageable_to_device": rate(there, here, size), "pinned_to_device": rate(there, pinned, size),
        "device_to_pageable": rate(here, there, size), "device_to_pinned": rate(pinned, there, size),
        "within_device": rate(other, there, 2 * size),
    }  # fmt: skip


def small_calls() -> dict[str, float]:
    """Microseconds of calls that a token makes many times; nothing without a GPU."""
    if not GPU:
        return {}
    x = torch.zeros(512, dtype=torch.int64, device="cuda")  # 4 kB
    here, pinned = torch.zeros(512, dtype=torch.int64), torch.zeros(512, dtype=torch.int64, pin_memory=True)
    graph, event = torch.cuda.CUDAGraph(), torch.cuda.Event()
    x.add_(1)
    with torch.cuda.graph(graph):
        x.add_(1)

    def spun() -> None:
        pinned.copy_(x, non_blocking=True)
        event.record()
        while not event.query():
            pass

    return {
        "add": microseconds(lambda: x.add_(1)), "graph_of_one_kernel": microseconds(graph.replay),
        "cpu_of_4kB": microseconds(x.cpu), "to_pinned_and_spin": microseconds(spun),
        "pageable_to_device": microseconds(lambda: x.copy_(here)),
    }  # fmt: skip
