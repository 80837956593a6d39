"""Options of `private-llm certs` and `party` that concern users."""

from __future__ import annotations

from pathlib import Path

import pytest
from private_llm_cli.app import app
from typer.testing import CliRunner

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from tests.hf.test_remote import free_ports

HOSTS = ("--hosts", ",".join(free_ports(3)))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[PrivateConfig]:
    """The configurations with which parties would serve."""
    configs: list[PrivateConfig] = []
    monkeypatch.setattr("private_llm_hf.client.launch.serve_party", lambda config, *rest: configs.append(config))
    return configs


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_certificates_of_users_and_a_party_that_admits_some(
    tmp_path: Path, served: list[PrivateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "certs"
    text = run("certs", "--out", str(folder), "--user", "alice", "--user", "bob")
    assert "for user bob alone: the folder" in text
    assert (folder / "client-alice" / "client.pem").is_file()
    assert not (folder / "client.pem").exists()
    run("party", "--index", "1", *HOSTS, "--tls", str(folder), "--allow", "alice", "--idle", "60")
    run("party", "--index", "1", *HOSTS, "--tls", str(folder), "--idle", "0")
    (tmp_path / "users").write_text("bob")
    monkeypatch.chdir(tmp_path)
    run("party", "--index", "1", *HOSTS, "--tls", str(folder), "--allow", "users")
    first, second, third = served
    assert third.tls is not None
    assert third.tls.allow == str(tmp_path / "users")
    assert first.tls is not None
    assert second.tls is not None
    assert (first.tls.allow, first.idle_s) == ("alice", 60.0)
    assert (second.tls.allow, second.idle_s) == (None, None)


def test_a_list_of_users_needs_certificates(served: list[PrivateConfig]) -> None:
    with pytest.raises(ConfigError, match=r"tls: want folder .--tls.*users are known by their certificates"):
        run("party", "--index", "0", *HOSTS, "--allow-plain-loopback", "--allow", "alice")
    assert served == []
