"""Operations follow their operands: what a party draws and receives lies where the operands lie.

The meta device stands for a second one, in sessions of the CPU: tensors of both devices do not mix, so anything that
is drawn, received or made on the session's device instead of the operands' fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from private_llm.approx.softmax import softmax
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.exact.maximum import argmax
from private_llm.kernels.devices import device_for
from private_llm.net.local import LocalMesh
from private_llm.net.transport import CLIENT, PlacedTransport, Transport
from private_llm.nn.attention import attend
from private_llm.protocols import session as session_module
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.session import Session, _placed, join, meta_session
from private_llm.protocols.settings_table import settings_table
from private_llm.protocols.share import Share
from private_llm.ring.dpf import expand, key_words
from private_llm.ring.ring import RING64
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretIndex, SecretTensor
from tests.harness import run_parties
from tests.session import run_session
from tests.tensor.secrets import plain_session, secret

META = torch.device("meta")
_TO = Tensor.to


class Zeros(Transport):
    """Peers that say nothing but zeros, in main memory as real links do."""

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        pass

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def wait(self, frm: int) -> None:
        pass


def party(number: int, protocol: Literal["trio", "quad", "dealer"] = "trio") -> Session:
    """One party of a session of the CPU whose received tensors follow the operands."""
    config = PrivateConfig(protocol=protocol, device_map={"": "cpu"})
    end = meta_session(config, number).protocol
    end.placed = True
    end.transport = PlacedTransport(Zeros(number), lambda: end.device)
    return Session(config, end.on(torch.device("cpu")))


def held(session: Session, device: torch.device | str, *shape: int) -> Fixed:
    part = torch.zeros(shape, dtype=torch.int64, device=device)
    count = len(session.protocol.public(torch.zeros(1, dtype=torch.int64)).parts)
    return Fixed(session, Share((part,) * count), session.frac)


CAUSAL = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
OPERATIONS: dict[str, Callable[[Fixed], Fixed]] = {
    "mul": lambda x: x * x,
    "mul without truncation": lambda x: x.mul(x, 2 * x.frac),
    "scale": lambda x: x * 0.3,
    "matmul": lambda x: x.matmul(x),
    "poly": lambda x: x.poly([1.0, 2.0, 3.0]),
    "cube": lambda x: x.poly([1.0, 2.0, 3.0, 4.0], bits=4),
    "compare": lambda x: x.select(x.less_than([0.0, 1.0]), [1, 2], [0.0, 1.0]),
    "softmax": softmax,
    "argmax": argmax,
    "convolution": lambda x: _image(x, lambda image: F.conv2d(image, image, padding=1)),
    "max pool": lambda x: _image(x, lambda image: F.max_pool2d(image, 2)),
    "average pool": lambda x: _image(x, lambda image: F.avg_pool2d(image, 3, padding=1)),
    "attention": lambda x: attend(*[_image(x, Tensor.clone)] * 3, mask=CAUSAL, scale=0.5),
    "layer norm": lambda x: _image(x, lambda image: F.layer_norm(image, (4,), torch.ones(4), torch.zeros(4))),
    "gelu": lambda x: _image(x, F.gelu),
    "relu": lambda x: _image(x, F.relu),
    "times public": lambda x: _image(x, lambda image: image * torch.linspace(0, 1, 4) + torch.ones(4)),
    "join": lambda x: _image(x, lambda image: torch.cat([image, torch.ones(1, 1, 4, 4)])),
}


def _image(x: Fixed, rule: Callable[[Tensor], Tensor]) -> Fixed:
    made = rule(SecretTensor(x.view(lambda part: part.view(1, 1, 4, 4))))
    assert isinstance(made, SecretTensor)
    return made.to_fixed()


PLACES = [*(("trio", n) for n in range(3)), *(("quad", n) for n in range(4)), *(("dealer", n) for n in range(3))]


@pytest.mark.parametrize(("protocol", "number"), PLACES)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_results_lie_where_the_operands_lie(
    operation: Callable[[Fixed], Fixed], protocol: Literal["trio", "quad", "dealer"], number: int
) -> None:
    here = party(number, protocol)
    for device in (torch.device("cpu"), META):
        made = operation(held(here, device, 4, 4))
        assert {part.device for part in made.share.parts} == {device}


@pytest.mark.parametrize("number", [0, 1, 2])
def test_bits_lie_where_the_operands_lie(number: int) -> None:
    here = party(number)
    x = held(here, META, 5)
    bits = x.proto.a2b(x.share)
    both = x.proto.and_(x.proto.invert(bits), bits)
    assert {part.device for part in (*bits.parts, *both.parts)} == {META}


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("public", [False, True])
def test_a_lookup_happens_where_the_table_lies(number: int, public: bool) -> None:
    here = party(number)
    index = here.protocol.on(torch.device("cpu")).receive_index(3, 10)
    assert {key.device.type for key in index.keys} == {"cpu"}
    ids = SecretIndex(here, index, (3,))
    table = torch.zeros(10, 4, device=META) if public else SecretTensor(held(here, META, 10, 4))
    rows = F.embedding(ids.to(META), table)
    assert isinstance(rows, SecretTensor)
    assert {part.device for part in rows.to_fixed().share.parts} == {META}


def test_rows_of_a_point_function_come_to_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`expand` computes in main memory; a stand-in for another device sees where the result goes."""
    moved: list[object] = []

    def to(self: Tensor, *where: object, **_: bool) -> Tensor:
        moved.append(where)
        return self

    monkeypatch.setattr(Tensor, "to", to)
    expand([torch.zeros(2, key_words(10), dtype=torch.int64)], 10, [0], RING64, "cpu")
    assert moved == [(torch.device("cpu"),)]


