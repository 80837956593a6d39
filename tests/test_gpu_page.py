"""docs/studies/gpu-figures.md shows its rows, a run's rows replace older ones, and what a GPU did is added up."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import gpu_timing
import make_gpu
import pytest
import torch
from gpu_compared import compared

RUN = [
    {"name": "machine", "gpu": "a card", "torch": "2", "triton": "3", "cores": 4, "commit": "12345678"},
    {"name": "start", "model": make_gpu.LAYER, "seconds": 3.0},
    {"name": "token", "model": make_gpu.LAYER, "seconds_median": 0.005},
    {"name": "token-parts", "model": make_gpu.LAYER, "parts_ms": {"launching": 1.0, "Python": 4.0}},
]


def test_the_page_is_that_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_gpu.is_current()
    monkeypatch.setattr(make_gpu, "ROWS", tmp_path / "rows.jsonl")
    make_gpu.keep(make_gpu.ROWS, make_gpu.read_rows(make_gpu.BEFORE))
    before = len(make_gpu.read_rows(make_gpu.ROWS))
    for _ in range(2):  # the second time they replace themselves
        make_gpu.keep(make_gpu.ROWS, make_gpu.take(RUN))
    assert len(make_gpu.read_rows(make_gpu.ROWS)) == before + 2
    assert make_gpu.value(make_gpu.read_rows(make_gpu.ROWS)[-2:], "token", {"model": make_gpu.LAYER}, "seconds_median")
    shown = make_gpu.parts_of(make_gpu.read_rows(make_gpu.ROWS))
    assert shown is not None
    assert shown["parts"] == {"launching": 1.0, "Python": 4.0}


def test_rows_are_compared_where_both_have_a_number() -> None:
    now = [
        {**RUN[2], "seconds_median": 0.01, "at_s": 1.0},
        {"name": "token", "model": "another", "seconds_median": 1.0},
    ]
    assert compared(RUN, now)[2:] == [f"| token {make_gpu.LAYER} | seconds_median | 0.005 | 0.01 | 2.00 |"]
    assert compared([], now) == ["no equal rows"]


def test_what_a_gpu_does_at_once_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parties: a kernel under a copy, and two calls of CUDA."""

    def event(name: str, start: int, end: int, gpu: bool) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        kind = torch.autograd.DeviceType.CUDA if gpu else torch.autograd.DeviceType.CPU
        return SimpleNamespace(name=name, time_range=span, device_type=kind)

    events = [
        event("few_rows_kernel", 0, 3000, True), event("Memcpy HtoD (Pageable -> Device)", 1000, 4000, True),
        event("Memset (Device)", 5000, 6000, True), event("cudaGraphLaunch", 0, 500, False),
        event("cudaMemcpyAsync", 500, 700, False),
    ]  # fmt: skip

    class Profiled:
        def __init__(self, **_: object) -> None: ...
        def __enter__(self) -> SimpleNamespace:
            return SimpleNamespace(events=lambda: events)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(gpu_timing, "profile", Profiled)
    found = gpu_timing.gpu_work(lambda: None, parties=2, calls=1)
    assert found["busy_ms"] == 5.0
    assert found["gpu_ms"] == {"kernels": 3.0, "copies HtoD (Pageable -> Device)": 3.0, "memsets": 1.0}
    assert found["launches_per_party"] == found["graphs_per_party"] == 0.5
    assert found["host_ms_per_party"] == {"launching": 0.25, "copying": 0.1, "waiting": 0.0}
    json.dumps(found)


def test_samples_say_what_a_party_waits_for() -> None:
    ended = threading.Event()
    threading.Thread(target=ended.wait, name="party 1", daemon=True).start()
    with gpu_timing.Samples() as samples:
        while not samples.lines:
            time.sleep(0.001)
    ended.set()
    assert samples.shares(0.5)["parts_ms"]["waiting for messages"] == 500.0
