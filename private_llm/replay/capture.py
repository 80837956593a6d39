"""CUDA graphs: what a thread starts on a GPU, captured once and started by one call from then on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from private_llm.errors import UnsupportedOp

_FAILED = threading.Event()
"""A capture failed in this process: PyTorch's allocator may believe that it still goes on, so there is no other one."""


class Pool:
    """The memory that graphs of several programs share."""

    def __init__(self) -> None:
        self._handle: Any = None

    def handle(self) -> Any:  # noqa: ANN401 - PyTorch's
        """As a capture takes it."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


def captured(pool: Pool, launches: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of what `launches` starts on the current stream, which is not the default one; nothing is computed.

    The caller holds `ALONE`. Raises what `launches` raises, and UnsupportedOp once a capture failed in this process.
    """
    if _FAILED.is_set():
        raise UnsupportedOp("no graphs: a capture failed in this process")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool.handle(), capture_error_mode="thread_local")
    try:
        launches()
    except Exception:
        _FAILED.set()
        with suppress(RuntimeError):  # which would hide why
            graph.capture_end()
        raise
    graph.capture_end()
    return graph
