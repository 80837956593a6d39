"""Figures on stdout (tables for people, JSON for programs), progress on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

CONSOLE = Console(width=None if sys.stdout.isatty() else 120)
NOTES = Console(stderr=True)


def emit_json(value: object) -> None:
    """One JSON object on one line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def emit_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> None:
    """A table; everything but the first column is right-aligned."""
    table = Table(title=title, caption=caption or None)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    CONSOLE.print(table)


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def duration(seconds: float) -> str:
    """Seconds for people."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


@contextmanager
def progress_bar(total: int | None = None, quiet: bool = False) -> Iterator[Any]:
    """A bar on stderr; the yielded function takes a description and advances by one.

    Unless `quiet`, it also says when kernels are compiled meanwhile, which takes longer than all else.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=NOTES, transient=True, disable=quiet or not NOTES.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def step(description: str = "", advance: int = 1) -> None:
            bar.update(task, description=description or None, advance=advance)

        with contextlib.nullcontext() if quiet else compile_notes(lambda line: step(line, 0)):
            yield step


@contextmanager
def compile_notes(show: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Whoever waits for kernels is told why: once, in a line on stderr, and of each kernel through `show`."""
    from private_llm.kernels.compiling import telling, why_compiling  # Numba takes a second to import

    said: list[str] = []

    def tell(name: str) -> None:
        said.append(name)
        if len(said) == 1:
            NOTES.print(why_compiling(), markup=False, highlight=False, soft_wrap=True)
        show(f"compiling {name}")

    with telling(tell):
        yield
