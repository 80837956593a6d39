"""Messages that lie on a GPU. None is needed: PyTorch's fake tensors say where they lie, fake streams what waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from private_llm.errors import TransportError
from private_llm.net.device_messages import Ready
from private_llm.net.local import LocalMesh
from private_llm.net.parallel_sessions import parallel_session_links
from private_llm.net.transport import CLIENT, DelayedTransport, PlacedTransport, Transport

GPU, OTHER = torch.device("cuda:0"), torch.device("cuda:1")


class Stream:
    """Writes down what is asked of it."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def record_event(self) -> str:
        self.said.append(f"{self.name} records")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.said.append(f"{self.name} waits for {event}")


class Message:
    device = GPU

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def record_stream(self, stream: Stream) -> None:
        self.said.append(f"the memory is {stream.name}'s, too")


WAITS = {
    ("default", "default"): ([], []),
    ("a", "a"): (["a records"], []),
    ("default", "b"): (
        [], ["default records", "b waits for event of default", "the memory is b's, too"],
    ),
    ("a", "b"): (["a records"], ["b waits for event of a", "the memory is b's, too"]),
    ("a", "default"): (["a records"], ["default waits for event of a", "the memory is default's, too"]),
}  # fmt: skip


@pytest.mark.parametrize("streams", WAITS)
def test_a_receiver_on_another_stream_waits_for_the_sender(
    monkeypatch: pytest.MonkeyPatch, streams: tuple[str, str]
) -> None:
    said: list[str] = []
    known = {name: Stream(name, said) for name in ("default", *streams)}
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: known["default"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: known[streams[0]])
    ready, message = Ready(Message(said)), Message(said)  # type: ignore[arg-type]
    sent, said[:] = list(said), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: known[streams[1]])
    ready.wait(message)  # type: ignore[arg-type]
    assert (sent, said) == WAITS[streams]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    only = Stream("default", [])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: only)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: only)
    with FakeTensorMode() as mode:
        yield mode


def on(device: torch.device, inner: Transport) -> PlacedTransport:
    return PlacedTransport(inner, lambda: device)


@pytest.mark.parametrize("rotated", [False, True])
def test_parties_of_one_process_send_what_lies_on_a_gpu_as_it_is(fake: FakeTensorMode, rotated: bool) -> None:
    mesh = LocalMesh(3, 5.0)
    links = [parallel_session_links(mesh.transport(party), 3, int(rotated), rotated) for party in range(3)]
    zero, one, two = (on(device, inner) for device, inner in zip((GPU, GPU, OTHER), links, strict=True))
    x = torch.zeros(2, 300, dtype=torch.int64, device=GPU)
    zero.send(one.me, "m", x)
    zero.send(two.me, "m", x)
    assert one.recv(zero.me, "m", (2, 300), torch.int64) is x
    assert two.recv(zero.me, "m", (600,), torch.int64).device == OTHER
    assert sum(zero.ledger.cost().sent.values()) == 2 * x.nbytes
    zero.send(one.me, "m", x)
    with pytest.raises(TransportError, match="got 'm' with 600 x"):
        one.recv(zero.me, "m", (2, 300), torch.int32)


@pytest.mark.parametrize("between", [lambda inner: inner, lambda inner: DelayedTransport(inner, 0.0)])
def test_others_get_main_memory(fake: FakeTensorMode, between: type[Transport]) -> None:
    """The client, a party on the CPU, and whoever is reached by links that do not say that they carry it."""
    mesh = LocalMesh(2, 5.0)
    zero, plain, client = on(GPU, between(mesh.transport(0))), mesh.transport(1), mesh.transport(CLIENT)
    x = torch.zeros(300, dtype=torch.int64, device=GPU)
    for end in (plain, client):
        zero.send(end.me, "m", x)
        zero._send(end.me, "m", x)  # as programs do
        made: list[Tensor] = [end.recv(0, "m", (300,), torch.int64) for _ in range(2)]
        assert {y.device.type for y in made} == {"cpu"}
        end.send(0, "m", made[0])
        assert zero.recv(end.me, "m", (300,), torch.int64).device == GPU
