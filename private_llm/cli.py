"""The command line. Each command parses its options here and runs in `private_llm/commands/`.

This is the bottom of the ladder: commands may use the HuggingFace integration, which they import when they run.
Errors of the library are one message on stderr and exit code 2, without a traceback.
"""

from __future__ import annotations

import sys
from enum import Enum
from typing import Annotated, Any

import typer

from private_llm.config import VERSION, PrivateConfig
from private_llm.errors import PrivateLLMError

app = typer.Typer(
    name="private-llm",
    help="Run HuggingFace models on secret-shared data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class ProtocolName(str, Enum):
    """Protocols on offer."""

    TRIO = "trio"
    PLAIN = "plain"


class PartyMode(str, Enum):
    """Where the parties run."""

    AUTO = "auto"
    THREADS = "threads"
    PROCESSES = "processes"


Json = Annotated[bool, typer.Option("--json", help="Print figures as JSON, one object per line.")]
ProtocolOption = Annotated[ProtocolName, typer.Option("--protocol", help="'plain' hides nothing (for comparison).")]
RingOption = Annotated[int, typer.Option("--ring", help="Bits of the ring: 64 or 32.")]
PartyOption = Annotated[PartyMode, typer.Option("--party-mode", help="Parties as threads or as processes.")]


def _config(protocol: ProtocolName, ring: int, party_mode: PartyMode = PartyMode.AUTO, **more: Any) -> PrivateConfig:  # noqa: ANN401
    values: dict[str, Any] = {"protocol": protocol.value, "ring": ring, "party_mode": party_mode.value, **more}
    if ring == 32:
        values.setdefault("frac_bits", 12)
    return PrivateConfig.from_dict({**values, "insecure": protocol is ProtocolName.PLAIN})


@app.command()
def bench(
    names: Annotated[list[str] | None, typer.Argument(help="Which works (default: all).")] = None,
    as_json: Json = False,
    protocol: ProtocolOption = ProtocolName.TRIO,
    ring: RingOption = 64,
    n: Annotated[int | None, typer.Option("--n", help="First size of the shape (elements, tokens).")] = None,
    repeat: Annotated[int, typer.Option(help="Timed repetitions after one warm-up.")] = 5,
    shape: Annotated[str | None, typer.Option(help="Sizes joined by 'x', for instance 128x768x3072.")] = None,
    party_mode: PartyOption = PartyMode.THREADS,
    bandwidth: Annotated[float | None, typer.Option(help="Emulated Mbit/s of each direction of a link.")] = None,
    latency: Annotated[float | None, typer.Option(help="Emulated one-way latency in ms.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Smallest shapes: does everything run?")] = False,
) -> None:
    """Measure operations and layers: time, bytes, rounds and error against float64."""
    from private_llm.commands.bench import bench as run

    config = _config(protocol, ring, party_mode)
    run(names or (), config, as_json, repeat, shape, n, bandwidth, latency, tiny)


@app.command()
def doctor(
    as_json: Json = False,
    threats: Annotated[bool, typer.Option("--threats", help="Print the threat model instead (Markdown).")] = False,
) -> None:
    """What this machine can do: versions, processor, speeds, warnings."""
    from private_llm.commands.doctor import doctor as run

    run(as_json, threats)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of `private-llm`."""
    try:
        app()
    except PrivateLLMError as error:
        typer.echo(f"private-llm: {error}", err=True)
        sys.exit(2)
