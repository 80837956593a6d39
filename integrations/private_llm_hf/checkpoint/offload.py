"""Weights on disk that are read when they are needed: from a share file, or from what the client sent.

What a client sends goes into one nameless file in a folder that the user names: no other process can open it, and its
space is free again when the party ends, however it ends. It holds what the party received, never a mask: masks are
made anew from their seeds. Reading needs no lock, so parallel sessions may share a file.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from private_llm.errors import ConfigError, ShareFileError
from private_llm.tensor.fixed import Fixed


@dataclass(frozen=True)
class Offloaded:
    """A weight that is read when it is needed, with the same result every time."""

    shape: tuple[int, ...]
    read: Callable[[], Fixed | Tensor]


def read_tensor(descriptor: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor from byte `start` of an open file on, in memory of its own (mapped pages would count as memory, too).

    Raises ShareFileError if the file ends too early.
    """
    out = torch.empty(math.prod(shape), dtype=dtype)
    room = _bytes(out)
    while room:
        count = os.preadv(descriptor, [room], start)
        if not count:
            raise ShareFileError("a file of weights became shorter while it was in use; copy it again")
        room, start = room[count:], start + count
    return out.view(shape)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor; empty ones have none."""
    return tensor.view(-1).numpy().data.cast("B") if tensor.numel() else memoryview(b"")


class OffloadFile:
    """Tensors by name, written once and read often."""

    def __init__(self, folder: str) -> None:
        """Raises ConfigError if the folder is not there or not writable."""
        try:
            self._file = tempfile.TemporaryFile(dir=Path(folder), buffering=0)  # noqa: SIM115 - as long as this object
        except OSError as error:
            raise ConfigError(
                f"offload_folder {folder!r}: {error.strerror}; name a folder that can be written"
            ) from None
        self._places: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self._end = 0

    def write(self, name: str, tensor: Tensor) -> None:
        """Append one tensor. Raises ConfigError if the disk is full."""
        raw = _bytes(tensor.contiguous())
        self._places[name] = (self._end, tuple(tensor.shape), tensor.dtype)
        self._end += raw.nbytes
        try:
            while raw:
                raw = raw[self._file.write(raw) :]
        except OSError as error:
            raise ConfigError(f"offload_folder: {error.strerror}; name a folder with more room") from None

    def read(self, name: str) -> Tensor | None:
        """A tensor, or None if there is none of that name."""
        if name not in self._places:
            return None
        return read_tensor(self._file.fileno(), *self._places[name])
