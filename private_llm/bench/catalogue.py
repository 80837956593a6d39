"""Every benchmark by name: how to make it, its usual shape, and a tiny one for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from private_llm.bench import functions
from private_llm.bench.work import Shape, Work
from private_llm.errors import ConfigError


@dataclass(frozen=True)
class Entry:
    """make: from a shape to a work. usual, tiny: shapes. dims: what the numbers of a shape mean; `count` (--n)
    replaces the first of them."""

    make: Callable[[Shape], Work]
    usual: Shape
    tiny: Shape
    dims: str


_MILLION = 1_000_000
ENTRIES: dict[str, Entry] = {
    "relu": Entry(functions.relu, (_MILLION,), (1000,), "elements"),
    "mul": Entry(functions.mul, (_MILLION,), (1000,), "elements"),
    "matmul": Entry(functions.matmul, (128, 768, 3072), (8, 16, 12), "M x K x N"),
}
NAMES = tuple(ENTRIES)


def make(name: str, shape: Shape | None = None, count: int | None = None, tiny: bool = False) -> Work:
    """The work `name` at `shape` (default: its usual one). Raises ConfigError for unknown names and wrong shapes."""
    entry = ENTRIES.get(name)
    if entry is None:
        raise ConfigError(f"unknown benchmark {name!r}; known: {', '.join(NAMES)}")
    default = entry.tiny if tiny else entry.usual
    chosen = shape or default
    if count is not None:
        if count < 1:
            raise ConfigError(f"n: got {count}; want at least 1")
        chosen = (count, *chosen[1:])
    if len(chosen) != len(default) and len(default) > 1:
        raise ConfigError(f"benchmark {name!r}: got {len(chosen)} sizes; want {len(default)}: {entry.dims}")
    return entry.make(chosen)
