"""Help pages and hints of the command line."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from private_llm_cli.app import app
from private_llm_cli.options import SERVERS, SHARDING, SHARES
from typer.testing import CliRunner

COMMANDS = (
    "demo", "generate", "chat", "classify", "audit", "share", "party", "certs", "estimate", "diff", "doctor",
    "docs", "predictors",
)  # fmt: skip
Run = Callable[..., str]


def test_help_names_every_command(run: Run) -> None:
    text = run("--help")
    assert all(re.search(rf"\b{name}\b", text) for name in COMMANDS)


def pages(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from pages(below, (*path, name))


def test_help_shows_every_name_whole_at_80_columns() -> None:
    found = list(pages(typer.main.get_command(app)))
    assert len(found) > len(COMMANDS)
    for path, command in found:
        shown = CliRunner().invoke(app, [*path, "--help"], terminal_width=80, env={"COLUMNS": "80"}).output
        named = {name for each in command.params if not getattr(each, "hidden", False) for name in each.opts}
        assert named <= set(re.findall(r"[\w-]+", shown)), path
        assert "\u2026" not in shown
        assert not re.search(r"\w\.\.\.\n", shown)
        assert max(map(len, shown.splitlines())) <= 80
    panels = re.findall(r"^(\S.*):$", CliRunner().invoke(app, ["generate", "--help"]).output, re.MULTILINE)
    assert {"Arguments", "Options", "Parties", "Protocol", SHARES, SHARDING, SERVERS} <= set(panels)


@pytest.mark.parametrize(
    ("protocol", "has", "lacks"),
    [
        ("trio", {"--ring", "--split", "--kv-cache"}, {"--experts"}),
        ("cascade", {"--plan", "--hosts"}, {"--ring", "--experts", "--kv-cache"}),
        ("assisted", {"--experts", "--draft", "--timeout"}, {"--ring", "--split", "--sparsity", "--kv-cache"}),
    ],
)
def test_help_of_a_protocol_has_its_options_alone(protocol: str, has: set[str], lacks: set[str]) -> None:
    shown = {*re.findall(r"--[\w-]+", CliRunner().invoke(app, ["generate", "--protocol", protocol, "--help"]).output)}
    assert (has <= shown, lacks & shown) == (True, set())


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("generate m --promt x", "--promt; did you mean --prompt?"),
        ("generate m -prompt x", "-prompt; did you mean --prompt?"),
        ("generate m --max_new_tokens=3", "--max_new_tokens; did you mean --max-new-tokens?"),
        ("generate m --new 3", "--new; did you mean --max-new-tokens?"),
        ("certs --partis 3", "--partis; did you mean --parties?"),
        ("--plugn a", "--plugn; did you mean --plugin?"),
        ("generate --model m", "--model; the model stands alone: private-llm generate MODEL"),
        ("doctor --xyzzy", "--xyzzy; --help lists all."),
    ],
)
def test_a_misspelt_option_is_told_its_nearest(words: str, hint: str) -> None:
    assert f"No such option: {hint}" in CliRunner().invoke(app, words.split()).output


@pytest.mark.parametrize(("word", "hint"), [("gateawy", " Did you mean 'gateway'?"), ("benc", ""), ("kv-budge", "")])
def test_a_misspelt_command_is_told_commands_that_there_are(word: str, hint: str) -> None:
    assert f"No such command '{word}'.{hint}\n" in CliRunner().invoke(app, [word, "--tiny"]).output
