"""Numba kernels that are compiled once per machine: the machine code stays in the user's cache folder.

Numba's own cache of a function looks at the file of that function alone, so it would run old code after a change of a
helper in another file; and where it finds no folder to write to, it refuses to start. Here the folder is named by
a digest of the sources of all kernels, and without a folder each process compiles for itself. Nor does Numba expect two
processes that compile one function at once: the code of one could be kept as the other's. Here each function has a
lock, so the second process waits and reads what the first has made. Kernels call each other in no circle, so no two
processes wait for each other.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import cfunc, njit, types
from numba.core import event
from numba.core.compiler_lock import global_compiler_lock

from private_llm.importing import without_collections
from private_llm.kernels.compile_note import NOTE

with suppress(ImportError):  # not on Windows
    import fcntl

ELSEWHERE = ("net/connection.py", "net/frames.py", "replay/runner.py")
"""Sources of the library outside this folder that kernels are made of."""


def _digest() -> str:
    """Of everything that decides what a kernel's machine code is, but for the processor, which Numba looks at."""
    made, here = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode()), Path(__file__).parent
    for source in (*sorted(here.rglob("*.py")), *(here.parent / name for name in ELSEWHERE)):
        made.update(source.name.encode() + b"\0" + hashlib.sha256(source.read_bytes()).digest())
    return made.hexdigest()[:16]


def _folder() -> tuple[Path | None, tuple[str, ...]]:
    """Where machine code is kept, and (); or None, and why not, as `_warn` takes it."""
    folder: Path | str = "~/.cache"
    try:
        name = f"kernels-{_digest()}"
    except OSError as error:  # in an archive
        return None, (f"{error.filename} cannot be read ({error.strerror})", "Install the package with its sources")
    try:
        base = numba.config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "private-llm" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        found = folder.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        return None, (f"{folder} cannot be written ({getattr(error, 'strerror', None) or error})",)
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022):
        return None, (f"others can write to {folder}",)
    return folder, ()


FOLDER, _NOT_KEPT = _folder()  # the folder, found once


class KernelsNotKept(UserWarning):
    """Machine code cannot be kept, so every process waits for the compiler again."""


def _warn(
    why: str, advice: str = "Set XDG_CACHE_HOME (or NUMBA_CACHE_DIR) to a folder that you alone can write"
) -> None:
    if not _warned:
        _warned.append(why)
        warnings.warn(
            f"compiled kernels are not kept: {why}. So every process compiles them again, which takes 5 to 40 s. "
            f"{advice}", KernelsNotKept, stacklevel=3,
        )  # fmt: skip


_warned: list[str] = []


def compiled(function: Callable[..., Any], inlined: bool = False) -> Any:  # noqa: ANN401 - Numba ships no types
    """`function` as a kernel that releases Python's lock, compiled when it first meets arguments of some types.
    inlined: whether kernels that call it take its code in. Only kernels call what begins with an underscore: it gets no
    code for a call from Python, which is a tenth of what there is to compile.
    """
    with _cached() as cache:
        made = njit(
            nogil=True, cache=cache, no_cfunc_wrapper=True, no_cpython_wrapper=function.__name__.startswith("_"),
            forceinline=inlined,
        )(function)  # fmt: skip
    compile_now = made.compile

    def compile_once(signature: Any) -> Any:  # noqa: ANN401 - Numba's own
        with alone(function), without_collections():  # a tenth of the time
            return compile_now(signature)

    made.compile = compile_once
    if cache:
        keep = made._cache.save_overload

        def save(signature: Any, data: Any) -> None:  # noqa: ANN401 - Numba's own
            try:
                keep(signature, data)
            except OSError as error:  # a disk that is full, or a folder that is gone, ends nothing
                _warn(f"{FOLDER} cannot be written ({error.strerror})")

        made._cache.save_overload = save
    return made


class CompiledStep:
    """A function of the address of 64-bit words as machine code (`steps.py`)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @cached_property
    def address(self) -> int:
        """Where the machine code begins; compiled, or read from the cache, when somebody asks first."""
        signature = types.void(types.CPointer(types.int64))
        with alone(self._function), _cached() as cache, _noted(self._function.__name__), without_collections():
            try:
                made = cfunc(signature, cache=cache)(self._function)
            except OSError as error:  # as above
                _warn(f"{FOLDER} cannot be written ({error.strerror})")
                made = cfunc(signature)(self._function)
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


@contextmanager
def alone(function: Callable[..., Any]) -> Iterator[None]:
    """Inside, no other process compiles this function (where the folder's files can be locked), nor does a thread."""
    name = f"{function.__module__}.{function.__qualname__}"
    with global_compiler_lock:  # before the file: a thread that holds it could wait for that file
        descriptor = None if name in _held else _locked(name)
        try:
            _held.append(name)
            yield
        finally:
            _held.pop()
            if descriptor is not None:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # closed alone, it would stay locked for a forked child
                os.close(descriptor)


_held: list[str] = []  # functions that this process compiles: one, and those that call it


def _locked(name: str) -> int | None:
    """The descriptor of a locked file, after other processes; None where that cannot be."""
    if FOLDER is None or "fcntl" not in globals():
        return None
    descriptor = None
    try:
        descriptor = os.open(FOLDER / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with _noted(name.rpartition(".")[2]):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BaseException as error:
        if descriptor is not None:
            os.close(descriptor)
        if not isinstance(error, OSError):
            raise
        return None  # a file system without locks, or a full one
    return descriptor


@contextmanager
def _noted(name: str) -> Iterator[None]:
    NOTE.begins(name, why_compiling)
    try:
        yield
    finally:
        NOTE.ends()


class _CompileListener(event.Listener):  # type: ignore[misc]
    """Tells of compilations of this package's kernels."""

    def on_start(self, event: Any) -> None:  # noqa: ANN401 - Numba's own
        function = event.data["dispatcher"].py_func
        if function.__module__.startswith("private_llm."):
            NOTE.begins(function.__name__, why_compiling)
            if NOTE.others and (tell := NOTE.others[-1]) is not None:
                tell(function.__name__)
            if FOLDER is None:
                _warn(*_NOT_KEPT)

    def on_end(self, event: Any) -> None:  # noqa: ANN401 - Numba's own
        if event.data["dispatcher"].py_func.__module__.startswith("private_llm."):
            NOTE.ends()


event.register("numba:compile", _CompileListener())


def why_compiling() -> str:
    """What to say to somebody who waits for kernels."""
    kept = "in every process" if FOLDER is None else f"each kernel once; they are kept in {FOLDER.parent}"
    return f"compiling kernels for this processor, 5 to 9 s on a current one, up to 40 s on a slow one ({kept})"