def test_a_secret_moves_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = secret(plain_session(), torch.ones(2, 3))
    assert x.to("cpu") is x
    moved: list[object] = []
    part = x.to_fixed().share.parts[0]

    def to(self: Tensor, *where: object) -> Tensor:
        moved.append((self is part, *where))
        return self

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "to", to)
        SecretTensor.__torch_function__(_TO, (), (x, torch.device("cuda:1")))
    assert moved == [(True, torch.device("cuda:1"))]


def test_indices_stay_until_they_are_looked_up() -> None:
    here = party(0)
    ids = SecretIndex(here, here.protocol.receive_index(2, 5), (2,))
    assert ids.to("cuda:3") is ids


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_for("cpu", 2) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [device_for("cuda", number).index for number in range(4)] == [0, 1, 0, 1]
    assert device_for("cuda:1", 0).index == 1
    with pytest.raises(ConfigError, match="sees 2 GPU"):
        device_for("cuda:2", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees 0 GPU"):
        device_for("cuda", 0)


def test_a_session_asks_for_devices_only_if_there_may_be_several() -> None:
    placed_map = {"device_map": {"": "cpu"}}
    for settings, placed in (({}, False), (placed_map, True), ({**placed_map, "truncation": "exact"}, True)):
        config = PrivateConfig.from_dict(settings)
        end = meta_session(config, 0).protocol
        made = _placed(config, end, torch.device("cpu"))
        assert held(made, META, 1).proto is made.protocol
        assert (end.device == META) is placed
        made.protocol.on(torch.device("cpu"))
        assert made.protocol.placed is placed
        assert isinstance(made.protocol.transport, PlacedTransport) is placed
        assert made.device == "cpu"
    end = meta_session(PrivateConfig(), 0).protocol
    assert _placed(PrivateConfig(), end, torch.device("cuda:1")).device == "cuda:1"
    assert end.placed


def test_every_protocol_says_where_it_computes() -> None:
    """`Fixed.proto` is the one way to the protocol, and it names the operand's device."""
    here = party(1)
    x = held(here, META, 1)
    assert isinstance(x.proto, Protocol)
    assert here.protocol.device == META
    assert held(here, "cpu", 1).proto.device == torch.device("cpu")


@pytest.mark.parametrize("protocol", ["trio", "quad", "dealer"])
def test_every_protocol_runs_on_streams_of_chacha(protocol: Literal["trio", "quad", "dealer"]) -> None:
    """The cipher that a GPU can make; nothing but the masks changes."""
    x = torch.tensor([[1.5, -2.0], [0.25, 3.0]])
    done = run_parties(PrivateConfig(protocol=protocol, prg="chacha20"), lambda session, v: [v.matmul(v), v * v], [x])
    assert all((value - want).abs().max() < 1e-4 for value, want in zip(done.values, (x @ x, x * x), strict=True))


@pytest.mark.parametrize("protocol", ["trio", "quad"])
@pytest.mark.parametrize("on_cpus", [0, 1])
def test_parties_agree_on_the_cipher(
    on_cpus: int, protocol: Literal["trio", "quad"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ChaCha20 where all of them compute on GPUs; the client has none, and masks weights with what they agreed upon."""
    met = itertools.count()
    monkeypatch.setattr(session_module, "makes_streams", lambda device: next(met) >= on_cpus)
    found: list[str] = []
    ciphers = run_session(PrivateConfig(protocol=protocol), lambda session, transport: None, lambda end: end.cipher)
    assert ciphers == ("aes" if on_cpus else "chacha20")
    met = itertools.count()

    def square(session: Session, x: Fixed) -> Fixed:
        found.extend(type(stream).__name__ for stream in session.protocol._streams)  # type: ignore[attr-defined]
        return x * x

    done = run_parties(PrivateConfig(protocol=protocol), square, [torch.tensor([1.5])])
    assert abs(done.values[0].item() - 2.25) < 1e-4
    assert set(found) == ({"Prg"} if on_cpus else {"ChaCha"})


def test_settings_of_another_cipher_are_refused() -> None:
    with pytest.raises(ConfigError, match="prg"):
        PrivateConfig.from_dict({"prg": "des"})
    mesh = LocalMesh(3, timeout=5)
    aes = PrivateConfig(prg="aes")
    greeting = session_module._greeting(aes, "aes") * 2 + settings_table(aes)
    for other in (1, 2, CLIENT):
        mesh.transport(other).send(0, "hello", torch.frombuffer(bytearray(greeting), dtype=torch.uint8))
    with pytest.raises(ConfigError, match="prg: party 1 has 'aes', this endpoint 'auto'; want the same at all"):
        join(PrivateConfig(), 0, mesh.transport(0))
