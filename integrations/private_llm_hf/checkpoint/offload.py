"""Weights on disk that are read when they are needed: from a share file, or from what the client sent.

What a client sends goes into one nameless file in a folder that the user names: no other process can open it, and its
space is free again when the party ends, however it ends. It holds what the party received, never a mask: masks are
made anew from their seeds. Reading needs no lock, so parallel sessions may share a file.
"""

import hashlib
import json
import math
import os
import stat
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """The tensor from byte `start` on, copied (mapped pages count as memory). Raises ShareFileError past the end."""
    out = torch.empty(math.prod(shape), dtype=dtype)
    room = _bytes(out)
    while room:
        count = os.preadv(descriptor, [room], start)
        if not count:
            raise ShareFileError("a file of weights became shorter while it was in use; copy it again")
        room, start = room[count:], start + count
    return out.view(shape)


def _bytes(tensor: Tensor) -> memoryview:
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
        return read_tensor(self._file.fileno(), *self._places[name]) if name in self._places else None


# -- a safetensors file of one's own that is open for as long as it is used: what was checked is what is read ---------
# Everything goes through one descriptor, so another file under the same name changes nothing. The file itself may be
# changed by whoever may write to it. Its size and times are compared at every read, and each tensor's digest when it is
# read first, because a process that has mapped the file changes it without changing its times, and whenever the time of
# the file's own record is new (a new name, new rights, or a time that was set back). Nothing is mapped here: a shorter
# file is an error, and no SIGBUS.
_CHUNK = 1 << 22
_LONGEST_HEADER = 100_000_000  # bytes of a header, as safetensors itself takes


class OpenedFile:
    """metadata: the header's texts. entries: of each tensor dtype's name, shape, first byte and bytes."""

    def __init__(self, path: Path) -> None:
        """Raises OSError for what cannot be read, and what JSON of another form raises (ValueError, KeyError, ..)."""
        self._name = path.name
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
        # not when the interpreter ends: threads of parties may still read, and the number may be another file's then
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("not a regular file")
        self._state, self._recorded = (found.st_size, found.st_mtime_ns), found.st_ctime_ns
        size = int.from_bytes(self._bytes(0, 8), "little")
        if size > min(_LONGEST_HEADER, found.st_size - 8):
            raise ValueError("the header does not fit into the file")
        header = json.loads(self._bytes(8, size))
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in self.metadata.values()):
            raise ValueError("metadata of other types than text")
        self.entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: _offsets(item[1])):
            start, stop = _offsets(entry)
            if start != end or stop < start:
                raise ValueError("tensors that overlap or leave gaps")
            self.entries[name] = (entry["dtype"], tuple(entry["shape"]), 8 + size + start, stop - start)
            end = stop
        if 8 + size + end != found.st_size:
            raise ValueError("another size than its header says")
        self._digests: dict[str, bytes] = {}
        self._unread: set[str] = set()

    def digests(self) -> dict[str, bytes]:
        """Of every tensor's bytes, once for all. Raises OSError for a file that ends too early."""
        for name, (_, _, start, size) in self.entries.items():
            made = hashlib.blake2b(digest_size=32)
            for at in range(start, start + size, _CHUNK):
                made.update(self._bytes(at, min(_CHUNK, start + size - at)))
            self._digests[name] = made.digest()
        self._unread = set(self._digests)
        return self._digests

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor, in memory of its own. Raises ShareFileError if the file has changed since it was opened."""
        _, shape, start, _ = self.entries[name]
        out = read_tensor(self._descriptor, start, shape, dtype)
        self.check()
        if name in self._unread:
            if hashlib.blake2b(_bytes(out), digest_size=32).digest() != self._digests[name]:
                raise self._changed()
            self._unread.discard(name)
        return out

    def check(self) -> None:
        """Raises ShareFileError if the file has changed since it was opened."""
        found = os.fstat(self._descriptor)
        if (found.st_size, found.st_mtime_ns) != self._state:
            raise self._changed()
        if found.st_ctime_ns != self._recorded:
            self._recorded, self._unread = found.st_ctime_ns, set(self._digests)

    def _changed(self) -> ShareFileError:
        return ShareFileError(
            f"{self._name} was changed while it was in use, so its shares are another model's or damaged; copy the "
            "file of this sharing again, and start this party again"
        )

    def _bytes(self, start: int, size: int) -> bytes:
        found = b""
        while len(found) < size:
            piece = os.pread(self._descriptor, size - len(found), start + len(found))
            if not piece:
                raise OSError("the file ends before its data does")
            found += piece
        return found

    def __repr__(self) -> str:
        return f"OpenedFile({self._name!r})"


def _offsets(entry: dict[str, Any]) -> tuple[int, int]:
    start, stop = entry["data_offsets"]
    return start, stop
