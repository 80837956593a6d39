"""Parties that serve for months: whatever a client or a peer does ends its session, and the next one is served."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from private_llm_cli.commands import parties as command
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.checkpoint.model_spec import describe
from private_llm_hf.client import launch
from private_llm_hf.client.launch import serve_party, start_parties
from private_llm_hf.client.parties import Parties
from private_llm_hf.party import party
from private_llm_hf.wire.answers import Loaded
from private_llm_hf.wire.commands import Call, Description, Forward, LoadModel, ManageCache, ResetCache, Tokens
from transformers import PreTrainedModel

from private_llm.errors import ConfigError, PartyFailed, PrivateLLMError, ShareFileError
from private_llm.net.authority import make_certificates
from private_llm.net.transport import CLIENT
from tests.hf import tiny
from tests.hf.compare import BATCH
from tests.hf.test_remote import config, files, free_ports, running, shared
from tests.hf.wire.raw import send_raw

__all__ = ["config", "shared"]  # fixtures


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.build("opt")


def announce(parties: Parties, model: PreTrainedModel, name: str, changes: dict[str, Any]) -> None:
    """Describe a model to all parties as a changed client would."""
    described = describe(type(model), model.config)
    settings = {**described.config, **changes}
    parties.tell(LoadModel(Description(name, settings, "x", {}), None))
    parties.answers(Loaded)


def shout(parties: Parties, facts: object) -> None:
    """Send JSON that is no message to all parties."""
    for number in parties.members:
        send_raw(parties.transport, number, facts)


ATTACKS: dict[str, Callable[[Parties, PreTrainedModel], None]] = {
    "a size that is none": lambda p, m: announce(p, m, "OPTForCausalLM", {"hidden_size": "x"}),
    "a class of another family": lambda p, m: announce(p, m, "DetrModel", {}),
    "a type of another family": lambda p, m: announce(p, m, "DetrModel", {"model_type": "detr"}),
    "a class that is no text": lambda p, m: announce(p, m, 3, {}),  # type: ignore[arg-type]
    "a type that is no text": lambda p, m: announce(p, m, "OPTModel", {"model_type": ["opt"]}),
    "a surrogate": lambda p, m: announce(p, m, "OPTForCausalLM", {"activation_function": "\ud800 [/x]"}),
    "a surrogate in the error": lambda p, m: announce(p, m, "OPTModel", {"model_type": "\ud800 [/x]"}),
    "markup": lambda p, m: shout(p, {"message": "[/x] [bold"}),
    "markup in a field": lambda p, m: shout(p, {"message": "LoadFile", "[/x] [bold \ud800": "\x1b[2J"}),
    "deep nesting": lambda p, m: announce(p, m, "OPTForCausalLM", {"ffn_dim": nested(400)}),
    "no fields at all": lambda p, m: shout(p, {"message": "LoadModel"}),
    "no message at all": lambda p, m: shout(p, [{}]),
    "a list for a number": lambda p, m: p.tell(ManageCache(ResetCache([1]))),  # type: ignore[arg-type]
    "a parallel session that is none": lambda p, m: shout(p, {"message": "LoadLike", "parallel_session": 3}),
}


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


@pytest.mark.sampled(4)
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_a_client_ends_its_own_session_only(
    attack: Callable[[Parties, PreTrainedModel], None], config: PrivateConfig, model: PreTrainedModel
) -> None:
    said: list[str] = []

    def printed(line: str) -> None:
        command.notice(line)
        said.append(line)

    threads = [
        threading.Thread(target=serve_party, args=(config, number, None, 2, printed), daemon=True)
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    parties = start_parties(config)

    def misuse() -> None:
        with parties._call():
            attack(parties, model)
            parties.answers(Loaded)

    with pytest.raises(PrivateLLMError):
        misuse()
    with patch(model, config) as private:
        assert private(BATCH["input_ids"]).logits.shape == (2, 5, 128)
    for thread in threads:
        thread.join(20)
    assert sum(line.startswith("session 1 ended: ") for line in said) == 3
    assert sum(line == "session 2 ended" for line in said) == 3


class Foreign(Exception):
    """What some library may raise, and no list has."""


def test_an_error_of_any_kind_ends_the_session_only(
    config: PrivateConfig, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = party.Party.forward

    def forward(self: party.Party, command: Forward) -> None:
        if self.number == 1:
            raise Foreign("a text that may hold a value: 0.123")
        original(self, command)

    with running(config, [None] * 3, sessions=2) as lines:
        monkeypatch.setattr(party.Party, "forward", forward)
        with patch(model, config) as private, pytest.raises(PartyFailed, match=r"party 1: Foreign: in test_daemons"):
            private(BATCH["input_ids"])
        monkeypatch.undo()
        with patch(model, config) as private:
            assert private(BATCH["input_ids"]).logits.shape == (2, 5, 128)
    assert not any("0.123" in line for line in lines)


@pytest.mark.parametrize("reason", ["[/x]", "[red]x[/blue]", "\x1b[2J\x07", "a\nb", "\ud800", "\0", ""])
def test_a_client_s_reason_is_printed_as_plain_text(
    reason: str, config: PrivateConfig, model: PreTrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = [
        threading.Thread(target=serve_party, args=(config, number, None, 1, command.notice), daemon=True)
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    parties = start_parties(config)
    parties.transport.abort(f"the client stopped: {reason}")
    parties.shutdown()
    for thread in threads:
        thread.join(20)
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("session 1 ended: the client stopped:")]
    assert len(lines) == 3, err
    assert "\x1b" not in err
    assert not reason.startswith("[") or all(reason in line for line in lines)


def test_a_terminal_that_is_gone_does_not_end_the_party(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(command.sys, "stderr", Gone())
    command.notice("session 1 ended")


def babble(listener: socket.socket, stop: threading.Event) -> None:
    """A program at a party's port that speaks another language."""
    listener.settimeout(0.1)
    while not stop.is_set():
        try:
            caller, _ = listener.accept()
        except TimeoutError:
            continue
        with caller:
            caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)
            caller.settimeout(1)
            try:
                while caller.recv(4096):
                    pass
            except OSError:
                pass
    listener.close()


