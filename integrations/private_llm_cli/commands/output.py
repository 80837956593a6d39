"""Figures on stdout (tables for people, JSON for programs), progress on stderr."""

import contextlib
import json
import logging
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from private_llm.errors import PrivateLLMError
from private_llm.net.ledger import size as size

_LOG = logging.getLogger("private_llm")
CONSOLE = Console(width=None if sys.stdout.isatty() else 120)
NOTES = Console(stderr=True)
QUIET_SECONDS = 10.0
"""The least time between two lines of progress where there is no terminal to draw a bar on."""


def say_first(text: str, quiet: bool = False) -> None:
    """The first line of a command that takes long, before it imports what takes seconds."""
    if not quiet:
        NOTES.print(f"{text} ...", markup=False, highlight=False, soft_wrap=True)


def emit_json(value: object) -> None:
    """One JSON object on one line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def show_text(text: str) -> None:
    """A piece of text on stdout, as it is; a terminal gets no control characters of it but ends of lines and tabs. A
    model may write anything, and its user's terminal obeys escape sequences.
    """
    if CONSOLE.is_terminal:
        text = "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf") else "\ufffd" for c in text)
    CONSOLE.file.write(text)
    CONSOLE.file.flush()


def emit_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> None:
    """A table; everything but the first column is right-aligned. No text in it is read as markup."""
    table = Table(title=escape(title), caption=escape(caption) if caption else None)
    for index, heading in enumerate(headings):
        table.add_column(escape(heading), justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    CONSOLE.print(table)


def duration(seconds: float) -> str:
    """Seconds for people."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


@contextmanager
def progress_bar(total: int | None = None, quiet: bool = False) -> Iterator[Any]:
    """A bar on stderr; the yielded function takes a description and advances by one. Where stderr is no terminal, a
    line every ten seconds instead, so that long work is not silent in a log. On a terminal it also says when kernels
    are compiled meanwhile, which takes longer than all else, and for which party it waits.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    in_a_log = not quiet and not NOTES.is_terminal
    with Progress(*columns, console=NOTES, transient=True, disable=quiet or in_a_log) as bar:
        task, said, ended = bar.add_task("", total=total), time.monotonic(), threading.Event()

        def step(description: str = "", advance: int = 1) -> None:
            bar.update(task, description=description or None, advance=advance)
            if in_a_log:
                tell()

        def tell(since: str = "") -> None:
            nonlocal said
            if time.monotonic() - said >= QUIET_SECONDS:
                said, state = time.monotonic(), bar.tasks[task]
                done = f": {state.completed:.0f} of {total}" if total is not None and state.completed else ""
                NOTES.print(
                    f"{state.description or 'working'}{done}{since}", highlight=False, markup=False, soft_wrap=True
                )

        def remind() -> None:
            while not ended.wait(QUIET_SECONDS or None):
                tell(f" ({bar.tasks[task].elapsed or 0.0:.0f} s)")

        with contextlib.ExitStack() as shown:
            if in_a_log:
                threading.Thread(target=remind, name="reminder", daemon=True).start()
                shown.callback(ended.set)
            for told in () if quiet else (compile_shown, waiting_told):
                shown.enter_context(told(lambda line: step(line, 0)))
            yield step


@contextmanager
def waiting_told(show: Callable[[str], None]) -> Iterator[None]:
    """Hand the library's words on whom it waits for to `show` alone; others go where they would go without it."""
    usual, level = _LOG.getEffectiveLevel(), _LOG.level

    def told(record: logging.LogRecord) -> bool:
        waits = getattr(record, "event", None) == "waiting"
        if waits:
            show(record.getMessage())
        return record.levelno >= usual and not waits

    _LOG.filters.insert(0, told)  # an outer one keeps from others what nobody has asked for
    _LOG.setLevel(min(usual, logging.INFO))
    try:
        yield
    finally:
        _LOG.removeFilter(told)
        _LOG.setLevel(level)


@contextmanager
def compile_shown(show: Callable[[str], None]) -> Iterator[None]:
    """What is on the terminal already shows which kernels are compiled; whoever waits long for them is told why."""
    from private_llm.kernels.compile_note import PATIENCE_S, shown_by
    from private_llm.kernels.compiling import why_compiling  # Numba takes a second to import

    begun: list[float] = []

    def tell(name: str) -> None:
        begun.append(time.monotonic())
        if len(begun) > 1 and begun[-2] < begun[0] + PATIENCE_S <= begun[-1]:
            NOTES.print(why_compiling(), markup=False, highlight=False, soft_wrap=True)
        show(f"compiling {name}")

    with shown_by(tell) if NOTES.is_terminal else contextlib.nullcontext():
        yield


# -- A line about what predictors save or cost, before a run begins ---------------------------------------------------
TURN = (64, 32)
"""Tokens of the prompt and of the answer that a chat is priced for."""


def note_sparsity(model: Any, sequence: int, new_tokens: int, batch: int = 1) -> None:  # noqa: ANN401 - a private model
    """Say on stderr what this run will send with predictors and without, and what helps if they do not pay. Nothing for
    a model without predictors, and for what cannot be estimated: the run itself says why.
    """
    if model.parties.config.sparsity is None:
        return
    from private_llm_hf.sparsity.price import sparsity_price

    try:
        price = sparsity_price(model, sequence, new_tokens, batch)
    except PrivateLLMError:
        return
    what = f"{new_tokens} tokens after {sequence}" if new_tokens else "this run"
    most = "at most " if price.most else ""
    text = f"sparsity: {what} will send {most}{size(price.sparse_bytes)}; without it {size(price.dense_bytes)}"
    if not price.pays:
        text += (
            ". It saves nothing here: leave --sparsity out, or train predictors of blocks (`private-llm predictors "
            "train --block 16`) and open less (--neuron-budget), in kept orders if you accept what these tell"
        )
    NOTES.print(text, style="" if price.pays else "yellow", markup=False, highlight=False, soft_wrap=True)


def note_corrections(model: Any, tokens: int) -> None:  # noqa: ANN401 - a private model
    """Warn on stderr where a model's stored corrections do not reach for so many more tokens."""
    left = getattr(model.parties, "tokens_left", None)
    if left is not None and left < tokens:
        folder = model.parties.config.corrections
        text = f"corrections: {left} tokens are left; `private-llm prepare MODEL --corrections {folder}` makes more"
        NOTES.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
