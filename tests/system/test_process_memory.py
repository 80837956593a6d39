"""What a soak reads: the slope of a line, a process's memory, and the bytes that tensors hold."""

from __future__ import annotations

import os

import pytest
import torch
from process_memory import growth, live_bytes, process_mb


def test_growth_is_the_slope_behind_the_first_quarter() -> None:
    assert growth([100.0, 300.0, *(400.0 + 2.5 * step for step in range(6))]) == pytest.approx(2.5)
    assert growth([0.0, 100.0, 700.0, 700.0, 700.0, 700.0, 700.0, 700.0]) == 0.0
    assert growth([1.0]) == 0.0


def test_growth_shows_through_noise() -> None:
    noise = [7.0, -7.0] * 50
    assert growth([600 + n for n in noise]) == pytest.approx(0.0, abs=0.02)
    assert growth([600 + 0.5 * step + n for step, n in enumerate(noise)]) == pytest.approx(0.5, abs=0.02)


def test_views_count_once_and_as_the_whole() -> None:
    before = live_bytes()
    whole = torch.zeros(1000, dtype=torch.int64)
    first, second = whole[:10], whole[10:]
    assert live_bytes() - before == 8000
    del whole, second
    assert live_bytes() - before == 8000
    del first
    assert live_bytes() == before


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="only Linux has /proc")
def test_peak_and_present_memory() -> None:
    assert 10 < process_mb() <= process_mb(os.getpid(), "VmHWM")
