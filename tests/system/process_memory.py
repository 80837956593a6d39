"""How much memory a process has, and how much of it tensors hold: a leak shows in both, a fragmented heap in one."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

_WARM = 4
"""One part in so many of a series is left out at its start: caches of a process fill once."""


def live_bytes() -> int:
    """Bytes of all tensors of this process on the CPU; views count as the memory that they keep alive, once."""
    held: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # objects of other libraries may warn when they are looked at
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


def process_mb(process: int | str = "self", entry: str = "VmRSS") -> float:
    """An entry of a process's status in MB: resident memory, or its peak so far ("VmHWM"). Linux only."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith(entry))
    return int(line.split()[1]) / 1000


def growth(series: Sequence[float]) -> float:
    """By how much the later part of a series rises per step, by the line that fits best; 0 for less than two steps.

    The first quarter is left out.
    """
    late = series[len(series) // _WARM :]
    middle = (len(late) - 1) / 2
    spread = sum((step - middle) ** 2 for step in range(len(late)))
    rise = sum((step - middle) * value for step, value in enumerate(late))
    return rise / spread if spread else 0.0
