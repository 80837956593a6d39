"""Messages that lie on a GPU. None is needed: PyTorch's fake tensors say where they lie, fake streams what waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from delayed_links import DelayedTransport
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from private_llm.errors import TransportError
from private_llm.net import incoming
from private_llm.net import transport as transports
from private_llm.net.local import LocalMesh
from private_llm.net.parallel_sessions import parallel_session_links
from private_llm.net.transport import CLIENT, PlacedTransport, Ready, Staging, Transport, onto
from private_llm.protocols.quad.records import Member, MemberTransport

from .mesh import couple

GPU, OTHER = torch.device("cuda:0"), torch.device("cuda:1")


class Event(str):
    """Done at the third question."""

    asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 2


class Stream:
    """Writes down what is asked of it."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def record_event(self) -> Event:
        self.said.append(f"{self.name} records")
        return Event(f"event of {self.name}")

    def wait_stream(self, other: Stream) -> None:
        self.said.append(f"{self.name} waits for {other.name}")

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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # fake tensors cannot be pinned where there is a GPU
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: only)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: only)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: only)
    monkeypatch.setattr(Staging, "out", lambda staging, x: x.cpu())
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


@pytest.mark.parametrize(("spin", "naps"), [(60.0, 0), (-1.0, 2)])
def test_what_leaves_a_gpu_is_copied_on_a_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch, spin: float, naps: int
) -> None:
    """After it is computed; and nobody reads the copy before it is done."""
    said: list[str] = []
    side, current, made = Stream("side", said), Stream("current", said), list[Tensor]()

    class Pinned:
        def copy_(self, x: Tensor, non_blocking: bool) -> None:
            assert non_blocking
            said.append("copy")

    @contextlib.contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        said.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(transports, "room", lambda shape, dtype: Pinned())
    monkeypatch.setattr(transports, "_SPIN_S", spin)
    here = threading.current_thread()  # others sleep, too
    monkeypatch.setattr(
        transports.time, "sleep", lambda seconds: said.append("nap") if threading.current_thread() is here else None
    )
    made.append(Staging(GPU).out(torch.arange(3)))
    assert isinstance(made[0], Pinned)
    assert said == ["side waits for current", "on side", "copy", "side records", *["nap"] * naps]


@pytest.mark.parametrize("pinned", [False, True])
def test_what_comes_goes_to_a_gpu_from_pinned_memory(monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    """And to main memory only when it is there."""
    said: list[object] = []

    class Arrived:
        is_cpu = True

        def is_pinned(self) -> bool:
            return pinned

        def pin_memory(self) -> Arrived:
            said.append("pinned")
            return self

        def to(self, device: torch.device, non_blocking: bool = False) -> None:
            said.append((device, non_blocking))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in (GPU, torch.device("cpu")):
        onto(Arrived(), device)  # type: ignore[arg-type]
    assert said == [*([] if pinned else ["pinned"]), (GPU, True), (torch.device("cpu"), False)]


@pytest.mark.parametrize("between", [lambda inner: inner, lambda inner: MemberTransport(inner, 1, {})])
@pytest.mark.parametrize("gpu", [False, True])
def test_what_comes_from_a_socket_lands_in_pinned_memory(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, between: Callable[[Transport], Transport]
) -> None:
    """Where a party may compute on a GPU, also through links by role; frames are compared as always."""
    made: list[tuple[tuple[int, ...], torch.dtype]] = []

    def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made.append((shape, dtype))
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(incoming, "room", pinned)
    zero, one = couple()
    party = on(torch.device("cpu"), between(one))
    for _ in range(2):
        zero.send(1, "m", torch.arange(6).int())
    assert party.recv(Member(0), "m", (2, 3), torch.int32).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert made == [((2, 3), torch.int32)] * gpu
    with pytest.raises(TransportError, match="got 'm' with 6 x int32; want 'm' with 6 x int64"):
        party.recv(Member(0), "m", (6,), torch.int64)
    for end in (zero, one):
        end.close()
