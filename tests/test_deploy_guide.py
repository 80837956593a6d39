"""The guide for operators says what the program says: messages, figures, commands, files, ports, times."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer
from private_llm_cli.app import app
from private_llm_hosting.observers import PartyMetrics

from tests.deploy.files import DEPLOY, OPERATOR_PORT, PORT, ROOT, SETTINGS, parsed

GUIDE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
VALUE = "\0"
"""Stands for what is put into a message when it is made."""


def section(title: str) -> str:
    return GUIDE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """Cells of a section's first table, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def templates() -> list[str]:
    """Every text of the source, with VALUE for what is put into it."""
    found = []
    for folder in ("private_llm", "integrations"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else VALUE for part in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%[sdr]", VALUE, node.value))
    return found


def pattern(message: str) -> str:
    """A message of the guide, in which examples (numbers, names, addresses) may be values."""
    examples = re.compile(r"\.\.\.|'[^']*'(?=\s)|\bparty ?\d\b|\d+")
    parts, end = [], 0
    for found in examples.finditer(message):
        value = f"{re.escape(found[0])}|{VALUE}|party {VALUE}" if found[0] != "..." else ".*?"
        parts += [re.escape(message[end : found.start()]), value]
        end = found.end()
    return "".join(f"(?:{part})" for part in [*parts, re.escape(message[end:])])


def messages() -> list[str]:
    return [re.findall(r"`([^`]+)`", row[0])[0] for row in rows("Troubleshooting") if "/ready" not in row[0]]


@pytest.fixture(scope="module")
def source() -> list[str]:
    return templates()


@pytest.mark.parametrize("message", messages())
def test_messages_of_the_guide_are_those_of_the_program(message: str, source: list[str]) -> None:
    assert any(re.search(pattern(message), text) for text in source)


@pytest.mark.parametrize("message", ["its certificate has perished", "got the name party2; wants party1"])
def test_other_messages_are_not_found(message: str, source: list[str]) -> None:
    assert not any(re.search(pattern(message), text) for text in source)


# -- figures, commands, files -----------------------------------------------------------------------------------------
def test_figures_in_the_table_of_alerts_exist() -> None:
    names = {name for row in rows("Monitoring") for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", row[0])}
    text = PartyMetrics(0, "trio", ["demo"]).text().decode()
    known = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    assert len(names) >= 7
    for name in names:
        assert {name, f"private_llm_party_{name}"} & known, name


def test_commands_in_the_text_exist() -> None:
    """Blocks are checked with all other pages' (tests/test_docs.py)."""
    found = [shlex.split(words)[1:] for words in re.findall(r"`(private-llm [^`]+)`", GUIDE)]
    assert len(found) >= 4
    names = set(typer.main.get_command(app).commands)
    for words in found:
        assert words[0] in names
        if len(words) > 1:
            parsed(words)


def test_ports_are_those_of_the_example() -> None:
    asked = {int(port) for row in rows("Ports and firewall") for port in re.findall(r"port (\d+)", " ".join(row))}
    assert asked == {PORT, OPERATOR_PORT}


def test_files_that_are_named_exist_and_all_are_named() -> None:
    named = set(re.findall(r"`scripts/deploy/([\w@./-]+)`", GUIDE))
    assert {name for name in named if not (DEPLOY / name).exists()} == set()
    folders = {name.rstrip("/") for name in named if (DEPLOY / name).is_dir()}
    files = {str(path.relative_to(DEPLOY)) for path in DEPLOY.rglob("*") if path.is_file()}
    assert {file for file in files if file not in named and str(Path(file).parent) not in folders} == set()


def test_the_time_to_drain_is_the_example_s() -> None:
    found = {float(value) for value in re.findall(r"`drain_s`[^.]*?\((\d+) s in the example\)", GUIDE)}
    assert found == {SETTINGS["drain_s"]}


@pytest.mark.parametrize("title", ["systemd", "Containers", "Kubernetes", "Backup", "Upgrade", "Rotation", "Sizes"])
def test_sections_are_there(title: str) -> None:
    assert section(title).strip()
