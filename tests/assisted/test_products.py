"""Products with public weights: exact kernels, scales that never leave the modulus, masks, the client's check."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from private_llm.assisted import masks
from private_llm.assisted.fixed_point import BITS, IntegerWeight, centred, packed, unpacked
from private_llm.assisted.projection import LINES, Projection
from private_llm.errors import DomainError
from private_llm.kernels import ops
from private_llm.ring.prg import Seed

EXTREMES = torch.tensor([-(2**63), 2**63 - 1, -1, 0, 1, 2**31, 2**31 - 1, -(2**31), -(2**31) - 1, 2**32, 2**40 - 1])


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x weight^T modulo 2^64, in Python's integers."""
    rows = [[sum(a * b for a, b in zip(row, line, strict=True)) for line in weight.tolist()] for row in x.tolist()]
    return torch.tensor([[(n + 2**63) % 2**64 - 2**63 for n in row] for row in rows], dtype=torch.int64)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 1, 1), (3, 5, 17), (4, 11, 16), (6, 37, 33), (9, 64, 50)])
def test_narrow_products_are_exact(rows: int, inner: int, columns: int) -> None:
    torch.manual_seed(rows)
    x = torch.randint(-(2**63), 2**63 - 1, (rows, inner))
    x.view(-1)[: len(EXTREMES)] = EXTREMES[: x.numel()]
    weight = torch.randint(-32768, 32768, (columns, inner), dtype=torch.int16)
    weight[0], weight[-1] = -32768, 32767
    assert torch.equal(ops.narrow_matmul(x, weight), exact(x, weight))


def test_narrow_products_refuse_other_operands() -> None:
    weight = torch.zeros(2, 3, dtype=torch.int16)
    for x in (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int32)):
        with pytest.raises(DomainError, match="want int64"):
            ops.narrow_matmul(x, weight)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), spread=st.integers(-30, 30), outliers=st.integers(0, 4), inputs=st.integers(1, 90))
def test_no_product_leaves_the_modulus(seed: int, spread: int, outliers: int, inputs: int) -> None:
    """Rows that point along a line of the weight, and outliers, come nearest to the bound."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, inputs, generator=random)
    weight[0] *= 1e-6
    x = torch.cat([weight, weight.sign(), torch.randn(3, inputs, generator=random)]) * 2.0**spread
    x[:, :outliers] *= 1e5
    made = IntegerWeight.of(weight)
    whole, scale = made.scaled(x)
    products = ops.narrow_matmul(whole, made.lines)
    assert int(products.abs().max()) < 2 ** (BITS - 1)
    want = x.double() @ weight.double().mT
    reach = torch.linalg.vector_norm(x.double(), dim=1)[:, None] * torch.linalg.vector_norm(weight.double(), dim=1)
    error = (made.values(products, scale).double() - want).abs()
    assert bool((error <= reach * 2e-4 + 1e-37).all())  # half a unit of 2^-15 for each weight, rows scaled by the bound


def test_zeros_and_extreme_values_keep_their_meaning() -> None:
    weight = torch.tensor([[0.0, 0.0], [3e38, 1.0], [1e-38, -1e-38]])
    made = IntegerWeight.of(weight)
    for x in (torch.zeros(1, 2), torch.tensor([[1e-30, 0.0]]), torch.tensor([[0.0, 3e38]])):
        whole, scale = made.scaled(x)
        got = made.values(ops.narrow_matmul(whole, made.lines), scale)
        assert torch.isfinite(got[:, [0, 2]]).all()
        assert float(got[0, 0]) == 0
        assert torch.allclose(got[:, 2], x @ weight[2], rtol=1e-4)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(DomainError, match="finite"):
            made.scaled(torch.tensor([[bad, 0.0]]))
        with pytest.raises(DomainError, match="finite"):
            IntegerWeight.of(torch.tensor([[bad]]))


def test_half_precision_weights_of_one_size_are_exact() -> None:
    weight = torch.linspace(0.5, 1, 40).bfloat16().view(4, 10)
    made = IntegerWeight.of(weight)
    assert torch.equal(made.lines.double() * 2.0 ** -made.exponents[:, None].double(), weight.double())


def test_elements_travel_in_five_bytes() -> None:
    x = torch.cat([EXTREMES, torch.randint(-(2**63), 2**63 - 1, (9,))]).view(4, 5)
    raw = packed(x)
    assert raw.shape == (4 * 5 * 5,)
    assert torch.equal(centred(unpacked(raw, (4, 5))), centred(x))
    assert torch.equal(unpacked(raw, (4, 5)), x & (2**BITS - 1))


def test_the_check_passes_right_products_and_no_other() -> None:
    torch.manual_seed(0)
    lines = torch.randint(-32767, 32768, (50, 20), dtype=torch.int16)
    check = Projection(lines, Seed.fresh())
    x = torch.randint(-(2**20), 2**20, (3, 20))
    right = ops.narrow_matmul(x, lines)
    assert check.holds(x, right)
    for error in (1, -1, 2**20, 2**39, -(2**39), 2**40 - 1):
        for place in ((0, 0), (1, 49), (2, 17)):
            wrong = right.clone()
            wrong[place] += error
            assert not check.holds(x, wrong)
            if error % 2**40:
                assert not check.holds_modulo(x, centred(wrong))
    assert check.holds_modulo(x, centred(right + 2**40))
    assert not check.holds(x, right + 2**40)  # a result that left the modulus is wrong, too


def test_a_line_of_the_check_hides_half_of_all_errors_at_most() -> None:
    """With one random sum in place of 40 an error of half the modulus passes about every second time."""
    lines = torch.ones(6, 4, dtype=torch.int16)
    x = torch.ones(1, 4, dtype=torch.int64)
    wrong = ops.narrow_matmul(x, lines)
    wrong[0, 2] += 2**39
    hidden = torch.zeros(LINES)
    for _ in range(200):
        check = Projection(lines, Seed.fresh())
        sums = centred(check._sums(wrong) - ops.ring_matmul(x, check._folded.mT))[0]
        hidden += sums == 0
    assert 60 < float(hidden.mean()) < 140  # binomial: 100 +- 7 for one line


def test_the_check_shows_nothing_of_itself() -> None:
    check = Projection(torch.ones(2, 2, dtype=torch.int16), Seed.fresh())
    assert repr(check).startswith("<private_llm.assisted.projection.Projection object")


def test_masks_come_once() -> None:
    seed = Seed.fresh()
    labels = {masks.fresh_label() for _ in range(1000)}
    assert len(labels) == 1000
    first, second = masks.mask(seed, "a", 40, 50), masks.mask(seed, "b", 40, 50)
    assert torch.equal(first, masks.mask(seed, "a", 40, 50))
    assert int((first == second).sum()) == 0
    counts = torch.bincount((first & 0xFF).view(-1), minlength=256).double()
    assert float(((counts - 2000 / 256) ** 2 / (2000 / 256)).sum()) < 400  # chi-square, 255 degrees of freedom


def test_a_restored_generator_of_the_system_draws_other_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of a machine may bring back what the operating system's generator gives; the clock goes on."""
    monkeypatch.setattr("secrets.token_hex", lambda size: "00" * size)
    assert masks.fresh_label() != masks.fresh_label()


def test_a_fork_draws_no_masks() -> None:
    seed = Seed.fresh()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            masks.mask(seed, "a", 1, 1)
        except Exception as error:
            os.write(write, type(error).__name__.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"ProtocolAbort"
    os.close(read)
    os.close(write)
