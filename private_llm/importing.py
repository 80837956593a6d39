"""Imports that cost little: names of a package that are imported when somebody asks for them, and imports without
collections of garbage (a tenth of transformers' time). And processes that import from where this one does.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def without_collections() -> Iterator[None]:
    """Inside, nothing is collected; afterwards as before."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def python_like_this(code: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command of a new process that runs `code` with `arguments`, and its environment.

    It imports from the folders that this process imports from, and from no other: the working folder, which Python adds
    for `-c`, may hold somebody else's modules.
    """
    folders = (folder or os.getcwd() for folder in sys.path)
    return [sys.executable, "-P", "-c", code, *arguments], {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def lazy_names(
    package: str, names: Mapping[str, str]
) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package whose names are imported when somebody first asks for one.

    names: what each module gives, which is written below `if TYPE_CHECKING`, too. Modules of the package are found the
    same way, as if it had imported them.
    """
    where = {name: module for module, given in names.items() for name in given.split()}
    held = vars(sys.modules[package])

    def get(name: str) -> object:
        """The name, or AttributeError."""
        if name in where:
            with without_collections():
                held[name] = getattr(import_module(where[name]), name)
            return held[name]
        whole = f"{package}.{name}"
        try:
            return import_module(whole)
        except ModuleNotFoundError as error:
            if error.name != whole:
                raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None

    return list(where), get, lambda: sorted({*held, *where})
