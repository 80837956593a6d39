"""A safetensors file of one's own that is open for as long as it is used: what was checked is what is read.

Everything goes through one descriptor, so another file under the same name changes nothing. The file itself may be
changed by whoever may write to it. Its size and times are compared at every read, and each tensor's digest when it is
read first, because a process that has mapped the file changes it without changing its times, and whenever the time of
the file's own record is new (a new name, new rights, or a time that was set back). Nothing is mapped here: a file that
becomes shorter is an error, and no SIGBUS.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from private_llm.errors import ShareFileError
from private_llm_hf.checkpoint.offload import read_tensor

_CHUNK = 1 << 22
_LONGEST_HEADER = 100_000_000
"""Bytes of a header, as safetensors itself takes."""


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
            raise ValueError("metadata that are no texts")
        self.entries: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        end = 0
        for name, entry in sorted(header.items(), key=lambda item: _offsets(item[1])):
            start, stop = _offsets(entry)
            if start != end or stop < start:
                raise ValueError("tensors that are not one after the other")
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
            raw = out.view(-1).numpy().data.cast("B") if out.numel() else b""
            if hashlib.blake2b(raw, digest_size=32).digest() != self._digests[name]:
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
        """Bytes of the file. Raises OSError if it ends before."""
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
