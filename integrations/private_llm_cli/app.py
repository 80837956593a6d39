"""The command line: its commands in the order of `--help`, and what becomes of errors.

A command's options and its work are in one file of `commands/`, which imports PyTorch when it runs. Where the work
imports it at once, its options are in `using.py`.
Errors of the library, and files that cannot be read or written, are one message on stderr and exit code 2; what
nobody foresaw is one message and exit code 1. `private-llm --traceback COMMAND` shows the traceback of any of them.
"""

import re
import sys
import warnings
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from private_llm.config import VERSION, import_plugins
from private_llm.errors import ConfigError, PrivateLLMError
from private_llm_cli.commands.calibrate import calibrate, diff
from private_llm_cli.commands.certs import certs
from private_llm_cli.commands.classify import classify
from private_llm_cli.commands.parties import party, share
from private_llm_cli.commands.predictors import predictors
from private_llm_cli.commands.prepare import prepare
from private_llm_cli.help_pages import Command, Group
from private_llm_cli.options import PLUGINS
from private_llm_cli.using import audit, chat, demo, doctor, estimate, gateway, generate


def docs(
    page: Annotated[str, typer.Argument(help="Its name, such as errors or studies/top-k.")] = "README",
) -> None:
    """Print a page of the documentation (Markdown); without a name the list of all pages."""
    folder = Path(str(files("private_llm_cli") / "docs")).resolve()  # a link in a checkout
    pages = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.md")}
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        raise ConfigError(f"docs: got {page!r}; want the name of a page, which `private-llm docs` lists")
    typer.echo(pages[name].read_text(encoding="utf-8"), nl=False)


app = typer.Typer(
    name="private-llm",
    help="Run HuggingFace models on secret-shared data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    cls=Group,
)
for command in (
    demo, generate, chat, gateway, audit, classify, share, calibrate, party, prepare, estimate, diff, doctor, docs,
):  # fmt: skip
    app.command(cls=Command)(command)
app.add_typer(certs)
app.add_typer(predictors)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True)] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option("--plugin", help="A Python module to import first, which registers handlers or protocols."),
    ] = None,
) -> None:
    import_plugins(tuple(plugin or ()))  # before options are read: a protocol may be one of a plugin's
    PLUGINS.set(tuple(plugin or ()))


_INTERRUPTED = 130  # how a command ends by Ctrl-C: what a shell makes of a process that SIGINT ended


def main(commands: typer.Typer = app) -> None:
    """Entry point of `private-llm`, and of scripts with commands of their own."""
    warnings.showwarning = lambda message, *_: typer.echo(f"warning: {message}", err=True)
    try:
        commands()
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:
            typer.echo("private-llm: stopped", err=True)
        raise
    except Exception as error:
        if "--traceback" in sys.argv:
            raise
        message, code = _in_words(error)
        typer.echo(f"private-llm: {message}", err=True)
        sys.exit(code)


def _in_words(error: Exception) -> tuple[str, int]:
    """One message for people, and the exit code."""
    if isinstance(error, PrivateLLMError):
        return str(error), 2
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or type(error).__name__}", 2
    if isinstance(error, ModuleNotFoundError) and (extras := _extras_with(error.name or "")):
        first, *more = (f"'private-llm[{extra}]'" for extra in extras)
        either = "".join(f" or {other}" for other in more)
        return (
            f"this command needs the Python package {error.name!r}, which is not installed: pip install {first}"
            f"{either} (in a checkout: '.[{extras[0]}]')"
        ), 2
    first = next(iter(str(error).strip().splitlines()), "no message")
    return f"unforeseen {type(error).__name__}: {first}; `private-llm --traceback ...` shows where it comes from", 1


def _extras_with(module: str) -> list[str]:
    """The extras of this package that install a module, but for that of tests."""
    name = module.partition(".")[0].replace("_", "-").lower()
    try:
        wanted = metadata.requires("private-llm") or []
    except metadata.PackageNotFoundError:  # a checkout that was never installed
        return []
    found = (re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", line) for line in wanted)
    return [each[2] for each in found if each and each[1].replace("_", "-").lower() == name and each[2] != "test"]
