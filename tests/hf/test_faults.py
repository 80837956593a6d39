"""A party that fails, stalls or disagrees: every endpoint stops, the error names the party, nothing hangs."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from private_llm_hf import patch
from private_llm_hf.client import launch
from private_llm_hf.client.parties import Parties, _remote_error
from private_llm_hf.party import party
from private_llm_hf.wire.commands import (
    Call,
    Description,
    Forward,
    Hello,
    LoadModel,
    SelectRows,
    Stop,
    recv_message,
    send_message,
)
from transformers import PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, PartyFailed, PrivateLLMError, TransportError, UnsupportedOp
from private_llm.net.local import LocalMesh
from private_llm.net.transport import CLIENT
from tests.hf import tiny
from tests.hf.conftest import PLAIN, TRIO
from tests.hf.wire.raw import send_raw

IDS = torch.tensor([[5, 6, 7]])


def sabotage(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Let party `number` do `act` when its next forward begins."""
    original = party.Party.forward

    def forward(self: party.Party, message: dict[str, object]) -> None:
        if self.number == number:
            act()
        original(self, message)

    monkeypatch.setattr(party.Party, "forward", forward)


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("party ")]


@pytest.fixture(autouse=True)
def _short_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stalled thread is not waited for."""
    monkeypatch.setattr(launch, "_EXIT_S", 0.5)


def expect(model: PreTrainedModel, error: type[PrivateLLMError], message: str) -> None:
    with pytest.raises(error, match=message):
        model.generate(IDS, max_new_tokens=3)
    with pytest.raises(PartyFailed, match="this session is over"):
        model(IDS)
    model.close()
    assert all_stopped()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_error_at_a_party_reaches_the_client_under_its_own_class(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail() -> None:
        raise DomainError("something outside the domain")

    sabotage(monkeypatch, number, fail)
    model = patch(tiny.build("opt"), TRIO)
    expect(model, DomainError, f"party {number}: something outside the domain")


def test_an_unforeseen_error_travels_without_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("a text that may hold a value: 0.123")

    sabotage(monkeypatch, 1, fail)
    model = patch(tiny.build("opt"), TRIO)
    with pytest.raises(PartyFailed) as caught:
        model(IDS)
    assert str(caught.value).startswith("party 1: ValueError: in test_faults.py, line")
    assert "0.123" not in str(caught.value)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_stalled_party_is_named_within_the_timeout(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    wake = threading.Event()
    sabotage(monkeypatch, number, lambda: bool(wake.wait(20)) or None)
    model = patch(tiny.build("opt"), replace(TRIO, timeout_s=1.5))
    start = time.monotonic()
    try:
        with pytest.raises(PartyFailed, match=f"party {number} was silent for 1.5 s"):
            model(IDS)
        assert time.monotonic() - start < 8
    finally:
        wake.set()
        model.close()


def test_a_long_computation_is_not_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the timeout passes, but every module that starts says so."""
    model = patch(tiny.build("opt"), replace(PLAIN, timeout_s=0.4))
    from torch import nn

    original = nn.Module.__call__

    def slow(self: nn.Module, *args: object, **kwargs: object) -> object:
        if threading.current_thread().name == "party 0" and type(self).__name__ == "Linear":
            time.sleep(0.1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", slow)
    start = time.monotonic()
    model(IDS)
    assert time.monotonic() - start > 1.0
    model.close()


def test_an_interrupted_call_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch(tiny.build("opt"), PLAIN)

    def interrupt(self: Parties, *_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Parties, "answers", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(IDS)
    monkeypatch.undo()
    with pytest.raises(PartyFailed, match=r"this session is over \(an earlier call failed or was interrupted\)"):
        model(IDS)


def test_closing_twice_and_using_after(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch(tiny.build("opt"), PLAIN)
    model.close()
    model.close()
    assert alive() == []
    with pytest.raises(PartyFailed, match=r"this session is over \(it was closed\)"):
        model(IDS)


def all_stopped() -> bool:
    deadline = time.monotonic() + 10
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive()


def test_a_dropped_model_stops_its_parties() -> None:
    model = patch(tiny.build("opt"), PLAIN)
    assert alive() == ["party 0"]
    del model
    gc.collect()
    assert all_stopped()


def test_a_model_is_dropped_inside_a_lock_that_its_end_takes() -> None:
    """Python collects garbage wherever it allocates, also there."""
    model = patch(tiny.build("opt"), PLAIN)
    circle = [model]
    circle.append(circle)  # type: ignore[arg-type]
    del model, circle

    def collect() -> None:
        with launch._CORES._lock:
            gc.collect()

    collects = threading.Thread(target=collect, daemon=True)
    collects.start()
    collects.join(10)
    assert not collects.is_alive()
    assert all_stopped()


@pytest.mark.parametrize("change", [{"frac_bits": 16}, {"ring": 32, "frac_bits": 12}, {"reveal": "token"}])
def test_parties_with_other_settings(monkeypatch: pytest.MonkeyPatch, change: dict[str, object]) -> None:
    original = launch.run_party

    def other(config: PrivateConfig, number: int, transport: object) -> str | None:
        return original(replace(config, **change) if number == 1 else config, number, transport)

    monkeypatch.setattr(launch, "run_party", other)
    with pytest.raises(
        PrivateLLMError, match=rf"{next(iter(change))}: (party .|the client) has .*; want the same at all"
    ):
        patch(tiny.build("opt"), TRIO)


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PrivateConfig.agreement

    def other(self: PrivateConfig) -> bytes:
        mine = original(self)
        return mine[::-1] if threading.current_thread().name == "party 2" else mine

    monkeypatch.setattr(PrivateConfig, "agreement", other)
    with pytest.raises((ConfigError, PartyFailed), match="another version"):
        patch(tiny.build("opt"), TRIO)


# -- the control channel --------------------------------------------------------------------------------------
def channel() -> tuple[object, object]:
    mesh = LocalMesh(1, timeout=1)
    return mesh.transport(CLIENT), mesh.transport(0)


def test_messages_carry_json_and_integer_tensors() -> None:
    client, other = channel()
    mask = torch.tensor([[True, False]])
    public = {"position_ids": torch.arange(6).view(2, 3), "attention_mask": mask, "use_cache": True}
    send_message(client, 0, Forward(Call(public, (), None, None, 7, ("logits", "x")), free=(1, 2)))
    got = recv_message(other, CLIENT, (Stop, Forward))
    assert isinstance(got, Forward)
    assert (got.free, got.at, got.call.cache, got.call.encode_to) == ((1, 2), None, None, 7)
    assert got.call.outputs == ("logits", "x")
    assert torch.equal(got.call.public["position_ids"], torch.arange(6).view(2, 3))
    assert torch.equal(got.call.public["attention_mask"], mask)
    assert got.call.public["use_cache"] is True
    assert client.ledger.cost().total > 0
    assert {op for _, op, _ in client.ledger.sent} == {"control"}


@pytest.mark.parametrize("value", [torch.zeros(2), {1, 2}, float("nan")])
def test_messages_refuse_everything_else(value: object) -> None:
    client, _ = channel()
    with pytest.raises((TypeError, ValueError)):
        send_message(client, 0, LoadModel(Description("X", {"x": value}, "", {}), None))


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"__tensor__": ["int64", [3], [1]]}',
        b'{"__tensor__": ["float64", [1], [1]]}',
        b"{}" * 3,
        b"[" * 100_000,
        b'{"message":"SelectRows","handle":NaN,"index":{"__tensor__":["int64",[1],[0]]}}',
        b'{"message":"SelectRows","handle":' + b"9" * 5000 + b',"index":{"__tensor__":["int64",[1],[0]]}}',
        b'{"message":"SelectRows","handle":1,"index":{"__tensor__":["int64",[1],[1' + b"0" * 30 + b"]]}}",
    ],
)
def test_malformed_messages(raw: bytes) -> None:
    client, other = channel()
    client.send_bytes(0, "control", raw)
    with pytest.raises(TransportError, match="control message from the client"):
        recv_message(other, CLIENT, (Hello, SelectRows))


