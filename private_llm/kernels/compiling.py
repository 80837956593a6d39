"""Numba kernels that are compiled once per machine: the machine code stays in the user's cache folder.

Numba's own cache of a function looks at the file of that function alone, so it would run old code after a change of a
helper in another file; and where it finds no folder to write to, it refuses to start. Here the folder is named by
a digest of the sources of all kernels, and without a folder each process compiles for itself.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import cfunc, njit, types
from numba.core import event

_WRITABLE_BY_OTHERS = 0o022


def _digest() -> str:
    """Of everything that decides what a kernel's machine code is, but for the processor, which Numba looks at."""
    made = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        made.update(source.name.encode() + b"\0" + hashlib.sha256(source.read_bytes()).digest())
    return made.hexdigest()[:16]


def _folder() -> Path | None:
    """Where machine code is kept, or None: no folder can be written, or others could put their code there."""
    try:
        base = numba.config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "private-llm" / f"kernels-{_digest()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        found = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: this user has no home
        return None
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & _WRITABLE_BY_OTHERS):
        return None
    return folder


FOLDER = _folder()
"""The folder, found once."""


def compiled(function: Callable[..., Any]) -> Any:  # noqa: ANN401 - Numba ships no types
    """`function` as a kernel that releases Python's lock, compiled when it first meets arguments of some types."""
    with _cached() as cache:
        return njit(nogil=True, cache=cache)(function)


class CompiledStep:
    """A function of the address of 64-bit words as machine code (`backends/cpu/steps.py`)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @cached_property
    def address(self) -> int:
        """Where the machine code begins; compiled, or read from the cache, when somebody asks first."""
        with _cached() as cache:
            made = cfunc(types.void(types.CPointer(types.int64)), cache=cache)(self._function)
        self._code = made  # which must live as long as the address is used
        return int(made.address)


@contextmanager
def _cached() -> Iterator[bool]:
    """Whether machine code is kept; if so, inside it is in our folder."""
    if FOLDER is None:
        yield False
        return
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(FOLDER)  # read when the function is decorated, and by nobody else meanwhile
    try:
        yield True
    finally:
        numba.config.CACHE_DIR = before


class _Listener(event.Listener):  # type: ignore[misc]
    """Passes on the names of this package's kernels when their compilation starts."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def on_start(self, event: Any) -> None:  # noqa: ANN401 - Numba's own
        """A compilation starts."""
        function = event.data["dispatcher"].py_func
        if function.__module__.startswith("private_llm."):
            self._tell(function.__name__)

    def on_end(self, event: Any) -> None:  # noqa: ANN401 - Numba's own
        """It is over."""


@contextmanager
def telling(tell: Callable[[str], None]) -> Iterator[None]:
    """Within, `tell` gets the name of every kernel of this process that has to be compiled, just before it is."""
    with event.install_listener("numba:compile", _Listener(tell)):
        yield


def why_compiling() -> str:
    """What to say to somebody who waits for kernels."""
    if FOLDER is None:
        kept = "in every process: no folder of yours can be written; name one with XDG_CACHE_HOME"
    else:
        kept = f"each kernel once; they are kept in {FOLDER.parent}"
    return f"compiling kernels for this processor, up to 20 s ({kept})"