@pytest.mark.parametrize("encrypted", [True, False])
def test_another_program_at_a_lower_party_s_port(
    encrypted: bool, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parties above it say so and try again: when the port is the party's own again, they serve."""
    monkeypatch.setattr(launch, "_PAUSE_S", 0.2)
    monkeypatch.setattr(launch, "_LONGEST_PAUSE_S", 0.4)
    hosts = free_ports(3)
    tls = make_certificates(tmp_path, 3, 1.0) if encrypted else dict.fromkeys([0, 1, 2, CLIENT])
    common = PrivateConfig(party_mode="remote", hosts=hosts, allow_plain_loopback=not encrypted, timeout_s=30)
    settings = {endpoint: replace(common, tls=found) for endpoint, found in tls.items()}
    said: list[str] = []
    stop = threading.Event()
    host, port = hosts[0].split(":")
    other = threading.Thread(target=babble, args=(socket.create_server((host, int(port))), stop), daemon=True)
    other.start()
    threads = [
        threading.Thread(target=serve_party, args=(settings[n], n, None, 1, said.append), daemon=True) for n in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1.5)
        assert thread.is_alive(), "a program at a lower party's port ended a party"
    stop.set()
    other.join(5)
    threads.append(threading.Thread(target=serve_party, args=(settings[0], 0, None, 1, said.append), daemon=True))
    threads[-1].start()
    with patch(model, settings[CLIENT]) as private:
        assert private(BATCH["input_ids"]).logits.shape == (2, 5, 128)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert any(line.startswith("no session: ") and "trying again" in line for line in said)
    assert sum(line == "session 1 ended" for line in said) == 3


def test_settings_that_cannot_work_are_refused_at_the_start() -> None:
    lonely = PrivateConfig(party_mode="remote", hosts=free_ports(3))
    with pytest.raises(ConfigError, match="need certificates"):
        serve_party(lonely, 0)


def test_a_party_with_a_share_file_serves_no_other_model(
    shared: Path, config: PrivateConfig, model: PreTrainedModel
) -> None:
    with running(config, files(shared / "one")):
        parties = start_parties(config)
        with pytest.raises(ShareFileError, match="serves the model of that file only"), parties._call():
            announce(parties, model, type(model).__name__, {})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (1 << 20, 1 << 20)}, "want positive sizes"),
        ({"shape": (2, -5)}, "want at most 8 sizes from 0"),
        ({"shape": ()}, "want positive sizes"),
        ({"shape": (2, 5.0)}, "got 5.0; want a whole number"),
        ({"shape": "25"}, "got '25'; want a list"),
        ({"name": "labels"}, "got 'labels'; want one of input_ids"),
        ({"vocabulary": 1 << 40}, "the model has 128 tokens"),
    ],
)
def test_inputs_have_possible_shapes(change: dict[str, object], message: str, model: PreTrainedModel) -> None:
    plain = PrivateConfig(protocol="plain", insecure=True, timeout_s=20)
    item = replace(Tokens("input_ids", (2, 5), 128), **change)
    with patch(model, plain) as private, pytest.raises(PrivateLLMError, match=message):
        private.parties.forward(Call({}, (item,), None, None, None, ()), [])


def test_the_number_of_a_session_that_failed_to_close(config: PrivateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even the end of a session may go wrong."""

    class Broken:
        def close(self) -> None:
            raise Foreign

    said: list[str] = []
    monkeypatch.setattr(launch, "connect", lambda *_, **__: Broken())
    monkeypatch.setattr(launch, "run_party", lambda *_: None)
    serve_party(config, 0, None, 2, said.append)
    assert said[-1] == "session 2 ended: party 0: Foreign"
