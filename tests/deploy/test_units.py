"""systemd's units: they verify, run commands that exist, let a party drain, and leave no way for shares to disk."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.files import DEPLOY, FOLDER, SETTINGS, parsed

UNITS = DEPLOY / "systemd"
PARTY = UNITS / "private-llm-party@.service"
GATEWAY = UNITS / "private-llm-gateway.service"
PROGRAM = "/opt/private-llm/bin/private-llm"
EXPOSURE = 20
"""In tenths, as `systemd-analyze security` counts; 100 is a unit without any protection."""
systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")


def settings_of(unit: Path) -> dict[str, list[str]]:
    """Every setting with its values, in order."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"(\w+)=(.*)", line)
        if match:
            found.setdefault(match[1], []).append(match[2])
    return found


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The root of a file system with the units and a program where they expect it."""
    program = tmp_path / PROGRAM[1:]
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    units = tmp_path / "etc" / "systemd" / "system"
    units.mkdir(parents=True)
    shutil.copy(PARTY, units / "private-llm-party@party1.service")
    shutil.copy(GATEWAY, units)
    return tmp_path


def verify(machine: Path, unit: str) -> str:
    """What systemd finds wrong with a unit."""
    words = ["systemd-analyze", "verify", "--recursive-errors=no", f"--root={machine}", unit]
    result = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    return result.stderr + (f"exit code {result.returncode}" if result.returncode else "")


@systemd
@pytest.mark.parametrize("unit", ["private-llm-party@party1.service", GATEWAY.name])
def test_systemd_finds_nothing_wrong(machine: Path, unit: str) -> None:
    assert verify(machine, unit) == ""


@systemd
def test_systemd_would_find_something(machine: Path) -> None:
    bad = machine / "etc/systemd/system/bad.service"
    bad.write_text(GATEWAY.read_text().replace("LimitCORE", "LimitCores"))
    assert "LimitCores" in verify(machine, bad.name)


@systemd
def test_a_party_is_shut_in(machine: Path) -> None:
    words = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager"]
    unit = machine / "etc/systemd/system/private-llm-party@party1.service"
    result = subprocess.run(
        [*words, str(unit)], capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "LANG": "C"}
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_party_s_unit() -> None:
    found = settings_of(PARTY)
    program, *words = shlex.split(found["ExecStart"][0])
    name, values = parsed(words)
    assert (program, name) == (PROGRAM, "party")
    assert str(values["settings"]) == f"{FOLDER}/%i/party.toml"
    assert found["WorkingDirectory"] == found["BindReadOnlyPaths"] == [f"{FOLDER}/%i"]
    assert seconds(found["TimeoutStopSec"][0]) > SETTINGS["drain_s"] + 5
    assert found["KillSignal"] == ["SIGTERM"]
    assert found["Restart"] == ["on-failure"]


@pytest.mark.parametrize("unit", [PARTY, GATEWAY], ids=lambda unit: unit.stem)
def test_memory_stays_in_memory(unit: Path) -> None:
    found = settings_of(unit)
    assert found["LimitCORE"] == found["MemorySwapMax"] == ["0"]
    assert found["NoNewPrivileges"] == found["PrivateTmp"] == ["yes"]
    assert found["ProtectSystem"] == ["strict"]


def test_the_gateway_s_unit() -> None:
    found = settings_of(GATEWAY)
    program, *words = shlex.split(found["ExecStart"][0])
    name, values = parsed([word.replace("${PARTIES}", ",".join(SETTINGS["hosts"])) for word in words])
    assert (program, name) == (PROGRAM, "gateway")
    assert values["host"] == "127.0.0.1"
    assert values["token"] == ""  # from the file
    assert not values["no_token"]
    assert values["hosts"] == [",".join(SETTINGS["hosts"])]
    assert found["EnvironmentFile"] == ["%h/.config/private-llm/gateway.env"]
    written = re.findall(r"^#   (PARTIES|PRIVATE_LLM_GATEWAY_TOKEN)=(\S+)", GATEWAY.read_text(), re.MULTILINE)
    assert dict(written) == {"PARTIES": ",".join(SETTINGS["hosts"]), "PRIVATE_LLM_GATEWAY_TOKEN": "..."}


def test_the_user_is_made() -> None:
    lines = (UNITS / "private-llm.sysusers.conf").read_text().splitlines()
    (line,) = [line for line in lines if not line.startswith("#")]
    assert shlex.split(line)[:2] == ["u", settings_of(PARTY)["User"][0]]
