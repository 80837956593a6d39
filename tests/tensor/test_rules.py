"""Each rule against PyTorch on the same values: linear and local ones exactly, products up to their truncation."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from private_llm.errors import DomainError, PlaintextLeak, UnsupportedOp
from private_llm.protocols.share import Index
from private_llm.tensor.secret import SLACK, SecretIndex, SecretTensor
from tests.tensor.secrets import noise, opened, plain_session, secret

S = plain_session()
UNIT = 2.0**-S.frac

LOCAL: dict[str, Callable[..., object]] = {
    "add": lambda x, y: x + y,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=2),
    "add_scalar": lambda x, y: 1.5 + x + 2,
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: 1 - x,
    "neg": lambda x, y: -x,
    "power_of_two": lambda x, y: x * 0.125 + y / 4,
    "integer": lambda x, y: 3 * x - y * 5,
    "view": lambda x, y: x.view(4, 6),
    "view_of_transposed": lambda x, y: x.transpose(0, 2).contiguous().view(-1, 2),
    "reshape": lambda x, y: x.reshape(-1, 2),
    "permute": lambda x, y: x.permute(2, 0, 1),
    "transpose": lambda x, y: x.transpose(-1, -2),
    "T": lambda x, y: x[0].T,
    "mT": lambda x, y: x.mT,
    "unsqueeze": lambda x, y: x.unsqueeze(1).squeeze(1),
    "flatten": lambda x, y: x.flatten(1, 2),
    "unflatten": lambda x, y: x.unflatten(2, (2, -1)),
    "expand": lambda x, y: x[:, :1].expand(-1, 5, -1),
    "expand_as": lambda x, y: x[:, :1].expand_as(y),
    "broadcast_to": lambda x, y: torch.broadcast_to(x[:1], (2, 3, 4)),
    "repeat": lambda x, y: x.repeat(2, 1, 1),
    "repeat_interleave": lambda x, y: x.repeat_interleave(2, dim=1),
    "chunk": lambda x, y: x.chunk(2, dim=-1)[1],
    "split": lambda x, y: x.split([1, 2], dim=1)[1],
    "unbind": lambda x, y: x.unbind(1)[2],
    "iterate": lambda x, y: next(iter(x)),
    "cat": lambda x, y: torch.cat([x, y], dim=1),
    "cat_empty": lambda x, y: torch.cat([torch.tensor([]), x], dim=1),
    "cat_plain": lambda x, y: torch.cat([x, torch.full((2, 1, 4), 0.5)], dim=1),
    "stack": lambda x, y: torch.stack([x, y], dim=1),
    "slices": lambda x, y: x[..., 1:3][:, -1],
    "index_list": lambda x, y: x[:, :, [-2]],
    "index_tensor": lambda x, y: x[torch.tensor([1, 0, 1])],
    "index_mask": lambda x, y: x[torch.tensor([True, False])],
    "index_pairs": lambda x, y: x[torch.arange(2), torch.tensor([2, 0])],
    "index_select": lambda x, y: x.index_select(1, torch.tensor([2, 2])),
    "gather": lambda x, y: x.gather(2, torch.zeros(2, 3, 1, dtype=torch.long)),
    "pad": lambda x, y: F.pad(x, (1, 0, 0, 2)),
    "tril": lambda x, y: x.tril(),
    "flip": lambda x, y: x.flip(0),
    "sum": lambda x, y: x.sum(-1, keepdim=True) + y.sum(dim=(0, 1)),
    "sum_all": lambda x, y: x.sum(),
    "mean_of_four": lambda x, y: x.mean(-1),
    "where": lambda x, y: torch.where(torch.arange(4) < 2, x, y),
    "where_zero": lambda x, y: torch.where(torch.arange(4) < 2, x, 0.0),
    "masked_fill": lambda x, y: x.masked_fill(torch.arange(4) < 2, 2.0),
    "times_mask": lambda x, y: x * (torch.arange(4) < 2),
    "casts": lambda x, y: x.float().to(torch.float32).type_as(y).contiguous().type(x.dtype),
    "clone": lambda x, y: x.clone().detach().data,
    "dropout": lambda x, y: F.dropout(x, 0.3, training=False),
    "embedding_by_public_ids": lambda x, y: F.embedding(torch.tensor([[1, 0]]), x[0]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOCAL)
def test_local_rules_are_exact_and_send_nothing(name: str) -> None:
    x, y = noise(2, 3, 4, seed=1), noise(2, 3, 4, seed=2)
    session = plain_session()
    got = LOCAL[name](secret(session, x), secret(session, y))
    want = LOCAL[name](x, y)
    assert isinstance(got, SecretTensor)
    assert tuple(got.shape) == tuple(want.shape)
    assert torch.equal(opened(got), want.double())
    assert session.protocol.ledger.cost().total == 0


# Products of values below 4 in magnitude: one unit from each truncation, and public factors are held with 16 bits
# (relative error 2^-16 for scalars, absolute 2^-17 per factor of a tensor).
PRODUCTS: dict[str, tuple[Callable[..., object], float]] = {
    "mul": (lambda x, y: x * y, 2 * UNIT),
    "mul_broadcast": (lambda x, y: x[:, :1] * y, 2 * UNIT),
    "square": (lambda x, y: x.pow(2) + torch.square(y), 4 * UNIT),
    "cube": (lambda x, y: x**3, 8 * UNIT),
    "matmul": (lambda x, y: x @ y.transpose(-1, -2), 2 * UNIT),
    "bmm": (lambda x, y: torch.bmm(x, y.mT), 2 * UNIT),
    "scalar": (lambda x, y: x * 0.3, 4 * 2**-16 * 0.3 + UNIT),
    "division": (lambda x, y: x / 3, 4 * 2**-16 / 3 + UNIT),
    "mean_of_three": (lambda x, y: x.mean(1), 4 * 2**-16 / 3 + UNIT),
    "table": (lambda x, y: x * torch.linspace(-1, 1, 4) + y * torch.linspace(0, 1, 4), 8 * 2**-17 + UNIT),
    "linear": (lambda x, y: F.linear(x, y[0], x[0, :, 0]), 2 * UNIT),
    "addmm": (lambda x, y: torch.addmm(x[0, 0, :3], x[0], y[0].T, alpha=0.5), 2 * UNIT),
    "rope": (
        lambda x, y: torch.cat((-x[..., 2:], x[..., :2]), -1) * torch.linspace(0, 1, 4) + x * torch.linspace(1, 0, 4),
        8 * 2**-17 + UNIT,
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_right_up_to_their_truncation(name: str) -> None:
    make, bound = PRODUCTS[name]
    x, y = noise(2, 3, 4, seed=1).clamp(-4, 4), noise(2, 3, 4, seed=2).clamp(-4, 4)
    got = make(secret(S, x), secret(S, y))
    assert isinstance(got, SecretTensor)
    assert (opened(got.to_fixed()) - make(x, y)).abs().max() <= bound


def test_a_public_alibi_takes_a_secret_product() -> None:
    """Bloom calls baddbmm on a public self with keyword operands."""
    alibi, q, k = noise(2, 1, 3), noise(2, 3, 4, seed=1), noise(2, 4, 3, seed=2)
    got = alibi.float().baddbmm(batch1=secret(S, q), batch2=secret(S, k), beta=1.0, alpha=0.5)
    assert (opened(got) - (alibi + 0.5 * q @ k)).abs().max() <= 2 * UNIT


def test_public_weights_multiply_locally_and_are_encoded_once() -> None:
    x, weight, bias = noise(2, 3, 4), noise(5, 4, seed=1), noise(5, seed=2)
    parameter = torch.nn.Parameter(weight.float(), requires_grad=False)
    for product in (
        lambda: F.linear(secret(S, x), parameter, bias),
        lambda: secret(S, x) @ parameter.T + bias,
    ):
        assert (opened(product()) - F.linear(x, weight, bias)).abs().max() <= 2 * UNIT
    assert len(parameter.__dict__["_private_ring"]) == 1
    left = parameter @ secret(S, x.mT)
    assert (opened(left) - weight @ x.mT).abs().max() <= 2 * UNIT


@pytest.mark.parametrize("public", [False, True])
def test_lookup_by_one_hot_rows_is_exact(public: bool) -> None:
    table = noise(9, 4)
    ids = torch.tensor([[3, 0, 8]])
    rows = secret(S, F.one_hot(ids, 9).double(), frac=0)
    weight = torch.nn.Parameter(table.float()) if public else secret(S, table)
    assert torch.equal(opened(F.embedding(rows, weight)), table[ids])
    with pytest.raises(UnsupportedOp, match="one-hot"):
        F.embedding(secret(S, table), weight)


def test_public_factors_truncate_late_and_once() -> None:
    x = secret(S, noise(3, 4))
    assert (x * 0.25).value(masked=True).frac == S.frac + 2  # a power of two is free, exact and accepted by products
    scaled = x * 0.3
    assert scaled.value(masked=True).frac > S.frac + SLACK
    settled = scaled.to_fixed()
    assert settled.frac == S.frac
    assert scaled.to_fixed() is settled  # remembered
    assert (scaled + x).value(masked=True).frac == S.frac


def test_small_rings_truncate_public_tensors_at_once() -> None:
    small = plain_session(ring=32, frac_bits=10)
    x = noise(3, 4).clamp(-2, 2)
    got = secret(small, x) * torch.linspace(0, 1, 4)
    assert got.value(masked=True).frac == 10
    assert (opened(got) - x * torch.linspace(0, 1, 4)).abs().max() <= 3 * 2.0**-10


def test_a_public_tensor_that_changes_is_encoded_anew() -> None:
    table, x = torch.ones(4), secret(S, torch.ones(4))
    assert torch.equal(opened(x * table), torch.ones(4).double())
    table.mul_(3.0)
    assert torch.equal(opened(x * table), torch.full((4,), 3.0).double())


def test_an_additive_mask_hides_instead_of_overflowing() -> None:
    x = noise(1, 1, 2, 3)
    mask = torch.zeros(1, 1, 2, 3).masked_fill(torch.tensor([[False, True, True], [False, False, True]]), -3.4e38)
    out = secret(S, x) + (mask + 0.5)
    assert torch.equal(out.hidden, mask < -1)
    shown = opened(out)
    assert torch.equal(shown[mask == 0], (x + 0.5)[mask == 0])
    for other in (
        torch.where(mask < -1, -float("inf"), secret(S, x)),
        secret(S, x).masked_fill(mask < -1, torch.finfo(torch.float32).min),
    ):
        assert torch.equal(other.hidden, mask < -1)
        second = torch.eye(2, 3, dtype=torch.bool)[None, None]
        for both in (other.masked_fill(second, -float("inf")), torch.where(second, -float("inf"), other)):
            assert torch.equal(both.hidden, second | (mask < -1))


def test_what_has_no_meaning_is_refused() -> None:
    x = secret(S, torch.ones(2, 2))
    for attempt in (
        lambda: 1 / x,
        lambda: x**0.5,
        lambda: x / x,
        lambda: x.view(torch.int32),
        lambda: x.to(torch.int64),
    ):
        with pytest.raises(UnsupportedOp):
            attempt()


def test_every_rule_runs_on_meta_shares() -> None:
    def meta(values: Tensor) -> SecretTensor:
        return SecretTensor(secret(S, values).value(masked=True).view(lambda part: part.to("meta")))

    for make in [*LOCAL.values(), *(make for make, _ in PRODUCTS.values())]:
        x, y = noise(2, 3, 4), noise(2, 3, 4, seed=1)
        got = make(meta(x), meta(y))
        assert isinstance(got, SecretTensor)
        assert tuple(got.shape) == tuple(make(x, y).shape)
        assert got.value(masked=True).share.parts[0].is_meta
        assert got.device.type == "cpu"


@pytest.mark.parametrize("public", [False, True])
def test_lookup_by_secret_index_is_exact_and_the_only_use_of_one(public: bool) -> None:
    table, ids = noise(9, 4), torch.tensor([[3, 0, 8]])
    tokens = SecretIndex(S, Index((ids.view(-1),), 3, 9), (1, 3))
    weight = torch.nn.Parameter(table.float()) if public else secret(S, table)
    assert torch.equal(opened(torch.nn.Embedding(9, 4, _weight=weight)(tokens)), table[ids])
    assert (tuple(tokens.shape), tokens.dtype, tokens.size(1)) == ((1, 3), torch.int64, 3)
    assert repr(tokens).startswith("SecretIndex(shape=(1, 3), domain=9")
    for attempt in (
        lambda: tokens + 1,
        lambda: tokens == 3,
        lambda: tokens[0],
        lambda: tokens.view(3),
        lambda: tokens.item(),
    ):
        with pytest.raises(UnsupportedOp, match="looked up"):
            attempt()
    with pytest.raises(PlaintextLeak):
        pickle.dumps(tokens)
    for rows in (5, 12):
        with pytest.raises(UnsupportedOp, match=f"table of {rows} rows"):
            F.embedding(tokens, secret(S, noise(rows, 4)))
    with pytest.raises(DomainError, match="want 4"):
        SecretIndex(S, Index((ids.view(-1),), 3, 9), (1, 4))
