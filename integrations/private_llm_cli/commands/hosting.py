"""`private-llm party --config`: serving as a settings file says, checking it, and an example of it.

The example is printed without importing what serves, which takes seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer
from private_llm_hosting.settings import EXAMPLE

from private_llm.net.wire import legible
from private_llm_cli.commands.output import CONSOLE, emit_json, emit_table


def example() -> None:
    """Print a settings file."""
    sys.stdout.write(EXAMPLE)


def check(path: Path, as_json: bool) -> None:
    """Print a row for each thing looked at; exit code 2 if one of them is wrong."""
    from private_llm_hosting.check import check_party
    from private_llm_hosting.settings import read_settings

    found = check_party(read_settings(path))
    if as_json:
        for each in found:
            emit_json({"name": "check", "what": each.what, "found": each.found, "verdict": each.verdict})
    else:
        rows = [(legible(each.what), legible(each.found), each.verdict) for each in found]
        emit_table(f"party {path}", ("what", "found", "verdict"), rows)
    wrong = sum(each.verdict == "error" for each in found)
    if wrong:
        if not as_json:
            CONSOLE.print(f"{wrong} to put right before this party can start", highlight=False)
        raise typer.Exit(2)


def party(path: Path) -> None:
    """Serve until a signal comes."""
    from private_llm_hf.service.party_service import PartyService
    from private_llm_hosting.run import run_party
    from private_llm_hosting.settings import read_settings

    run_party(read_settings(path), PartyService)
