"""What is typed about certificates: a set for trying out, and keys that each organisation makes at home.

Each function parses the options of the command of its name, and imports what runs it (`commands/`) when it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from private_llm.errors import ConfigError
from private_llm_cli.help_pages import Command, Group
from private_llm_cli.options import Json, PlanOption, ProtocolOption, SplitOption, config_of, plan_of

certs = typer.Typer(
    cls=Group,
    name="certs", help="Certificates for mutual TLS: a set for trying out, or keys made at home.",
    invoke_without_command=True, no_args_is_help=True,
)  # fmt: skip

DaysOption = Annotated[float, typer.Option(help="How long it is valid.")]


@certs.callback()
def trial(
    context: typer.Context,
    out: Annotated[str, typer.Option("--out", help="Folder for ca.pem and one certificate per endpoint.")] = "",
    parties: Annotated[int | None, typer.Option(help="How many parties (default: those of --protocol).")] = None,
    days: Annotated[float, typer.Option(help="How long they are valid.")] = 365.0,
    protocol: ProtocolOption = "trio",
    plan: PlanOption = "",
    split: SplitOption = None,
    user: Annotated[
        list[str] | None, typer.Option("--user", help="Name of a user with a certificate of its own; repeat.")
    ] = None,
) -> None:
    """Certificates for mutual TLS. Without a command: a whole set at once, for trying out on machines of your own."""
    from private_llm_cli.commands.certs import trial as run

    if context.invoked_subcommand is not None:
        if out:
            raise ConfigError(
                f"--out: it stands before {context.invoked_subcommand!r}, which has its own; want it behind"
            )
        return
    if not out:
        raise ConfigError("--out: got none; want a folder for the set, or one of ca, request, sign, show")
    config = config_of(protocol, 64, **plan_of(plan, split=split))
    run(Path(out), config, parties, days, user or ())


@certs.command(cls=Command)
def ca(
    out: Annotated[str, typer.Option("--out", help="Folder for ca.key (never leaves it) and ca.pem (for everybody).")],
    days: DaysOption = 1825.0,
) -> None:
    """As the keeper of the CA: make it, once."""
    from private_llm_cli.commands.certs import ca as run

    run(Path(out), days)


@certs.command(cls=Command)
def request(
    name: Annotated[str, typer.Option("--name", help="party0, party1, ..., client, or client:NAME.")],
    out: Annotated[str, typer.Option("--out", help="Folder for the key (never leaves it) and the request (.csr).")],
) -> None:
    """As a party or user: make a key at home, and a request that the CA signs."""
    from private_llm_cli.commands.certs import request as run

    run(Path(out), name)


@certs.command(cls=Command)
def sign(
    file: Annotated[Path, typer.Argument(help="A request (.csr).")],
    ca: Annotated[Path, typer.Option("--ca", help="Folder of the CA.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the certificate (default: the file's).")] = None,
    days: DaysOption = 90.0,
    name: Annotated[str, typer.Option("--name", help="Refuse a request for another name.")] = "",
) -> None:
    """As the keeper of the CA: sign a request whose fingerprint its sender has read to you."""
    from private_llm_cli.commands.certs import sign as run

    run(file, ca, out, days, name)


@certs.command(cls=Command)
def show(
    files: Annotated[list[Path], typer.Argument(help="Certificates or requests.")],
    as_json: Json = False,
) -> None:
    """What stands in certificates and requests: name, days left, fingerprint."""
    from private_llm_cli.commands.certs import show as run

    run(files, as_json)
