"""The recorder sees every message once, changes nothing unless asked to, and shows no payload."""

import pytest
import torch

from private_llm.errors import DomainError
from private_llm.net.local import LocalMesh
from tests.recording import RecordingTransport, flip

from .mesh import run_threads


def test_transcript_and_shared_ledger():
    mesh = LocalMesh(2)
    zero = RecordingTransport(mesh.transport(0), payloads=True)
    one = mesh.transport(1)

    def first(t):
        t.send(1, "a", torch.tensor([7, 8]))
        return t.exchange(1, "b", torch.tensor([1], dtype=torch.int32)).item()

    def second(t):
        t.recv(0, "a", (2,), torch.int64)
        return t.exchange(0, "b", torch.tensor([2], dtype=torch.int32)).item()

    assert run_threads({0: zero, 1: one}, {0: first, 1: second}) == {0: 2, 1: 1}
    assert zero.outline == [
        ("sent", 1, "a", torch.int64, 16),
        ("sent", 1, "b", torch.int32, 4),
        ("received", 1, "b", torch.int32, 4),
    ]
    assert [m.payload.tolist() for m in zero.messages] == [[7, 8], [1], [2]]
    assert "7" not in repr(zero.messages[0])
    assert zero.ledger.cost().sent == {(0, 1): 20}
    assert zero.ledger.cost().rounds == 1


def test_payloads_are_kept_only_on_request_and_not_aliased():
    mesh = LocalMesh(2)
    bare, keeping = RecordingTransport(mesh.transport(0)), RecordingTransport(mesh.transport(1), payloads=True)
    payload = torch.tensor([3])
    bare.send(1, "a", payload)
    keeping.recv(0, "a", (1,), torch.int64)
    payload.zero_()
    assert bare.messages[0].payload is None
    assert keeping.messages[0].payload.item() == 3


@pytest.mark.parametrize(("bit", "change"), [(0, 1), (9, 512), (63, -(2**63)), (64, 1)])
def test_one_bit_of_one_message(bit, change):
    mesh = LocalMesh(2)
    zero = RecordingTransport(mesh.transport(0), alter=flip(1, bit))
    payload = torch.tensor([0])
    for _ in range(3):
        zero.send(1, "a", payload)
    one = mesh.transport(1)
    assert [one.recv(0, "a", (1,), torch.int64).item() for _ in range(3)] == [0, change, 0]
    assert payload.item() == 0


def test_an_empty_message_has_no_bit():
    zero = RecordingTransport(LocalMesh(2).transport(0), alter=flip(0))
    with pytest.raises(DomainError, match="empty"):
        zero.send(1, "a", torch.empty(0, dtype=torch.int64))
