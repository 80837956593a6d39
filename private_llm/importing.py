"""Imports without collections of garbage, of which Python makes many while transformers is imported.

They are a tenth of what it takes to import this package, which every party and every command does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
