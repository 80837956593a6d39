"""What holds for all deployment files: YAML is valid, no image floats, no secret is in them, commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from private_llm_hosting.settings import EXAMPLE, read_settings

from private_llm.errors import ConfigError
from tests.deploy.files import DEPLOY, IMAGE, PARTY, SETTINGS, commands, documents, every_file, parsed

YAML = [path for path in every_file() if path.suffix == ".yaml"]
SECRETS = (
    r"-----BEGIN", r"(?i)(?:token|password|passwd|secret|key)\s*[:=]\s*[\"']?[A-Za-z0-9+/_-]{16,}[\"']?\s*$",
    r"\bAKIA[0-9A-Z]{16}\b", r"\bgh[pousr]_[A-Za-z0-9]{20,}", r"\bhf_[A-Za-z0-9]{20,}",
)  # fmt: skip


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(DEPLOY)) for path in paths]


def test_there_are_files_of_every_kind() -> None:
    assert {path.parent.name for path in every_file()} == {"deploy", "systemd", "compose", "kubernetes"}
    assert len(YAML) >= 10


@pytest.mark.parametrize("path", YAML, ids=names(YAML))
def test_yaml_is_valid(path: Path) -> None:
    found = documents(path)
    assert found
    assert all(isinstance(each, dict) for each in found)


def test_a_key_that_stands_twice_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: 1\na: 2\n")
    with pytest.raises(Exception, match="twice"):
        documents(tmp_path / "x.yaml")


@pytest.mark.parametrize("path", every_file(), ids=names(every_file()))
def test_images_have_a_version_and_files_no_secret(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r":latest\b", text)
    for image in re.findall(r"^\s*(?:- )?image:\s*(\S+)", text, re.MULTILINE):
        assert image.removeprefix("registry.example.org/") == IMAGE
    for image in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
        assert re.fullmatch(r"[\w./]+:\d+\.\d+-slim-\w+", image)
    for line in text.splitlines():
        assert not [pattern for pattern in SECRETS if re.search(pattern, line)], line


@pytest.mark.parametrize(
    "line", ["PRIVATE_LLM_GATEWAY_TOKEN=abcdefghijklmnop", "key: 0123456789abcdef0", "-----BEGIN X"]
)
def test_the_search_for_secrets_finds_one(line: str) -> None:
    assert any(re.search(pattern, line) for pattern in SECRETS)


def test_the_party_s_command_exists() -> None:
    name, values = parsed(PARTY)
    assert (name, str(values["settings"])) == ("party", PARTY[-1])
    with pytest.raises(Exception, match="No such option"):
        parsed([*PARTY, "--no-such"])


def test_commands_of_scripts_exist() -> None:
    text = (DEPLOY / "compose" / "prepare_desk.sh").read_text(encoding="utf-8")
    text = re.sub(r"\$\(python -c .*?\)\"", 'model"', text)
    found = commands(text)
    assert [words[0] for words in found] == ["certs", "share", "party"]
    for words in found:
        parsed(words)


def test_environment_variables_are_settings(tmp_path: Path) -> None:
    """Every PRIVATE_LLM_PARTY__... of a file replaces a setting that exists; `read_settings` refuses others."""
    file = tmp_path / "party.toml"
    file.write_text(EXAMPLE)
    found = set()
    for path in every_file():
        found |= set(re.findall(r"\bPRIVATE_LLM_PARTY__\w+", path.read_text(encoding="utf-8")))
    assert found == {"PRIVATE_LLM_PARTY__OPERATOR__ADDRESS"}
    for name in found:
        table, key = name.removeprefix("PRIVATE_LLM_PARTY__").lower().split("__")
        assert key in SETTINGS[table]
        read_settings(file, {name: "0.0.0.0:9100"})
    with pytest.raises(ConfigError, match="known"):
        read_settings(file, {"PRIVATE_LLM_PARTY__OPERATOR_ADDRESS": "0.0.0.0:9100"})
