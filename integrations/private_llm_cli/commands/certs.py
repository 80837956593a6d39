"""`private-llm certs`: a set for trying out, and the steps by which each organisation makes its key at home."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from private_llm.errors import ConfigError
from private_llm_cli import options
from private_llm_cli.help_pages import Command, Group

if TYPE_CHECKING:
    from private_llm.net.authority import CertificateFacts

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
    protocol: options.ProtocolOption = "trio",
    plan: options.PlanOption = "",
    split: options.SplitOption = None,
    user: Annotated[
        list[str] | None, typer.Option("--user", help="Name of a user with a certificate of its own; repeat.")
    ] = None,
) -> None:
    """Certificates for mutual TLS. Without a command: a whole set at once, for trying out on machines of your own."""
    if context.invoked_subcommand is not None:
        if out:
            raise ConfigError(
                f"--out: it stands before {context.invoked_subcommand!r}, which has its own; want it after"
            )
        return
    if not out:
        raise ConfigError("--out: got none; want a folder for the set, or one of ca, request, sign, show")
    from private_llm.net.authority import check_days, make_certificates, user_folder
    from private_llm.net.roles import endpoint_name, named

    config, folder = options.config_of(protocol, 64, **options.plan_of(plan, split=split)), Path(out)
    if parties is not None and parties < 1:
        raise ConfigError(f"parties: got {parties}; want at least 1")
    check_days(days)
    made = make_certificates(folder, config.endpoints if parties is None else parties, days, users=user or ())
    for endpoint, tls in made.items():
        _say(f"for {named(config, endpoint_name(endpoint))} alone: {tls.certificate} with {tls.key}")
    for name in user or ():
        _say(f"for user {name} alone: the folder {user_folder(folder, name)}")
    _say(
        f"signed by {folder / 'ca.pem'}. All keys were made on this machine: for trying out. Parties that distrust "
        "each other make their own keys and let a CA they agree upon sign them."
    )


@certs.command(cls=Command)
def ca(
    out: Annotated[str, typer.Option("--out", help="Folder for ca.key (never leaves it) and ca.pem (for everybody).")],
    days: DaysOption = 1825.0,
) -> None:
    """As the keeper of the CA: make it, once."""
    from private_llm.net.authority import make_authority

    folder = Path(out)
    facts = make_authority(folder, days)
    _say(f"for whoever keeps the CA alone: {folder / 'ca.key'} (no copy on a party's machine; keep one off line)")
    _say(f"for everybody: {folder / 'ca.pem'}, valid until {facts.ends:%Y-%m-%d}, SHA-256 {facts.fingerprint}")


@certs.command(cls=Command)
def request(
    name: Annotated[str, typer.Option("--name", help="party0, party1, ..., client, or client:NAME.")],
    out: Annotated[str, typer.Option("--out", help="Folder for the key (never leaves it) and the request (.csr).")],
) -> None:
    """As a party or user: make a key at home, and a request that the CA signs."""
    from private_llm.net.authority import make_request

    made = make_request(Path(out), name)
    _say(f"stays here: {made.path.with_suffix('.key')}")
    _say(f"for whoever keeps the CA: {made.path}, for {name}; read this to them by phone:")
    _say(f"  SHA-256 of its key {made.fingerprint}")


@certs.command(cls=Command)
def sign(
    file: Annotated[Path, typer.Argument(help="A request (.csr).")],
    ca: Annotated[Path, typer.Option("--ca", help="Folder of the CA.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the certificate (default: the file's).")] = None,
    days: DaysOption = 90.0,
    name: Annotated[str, typer.Option("--name", help="Refuse a request for another name.")] = "",
) -> None:
    """As the keeper of the CA: sign a request whose fingerprint its sender has read to you."""
    from private_llm.net.authority import read_request, sign_request

    asked = read_request(file)
    if name and asked.name != name:
        raise ConfigError(f"{file}: got a request for {asked.name!r}; want one for {name!r}; nothing was signed")
    made, facts = sign_request(ca, file, out, days)
    _say(f"for {facts.name} (public): {made}, valid until {facts.ends:%Y-%m-%d}, and {ca / 'ca.pem'}")
    _say("signed for whoever holds the key with this fingerprint; did they read the same one to you?")
    _say(f"  SHA-256 of its key {asked.fingerprint}")


@certs.command(cls=Command)
def show(
    files: Annotated[list[Path], typer.Argument(help="Certificates or requests.")], as_json: options.Json = False
) -> None:
    """What stands in certificates and requests: name, days left, fingerprint."""
    from private_llm.net.authority import certificate_facts, read_request
    from private_llm_cli.commands.output import emit_json

    for path in files:
        found: list[tuple[dict[str, object], str]] = []
        if path.suffix == ".csr":
            asked = read_request(path)
            text = f"request for {asked.name}\n  SHA-256 of its key {asked.fingerprint}"
            found.append(({"subject": asked.name, "key_fingerprint": asked.fingerprint}, text))
        else:
            for facts in certificate_facts(path):
                values = {key: str(value) for key, value in dataclasses.asdict(facts).items()}
                subject, days = values.pop("name"), round(facts.days_left(), 1)
                found.append(({"subject": subject, **values, "days_left": days}, _text(facts, days)))
        for row, text in found:
            if as_json:
                emit_json({"name": "certs", "file": str(path), **row})
            else:
                _say(f"{path}: {text}")


def _text(facts: "CertificateFacts", days: float) -> str:
    left = f"{days:.0f} days left" if days > 0 else "EXPIRED"
    kind = "CA " if facts.authority else ""
    return (
        f"{kind}{facts.name}, {left} (until {facts.ends:%Y-%m-%d %H:%M} UTC), signed by {facts.issuer}\n"
        f"  SHA-256 {facts.fingerprint}"
    )


def _say(line: str) -> None:
    from private_llm.net.roles import legible
    from private_llm_cli.commands.output import CONSOLE

    for each in line.splitlines():
        CONSOLE.print(legible(each), highlight=False, markup=False, emoji=False, soft_wrap=True)  # :AB: is no emoji
