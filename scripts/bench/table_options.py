"""Options that the scripts of papers' tables share."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from private_llm_cli.commands.plot import check_name

from private_llm.errors import ConfigError, PrivateLLMError


def _check_repeat(repeat: int) -> int:
    if repeat < 1:
        raise ConfigError(f"repeat: got {repeat}; want at least 1")
    return repeat


def _check_plot(plot: Path | None) -> Path | None:
    if plot is not None:
        check_name(plot)
    return plot


Repeat = Annotated[int, typer.Option(help="Timed repetitions, once nothing is recorded.", callback=_check_repeat)]
Tiny = Annotated[bool, typer.Option("--tiny", help="Smallest shapes: does everything run?")]
Bandwidth = Annotated[float | None, typer.Option(help="Emulated Mbit/s of each direction of a link.")]
Latency = Annotated[float | None, typer.Option(help="Emulated one-way latency in ms.")]
Plot = Annotated[Path | None, typer.Option(help="A picture of the table (.png, .svg).", callback=_check_plot)]


def new_app() -> typer.Typer:
    """A command line with one command."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def run_app(app: typer.Typer) -> None:
    """Run it; an error of the library is one message and exit code 2."""
    try:
        app()
    except PrivateLLMError as error:
        print(f"{sys.argv[0]}: {error}", file=sys.stderr)
        sys.exit(2)