@pytest.mark.parametrize("size", [(64 << 20) + 1, 1 << 40])
def test_absurd_sizes(size: int) -> None:
    client, other = channel()
    client.send(0, "control", torch.zeros(1, dtype=torch.uint8).expand(size))
    with pytest.raises(TransportError, match=f"got 'control' with {size} x .*at most {64 << 20}"):
        recv_message(other, CLIENT, (Hello, SelectRows))


def test_an_empty_message() -> None:
    client, other = channel()
    client.send(0, "control", torch.zeros(0, dtype=torch.uint8))
    with pytest.raises(TransportError, match="control message from the client"):
        recv_message(other, CLIENT, (Hello, SelectRows))


@pytest.mark.parametrize(
    "change", [{"outputs": ["encoder_last_hidden_state"]}, {"public": {"output_hidden_states": True}}]
)
def test_a_client_that_asks_for_more(change: dict[str, object]) -> None:
    """What a party opens is the party's decision: a changed client gets nothing but an error."""
    model = patch(tiny.build("opt"), PLAIN)
    call = Call({}, (), None, None, None, ())
    with pytest.raises(UnsupportedOp, match=r"party 0: the client asks for .*, which parties do not take or open"):
        model.parties.forward(replace(call, **change), [])
    model.close()


def test_an_unknown_command() -> None:
    model = patch(tiny.build("opt"), PLAIN)
    send_raw(model.parties.transport, 0, {"message": "dance"})
    with pytest.raises(TransportError, match="unknown command 'dance'"):
        model(IDS)


@pytest.mark.parametrize(
    ("reason", "kind", "text"),
    [
        ("party 2: DomainError: x", DomainError, "party 2: x"),
        ("party 1 passes on: party 2: DomainError: x", DomainError, "party 1 passes on: party 2: x"),
        ("the dealer passes on: party 2: Odd: x", PartyFailed, "the dealer passes on: party 2: Odd: x"),
        (
            "party 1 passes on: oh, party 2: DomainError: x",
            PartyFailed,
            "party 1 passes on: oh, party 2: DomainError: x",
        ),
    ],
)
def test_who_is_blamed_by_whom(reason: str, kind: type[PrivateLLMError], text: str) -> None:
    """A party's words reach the user under its own name, or under the name of the one that claims to repeat them."""
    found = _remote_error(PartyFailed(reason))
    assert type(found) is kind
    assert str(found) == text
