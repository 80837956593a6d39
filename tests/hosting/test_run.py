"""A hosted party from its start to its signals, with a service that only pretends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from private_llm_cli.app import app
from private_llm_hosting.run import run_service
from private_llm_hosting.settings import EXAMPLE, read_settings
from typer.testing import CliRunner

from private_llm.errors import ConfigError, TransportError
from private_llm.net.authority import make_certificates

from .party import FakeService, settings, write_settings

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAM = """
import sys, threading
from pathlib import Path
from typing import Any
from private_llm_hosting.run import run_service
from private_llm_hosting.settings import read_settings
from tests.hosting.party import FakeService

class Service(FakeService):
    def drain(self):
        if "slow" in sys.argv:
            self.observer.draining()
        else:
            super().drain()

run_service(read_settings(Path(sys.argv[1])), Service)
"""


def start(path: Path, *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), *more], stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )


def ready(path: Path) -> tuple[int, str]:
    address = read_settings(path, {}).operator
    assert address is not None
    try:
        with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/ready", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def wait_for(path: Path, status: int) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found, text = ready(path)
        if found == status:
            return text
        time.sleep(0.05)
    raise AssertionError(f"never {status}")


def test_a_signal_drains(tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls", 3, days=10)
    path = write_settings(tmp_path, '[log]\nformat = "json"\n')
    with start(path) as process:
        assert wait_for(path, 200) == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=30)
    assert process.returncode == 0
    events = [json.loads(line)["event"] for line in logged.splitlines()]
    assert events == ["start", "certificate", "certificate", "links_up", "signal", "draining", "stop"]


def core_limits(pid: int) -> set[str]:
    (line,) = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith("Max core")]
    return set(line.split()[4:6])


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="no /proc")
def test_a_crash_leaves_no_core_dump(tmp_path: Path) -> None:
    path = write_settings(tmp_path, tls=False)
    with start(path) as process:
        wait_for(path, 200)
        assert core_limits(process.pid) == {"0"}
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


@pytest.mark.full
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    path = write_settings(tmp_path, tls=False)
    with start(path, "slow") as process:
        wait_for(path, 200)
        process.send_signal(signal.SIGINT)
        assert wait_for(path, 503) == "draining\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "ending at once" in logged.splitlines()[-1]


def test_what_ends_the_service_ends_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(FakeService):
        def run(self) -> None:
            raise TransportError("cannot listen")

    monkeypatch.setattr("private_llm_hosting.run.configure_logs", lambda *_: None)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(TransportError, match="cannot listen"):
        run_service(settings(tmp_path, tls=False), Failing)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_example_on_the_command_line() -> None:
    result = CliRunner().invoke(app, ["party", "--example-config"])
    assert (result.exit_code, result.output) == (0, EXAMPLE)


def test_the_example_is_printed_at_once() -> None:
    """Without what serves: importing it takes seconds."""
    code = "import sys; from private_llm_cli.app import app; app(sys.argv[1:], standalone_mode=False); "
    code += "sys.exit(sorted({'transformers', 'numba', 'private_llm_hf.api'} & set(sys.modules)) or 0)"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'integrations'}"}
    words = [sys.executable, "-c", code, "party", "--example-config"]
    result = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == EXAMPLE


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], r"party: got none; want this party's number \(--index\)"),
        (["--check"], "party: got none; want this party's number"),
        (["--config", "none.toml"], "--config: none.toml: No such file"),
    ],
)
def test_options_that_do_not_fit(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(app, ["party", *words], catch_exceptions=False)


@pytest.mark.parametrize("clients", [1, 7])
def test_one_setting_says_who_serves(tmp_path: Path, clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options replace what the file says, whichever of them says how many clients there are."""
    (tmp_path / "shares").mkdir()
    (tmp_path / "shares" / "party2.safetensors").write_text('{"format": "private-llm share file 2"}')
    path = write_settings(tmp_path, tls=False)
    if clients == 1:
        path.write_text(path.read_text().split("[operator]")[0])
    served: dict[int, Any] = {}
    monkeypatch.setattr("private_llm_hosting.run.run_service", lambda settings, make: served.update({7: settings}))
    monkeypatch.setattr(
        "private_llm_hf.client.launch.serve_party",
        lambda config, party, *rest: served.update({1: (config, party, *rest)}),
    )
    words = ["--config", str(path), "--clients", str(clients), "--index", "2", "--idle", "9", "--device", "cuda:1"]
    CliRunner().invoke(app, ["party", *words], catch_exceptions=False)
    assert [*served] == [clients]
    if clients == 1:
        config, party, shares, *_ = served[1]
    else:
        config, party, shares = served[7].config, served[7].party, served[7].models["demo"]
        assert served[7].service.sessions == 7
    assert (party, config.idle_s, config.device, config.allow_plain_loopback) == (2, 9, "cuda:1", True)
    assert shares == tmp_path / "shares" / "party2.safetensors"
