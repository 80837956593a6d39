"""Figures on stdout (tables for people, JSON for programs), progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from private_llm.net.ledger import size as size

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


def duration(seconds: float) -> str:
    """Seconds for people."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


@contextmanager
def progress_bar(total: int | None = None, quiet: bool = False) -> Iterator[Any]:
    """A bar on stderr; the yielded function takes a description and advances by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=NOTES, transient=True, disable=quiet or not NOTES.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def step(description: str = "", advance: int = 1) -> None:
            bar.update(task, description=description or None, advance=advance)

        yield step
