"""Imports that cost little: names of a package that are imported when somebody asks for them, and imports without
collections of garbage (a tenth of transformers' time). And processes that import from where this one does.
"""

import ast
import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator
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


def lazy_names(package: str) -> tuple[list[str], Callable[[str], object], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package whose names are imported when somebody first asks for one.

    They are those that the package imports below `if TYPE_CHECKING`. Its modules are found the same way, as if it had
    imported them.
    """
    blocks = (node.body for node in ast.parse(inspect.getsource(sys.modules[package])).body if isinstance(node, ast.If))
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    where = {alias.name: str(node.module) for node in imports for alias in node.names}
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
