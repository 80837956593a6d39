"""Real tensors between nodes come out as they went in: types, layouts, several receivers, exact bytes."""

from __future__ import annotations

import pytest
import torch

from private_llm.net.local import LocalMesh
from private_llm.net.transport import Transport
from private_llm.token_sharding.nodes.floats import recv_floats, send_floats


@pytest.fixture
def links() -> list[Transport]:
    mesh = LocalMesh(3, timeout=5)
    return [mesh.transport(node) for node in range(3)]


def tensors() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    rows = torch.randn(2, 5, 3, 4, generator=g).transpose(1, 2)  # as a model makes them: [B, heads, n, D], strided
    plain = torch.randn(2, 3, 5, 4, generator=g)
    return [rows, plain, torch.randn(2, 3, 5, generator=g), torch.randn(1, generator=g), rows[:, :, ::2, 1]]


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16])
def test_all_receivers_get_what_was_sent(links: list[Transport], dtype: torch.dtype | None) -> None:
    sent = tensors()
    send_floats(links[0], [1, 2], "x", sent, dtype)
    kind = dtype or torch.float32
    for node in (1, 2):
        found = recv_floats(links[node], 0, "x", [(tuple(tensor.shape), kind) for tensor in sent])
        for tensor, got in zip(sent, found, strict=True):
            assert got.dtype == torch.float32
            assert torch.equal(got, tensor.to(kind).float())
    numbers = sum(tensor.numel() for tensor in sent)
    assert links[0].ledger.cost().sent == {(0, node): numbers * kind.itemsize for node in (1, 2)}


def test_types_may_be_mixed_wider_ones_first(links: list[Transport]) -> None:
    sums, *_ = (tensor for tensor in tensors() if tensor.dim() == 3)
    values = tensors()[0].half()
    send_floats(links[0], 1, "x", [sums, values])
    expected = [(tuple(sums.shape), torch.float32), (tuple(values.shape), torch.float16)]
    found = recv_floats(links[1], 0, "x", expected)
    assert torch.equal(found[0], sums)
    assert torch.equal(found[1], values.float())


def test_a_message_is_no_view_of_what_was_sent(links: list[Transport]) -> None:
    value = torch.ones(2, 3)
    send_floats(links[0], 1, "x", [value])
    value.zero_()
    assert torch.equal(recv_floats(links[1], 0, "x", [((2, 3), torch.float32)])[0], torch.ones(2, 3))


def test_nothing_is_sent_as_nothing(links: list[Transport]) -> None:
    send_floats(links[0], 1, "x", [torch.ones(1, 0, 4), torch.ones(3)])
    empty, full = recv_floats(links[1], 0, "x", [((1, 0, 4), torch.float32), ((3,), torch.float32)])
    assert empty.shape == (1, 0, 4)
    assert torch.equal(full, torch.ones(3))
