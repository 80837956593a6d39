"""What tests of the deployment files share: the files, the example's settings, and the command line's own parser."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
import yaml
from private_llm_cli.app import app
from private_llm_hosting.settings import EXAMPLE

from private_llm.config import VERSION

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "scripts" / "deploy"
SETTINGS = tomllib.loads(EXAMPLE)
PORT = int(SETTINGS["hosts"][0].rpartition(":")[2])
OPERATOR_PORT = int(SETTINGS["operator"]["address"].rpartition(":")[2])
FOLDER = "/etc/private-llm"
"""Where a container finds what the example names with relative paths."""
PARTY = ["party", "--config", f"{FOLDER}/party.toml"]
USER = 10001
IMAGE = f"private-llm:{VERSION}"


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML loaders silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        doubled = {key for key in keys if keys.count(key) > 1}
        if doubled:
            raise yaml.constructor.ConstructorError(None, None, f"twice: {sorted(doubled)}", node.start_mark)
        return super().construct_mapping(node, deep)


def documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a YAML file."""
    return list(yaml.load_all(path.read_text(encoding="utf-8"), Loader=StrictLoader))


def parsed(words: Iterable[str]) -> tuple[str, dict[str, Any]]:
    """Command and parameters of `private-llm WORDS`, by the real parser; it is not run."""
    group = typer.main.get_command(app)
    words = list(words)
    with group.make_context("private-llm", words[:1]) as context:
        name, command, rest = group.resolve_command(context, words)
        if hasattr(command, "invoke_without_command") and rest and not rest[0].startswith("-"):
            _, command, rest = command.resolve_command(context, rest)
        with command.make_context(name, rest, parent=context) as inner:
            return name, dict(inner.params)


def commands(text: str) -> list[list[str]]:
    """Words of all `private-llm ...` in a shell script or a comment, up to a redirection."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        start = line.strip().removeprefix("# ").strip()
        if start.startswith("private-llm "):
            words = shlex.split(start)
            stop = next((i for i, word in enumerate(words) if word in (">", "|", "&&", ";")), len(words))
            found.append(words[1:stop])
    return found


def every_file() -> list[Path]:
    """All files of the folder."""
    return sorted(path for path in DEPLOY.rglob("*") if path.is_file())
