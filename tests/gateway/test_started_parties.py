"""A gateway waits for parties that are still starting, says for whom, and gives up in time with the reason."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from private_llm_cli.app import main
from private_llm_cli.commands.gateway import name_of, when_ready
from private_llm_hf.service.local import LocalParties

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PartiesBusy, PartyFailed, TransportError
from private_llm.net.authority import make_certificates
from private_llm.net.rendezvous import Unreached, connect
from private_llm.net.transport import CLIENT
from tests.gateway.small_gateway import TOKEN
from tests.hosting.party import free_ports

LOG = logging.getLogger("private_llm")


def called(failures: list[Exception]) -> tuple[list[int], Callable[[], str]]:
    calls: list[int] = []

    def call() -> str:
        calls.append(1)
        if len(calls) <= len(failures):
            raise failures[len(calls) - 1]
        return "model"

    return calls, call


def test_it_calls_until_they_are_there_and_have_loaded() -> None:
    calls, call = called([Unreached("party 1 was not reached"), PartiesBusy("they connect"), PartiesBusy("they load")])
    told: list[str] = []
    assert when_ready(call, 60.0, told.append) == "model"
    assert len(calls) == 4
    assert [each.partition("): ")[2] for each in told] == ["party 1 was not reached", "they connect", "they load"]


def test_it_gives_up_with_the_reason() -> None:
    calls, call = called([PartiesBusy("they connect")] * 30)
    with pytest.raises(TransportError, match=r"not ready after 1 s \(--wait 0.9\): they connect"):
        when_ready(call, 0.9, lambda text: None)
    assert len(calls) == 2  # none begins when the time is up


def test_a_try_ends_with_the_time_to_wait() -> None:
    hosts = [f"127.0.0.1:{port}" for port in free_ports(3)]
    config = PrivateConfig(hosts=hosts, party_mode="remote", allow_plain_loopback=True, timeout_s=60, busy_wait_s=60)
    began = time.monotonic()
    with pytest.raises(TransportError, match=r"not ready after \d s \(--wait 1\): party 0 at .* was not reached"):
        when_ready(lambda: connect(config, CLIENT), 1.0, lambda text: None)
    assert time.monotonic() - began < 10.0


def test_a_client_folder_is_called_as_the_folder_around_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model" / "client").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "my-model")
    names = {"client": "my-model", "./client/": "my-model", str(tmp_path / "my-model"): "my-model", "": "demo"}
    assert {source: name_of(source) for source in names} == names
    assert name_of("an-organisation/client") == "client"  # at the hub
    with pytest.raises(ConfigError, match="'/' does not end in a name"):
        name_of("/")


def test_parties_that_fail_again_and_again_are_not_waited_for() -> None:
    """Twice they may: parties whose links form anew end what has just begun."""
    calls, call = called([PartyFailed("party 1 stopped")] * 3)
    with pytest.raises(PartyFailed, match="party 1 stopped"):
        when_ready(call, 60.0, lambda text: None)
    assert len(calls) == 3
    calls, call = called([PartyFailed("party 1 stopped")] * 2)
    assert when_ready(call, 60.0, lambda text: None) == "model"


def test_warnings_are_shown_meanwhile_and_levels_put_back(capsys: pytest.CaptureFixture[str]) -> None:
    level, handlers, told = LOG.level, LOG.handlers[:], []  # type: ignore[var-annotated]

    def call() -> str:
        LOG.info("waiting for party 2", extra={"event": "waiting"})
        LOG.info("something else")
        LOG.warning("a warning")
        return "model"

    when_ready(call, 1.0, told.append)
    assert told == ["waiting for party 2"]
    assert (LOG.level, LOG.handlers) == (level, handlers)


def ask_meanwhile(port: int, answers: dict[str, httpx.Response]) -> None:
    """As clients that do not know that the gateway is starting, until they are told whom it waits for."""
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 60
    with httpx.Client(timeout=20) as client:
        while time.monotonic() < until and "waiting for party" not in getattr(answers.get("chat"), "text", ""):
            time.sleep(0.1)
            with contextlib.suppress(httpx.TransportError):
                answers["stranger"] = client.get(f"{url}/v1/models")
                answers["health"] = client.get(f"{url}/health")
                headers = {"Authorization": f"Bearer {TOKEN}"}
                answers["chat"] = client.post(f"{url}/v1/chat/completions", json={}, headers=headers)


def test_a_gateway_says_whom_it_waits_for_and_gives_up(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_certificates(tmp_path / "tls", 3)
    monkeypatch.setattr("private_llm.net.rendezvous._TELL_FIRST_S", 0.2)
    monkeypatch.setattr("private_llm_cli.commands.output.QUIET_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = server.getsockname()[1]
    hosts = ",".join(f"127.0.0.{number}:{port}" for number in (1, 2, 3))
    words = ["gateway", str(shared / "client"), "--port", str(own), "--hosts", hosts, "--tls", str(tmp_path / "tls")]
    words += ["--timeout", "2", "--wait", "5", "--token", TOKEN]
    monkeypatch.setattr("sys.argv", ["private-llm", *words])
    answers: dict[str, httpx.Response] = {}
    client = threading.Thread(target=ask_meanwhile, args=(own, answers))
    client.start()
    with pytest.raises(SystemExit) as ended:
        main()
    client.join(30)
    assert answers["stranger"].status_code == 401
    assert (answers["health"].status_code, answers["health"].json()) == (503, {"status": "starting"})
    assert answers["chat"].status_code == 503
    assert answers["chat"].headers["retry-after"] == "5"
    error = answers["chat"].json()["error"]
    assert error["code"] == "party_unavailable"
    assert f"the gateway is starting: waiting for party 0 at 127.0.0.1:{port} (for " in error["message"]
    assert ended.value.code not in (0, None)
    said = " ".join(capsys.readouterr().err.split())
    assert f"waiting for party 0 at 127.0.0.1:{port} (for " in said
    assert re.search(r"waiting for the parties \(for [2-5] s\): party 0", said)
    assert "(--wait 5): party 0 at" in said


@pytest.mark.full
def test_local_parties_are_ready_when_they_are_there(shared: Path) -> None:
    told: list[str] = []
    with LocalParties(PrivateConfig(timeout_s=30), {"demo": shared}, tell=told.append) as parties:
        for party in range(3):
            assert (parties._folder / "state" / f"up{party}").exists()
    assert told[0].startswith("waiting for party 0, party 1, party 2 (for 0 s, 900 s at most)")


@pytest.mark.full
def test_local_parties_that_take_too_long(shared: Path) -> None:
    with pytest.raises(PartyFailed, match=r"party 0, party 1, party 2: not ready within 0 s"):
        LocalParties(PrivateConfig(timeout_s=30), {"demo": shared}, ready_s=0.0)


def test_local_parties_that_cannot_start_say_why(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "client").symlink_to(shared / "client")
    for party in range(3):
        data = (shared / f"party{party}.safetensors").read_bytes()
        (tmp_path / f"party{party}.safetensors").write_bytes(data if party != 1 else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(PartyFailed, match=r"party 1 did not start: .*is damaged"):
        LocalParties(PrivateConfig(timeout_s=30), {"demo": tmp_path})
