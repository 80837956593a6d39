"""Products with public weights: exact kernels, scales that never leave the modulus, masks, the client's check."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from private_llm.assisted import fixed_point, masks
from private_llm.assisted.fixed_point import (
    BYTES,
    LINES,
    MOST_INPUTS,
    IntegerWeight,
    centred,
    element_bytes,
    lines_digest,
)
from private_llm.assisted.projection import Projection
from private_llm.errors import DomainError
from private_llm.kernels import ops
from private_llm.ring.prg import Seed

EXTREMES = torch.tensor([-(2**63), 2**63 - 1, -1, 0, 1, 2**31, 2**31 - 1, -(2**31), -(2**31) - 1, 2**32, 2**40 - 1])


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """By the kernel, from elements and from their bytes, as whole numbers from -2^39 (-2^31) to 2^39 - 1 (2^31 - 1)."""
    made, size = ops.narrow_matmul(x, weight, len(x)), element_bytes(weight)
    assert torch.equal(made, ops.narrow_matmul(ops.packed(x, size), weight, len(x)))
    return centred(ops.unpacked(made, (len(x), len(weight)), size), size)


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x weight^T modulo 2^40 or 2^32, in Python's integers."""
    half = 1 << (8 * element_bytes(weight) - 1)
    rows = [[sum(a * b for a, b in zip(row, line, strict=True)) for line in weight.tolist()] for row in x.tolist()]
    return torch.tensor([[(n + half) % (2 * half) - half for n in row] for row in rows], dtype=torch.int64)


BITS = pytest.mark.parametrize("bits", [16, 8])


@BITS
@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(1, 1, 1), (2, 700, 3), (3, 5, 17), (4, 11, 16), (6, 37, 33), (9, 64, 50), (1, 0, 4)]
)
def test_narrow_products_are_exact(rows: int, inner: int, columns: int, bits: int) -> None:
    torch.manual_seed(rows)
    x = torch.randint(-(2**63), 2**63 - 1, (rows, inner))
    x.view(-1)[: len(EXTREMES)] = EXTREMES[: x.numel()]
    least = -(1 << (bits - 1))
    weight = torch.randint(least, -least, (columns, inner), dtype=LINES[bits])
    weight[0], weight[-1] = least, -least - 1
    assert torch.equal(product(x, weight), exact(x, weight))


@BITS
def test_digits_that_are_all_extreme_stay_exact(bits: int) -> None:
    """The largest sums of the lowest digits: every element -2^7 modulo 2^8 (8 bits: -2^15), every weight the least.

    9000 inputs are no multiple of what makes overflows of 2^32 add up to one of 2^40, which nobody would see.
    """
    x = torch.full((2, 9000), 2**7 if bits == 16 else 2**15)
    x[1] = -(2**7 + 2**23 + 2**39 if bits == 16 else 2**15 + 2**31)
    weight = torch.full((3, 9000), -(1 << (bits - 1)), dtype=LINES[bits])
    assert torch.equal(product(x, weight), exact(x, weight))


def test_narrow_products_refuse_other_operands() -> None:
    weight = torch.zeros(2, 3, dtype=torch.int16)
    for x in (
        torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int32),
        torch.zeros(20, dtype=torch.uint8), torch.zeros(14, dtype=torch.uint8),
    ):  # fmt: skip
        with pytest.raises(DomainError, match="want int64"):
            ops.narrow_matmul(x, weight, 1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), spread=st.integers(-30, 30), outliers=st.integers(0, 4), inputs=st.integers(1, 90),
    bits=st.sampled_from([16, 8]),
)  # fmt: skip
def test_no_product_leaves_the_modulus(seed: int, spread: int, outliers: int, inputs: int, bits: int) -> None:
    """Rows that point along a line of the weight, and outliers, come nearest to the bound."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(7, inputs, generator=random)
    weight[0] *= 1e-6
    x = torch.cat([weight, weight.sign(), torch.randn(3, inputs, generator=random)]) * 2.0**spread
    x[:, :outliers] *= 1e5
    made = IntegerWeight.of(weight, bits=bits)
    got, products = through(made, x)
    assert int(products.abs().max()) < 2 ** (8 * made.size - 1)
    want = x.double() @ weight.double().mT
    reach = torch.linalg.vector_norm(x.double(), dim=1)[:, None] * torch.linalg.vector_norm(weight.double(), dim=1)
    error = (got.double() - want).abs()
    unit = 2e-4 if bits == 16 else 3e-2  # half of one of 2^-15 or 2^-7 for each weight, rows scaled by the bound
    assert bool((error <= reach * unit + 1e-37).all())


@BITS
@pytest.mark.parametrize("inputs", [14336, MOST_INPUTS])
def test_no_product_leaves_the_modulus_where_sums_of_squares_are_rounded(inputs: int, bits: int) -> None:
    """Small entries beside a large one add nothing to a sum of squares, one by one, and much to a product."""
    weight, x = torch.ones(2, inputs), torch.full((1, inputs), 1e-8)
    weight[:, 0], x[0, 0] = 0, 1
    made = IntegerWeight.of(weight, bits=bits)
    whole, _, _ = hidden(made, x, torch.zeros(1, inputs, dtype=torch.int64))
    assert int(ops.ring_matmul(whole, made.lines.long().mT).abs().max()) < 2 ** (8 * made.size - 1)


def test_an_entry_that_stands_out_coarsens_its_line_alone() -> None:
    weight = torch.randn(300, 40)
    exact = IntegerWeight.of(weight).factors
    weight[7, 3] = 1e4
    made = IntegerWeight.of(weight)
    assert bool((made.column_scales == 1).all())
    assert torch.equal(made.factors[:7], exact[:7])
    assert torch.equal(made.factors[8:], exact[8:])


def test_weights_in_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = torch.randn(70, 30), torch.randn(5, 30)
    whole = IntegerWeight.of(*parts)
    monkeypatch.setattr(fixed_point, "_AT_ONCE", 90)
    made = IntegerWeight.of(*parts)
    assert lines_digest(made.lines) == lines_digest(whole.lines)
    assert torch.equal(made.factors, whole.factors)
    assert torch.equal(made.columns, whole.columns)
    assert abs(made.norm / whole.norm - 1) < 1e-12


def hidden(weight: IntegerWeight, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`IntegerWeight.hidden`, and what it writes."""
    out = torch.empty(weight.size * x.numel(), dtype=torch.uint8)
    return *weight.hidden(x, mask, out), out


def through(weight: IntegerWeight, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The product as a client gets it from two right answers, and as whole numbers."""
    size, mask = weight.size, torch.randint(-(2**63), 2**63 - 1, x.shape)
    whole, scales, raw = hidden(weight, x, mask)
    assert torch.equal(centred(ops.unpacked(raw, x.shape, size), size), centred(whole - mask, size))
    parts = [ops.narrow_matmul(part, weight.lines, len(x)) for part in (mask, raw)]
    check = Projection(weight.lines, Seed.fresh())
    got, right = ops.open_rows((parts[0], parts[1]), whole, *check.checked, scales, weight.factors, size)
    assert bool(right.all())
    return got, ops.ring_matmul(whole, weight.lines.long().mT)


def test_zeros_and_extreme_values_keep_their_meaning() -> None:
    weight = torch.tensor([[0.0, 0.0], [3e38, 1.0], [1e-38, -1e-38]])
    made = IntegerWeight.of(weight)
    for x in (torch.zeros(1, 2), torch.tensor([[1e-30, 0.0]]), torch.tensor([[0.0, 3e38]])):
        got, _ = through(made, x)
        assert torch.isfinite(got[:, [0, 2]]).all()
        assert float(got[0, 0]) == 0
        assert torch.allclose(got[:, 2], x @ weight[2], rtol=1e-4)
    for bad in (float("nan"), float("inf"), -float("inf")):
        for place in range(30):
            x = torch.randn(2, 30)
            x[1, place] = bad
            _, scales, _ = hidden(IntegerWeight.of(torch.randn(3, 30)), x, torch.zeros(2, 30, dtype=torch.int64))
            assert scales[1] == 0 < scales[0]
        with pytest.raises(DomainError, match="finite"):
            IntegerWeight.of(torch.tensor([[bad]]))
    for rows, inputs in ((0, 3), (3, 0), (1, MOST_INPUTS + 1)):
        with pytest.raises(DomainError, match="want some, and at most"):
            IntegerWeight.of(torch.ones(rows, inputs))


def test_half_precision_weights_of_one_size_are_exact() -> None:
    weight = torch.linspace(0.5, 1, 40).bfloat16().view(4, 10)
    made = IntegerWeight.of(weight)
    assert torch.equal(made.lines.double() * made.factors[:, None], weight.double())


def test_eight_bits_reach_127_in_each_line_and_say_their_error() -> None:
    weight = torch.randn(40, 50)
    weight[:, 3] *= 100  # a wide column, which inputs take
    made = IntegerWeight.of(weight, bits=8)
    assert made.lines.dtype is torch.int8
    assert bool((made.lines.abs().amax(1) == 127).all())
    assert float(made.column_scales[3]) > 1
    rounded = made.lines * made.factors[:, None] * made.column_scales
    assert made.error == pytest.approx(float((rounded - weight).norm() / weight.double().norm()), rel=1e-6)
    assert 1e-3 < made.error < 2e-2
    assert IntegerWeight.of(torch.zeros(2, 3), bits=8).error == 0


@pytest.mark.parametrize("size", [5, 4])
def test_elements_travel_in_so_many_bytes(size: int) -> None:
    x = torch.cat([EXTREMES, torch.randint(-(2**63), 2**63 - 1, (9,))]).view(4, 5)
    raw = ops.packed(x, size)
    assert raw.shape == (4 * 5 * size,)
    assert torch.equal(centred(ops.unpacked(raw, (4, 5), size), size), centred(x, size))
    assert torch.equal(ops.unpacked(raw, (4, 5), size), x & (2 ** (8 * size) - 1))


def accepted(check: Projection, x: torch.Tensor, y: torch.Tensor, size: int = 5) -> bool:
    """Whether a client takes y, whole numbers of so many bytes, for the product of x."""
    zeros, scales = torch.zeros(size * y.numel(), dtype=torch.uint8), torch.ones(len(x), dtype=torch.float64)
    factors = torch.ones(y.shape[1], dtype=torch.float64)
    got, right = ops.open_rows((ops.packed(y, size), zeros), x, *check.checked, scales, factors, size)
    assert torch.equal(got, y.float())
    return bool(right.all())


@BITS
def test_the_check_passes_right_products_and_no_other(bits: int) -> None:
    torch.manual_seed(0)
    size, most = BYTES[bits], (1 << (bits - 1)) - 1
    lines = torch.randint(-most, most + 1, (50, 20), dtype=LINES[bits])
    check = Projection(lines, Seed.fresh())
    x = torch.randint(-(2**17), 2**17, (3, 20))
    right = product(x, lines)
    assert accepted(check, x, right, size)
    assert check.holds_modulo(x, right)
    half = 1 << (8 * size - 1)
    for error in (1, -1, 2**20, half // 2, half, -half, 2 * half - 1):
        for place in ((0, 0), (1, 49), (2, 17)):
            wrong = right.clone()
            wrong[place] += error
            assert not accepted(check, x, centred(wrong, size), size)
            if error % half:
                assert not check.holds_modulo(x, centred(wrong, size))
    outside = torch.full((1, 20), 2**26)  # a result that left the modulus is wrong, too
    lines = torch.full((50, 20), most, dtype=LINES[bits])
    check = Projection(lines, Seed.fresh())
    assert check.holds_modulo(outside, product(outside, lines))
    assert not accepted(check, outside, product(outside, lines), size)


def test_lines_of_the_check_have_25_bits_and_overlook_half_the_modulus_only_where_it_is_one() -> None:
    """A line overlooks 2^39 modulo 2^40 where the number that meets it is even; over the integers it does not."""
    lines, x = torch.ones(6, 4, dtype=torch.int16), torch.ones(1, 4, dtype=torch.int64)
    wrong = product(x, lines)
    wrong[0, 2] += 2**39
    even = 0
    for _ in range(200):
        check = Projection(lines, Seed.fresh())
        assert int(check.sums.min()) >= 0
        assert int(check.sums.max()) < 2**25
        assert not accepted(check, x, centred(wrong, 5))
        assert check.holds_modulo(x, centred(wrong, 5)) == (not (check.sums[:, 2] & 1).any())
        even += int((check.sums[:, 2] & 1 == 0).sum())
    assert 650 < even < 950  # binomial: 800 +- 20


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


def test_kernels_refuse_operands_of_other_sizes() -> None:
    weight, check = IntegerWeight.of(torch.ones(3, 5)), Projection(torch.ones(3, 5, dtype=torch.int16), Seed.fresh())
    mask = torch.zeros(2, 5, dtype=torch.int64)
    for x in (torch.ones(2, 4), torch.ones(2, 6), torch.ones(1, 5)):
        with pytest.raises(DomainError, match="hide_rows: got operands"):
            hidden(weight, x, mask)
    with pytest.raises(DomainError, match="hide_rows: got operands"):
        weight.hidden(torch.ones(2, 5), mask, torch.empty(2 * 5 * 5 - 1, dtype=torch.uint8))
    for x, hides in ((torch.ones(2, 5, dtype=torch.bfloat16), mask), (torch.ones(2, 5), mask.int())):
        with pytest.raises(DomainError, match="hide_rows: got operands"):
            hidden(weight, x, hides)
    whole, scales, _ = hidden(weight, torch.ones(2, 5), mask)
    part = torch.zeros(2 * 3 * 5, dtype=torch.uint8)
    for one, other in ((part[1:], part), (part, part[:-5]), (part.to(torch.int8), part)):
        with pytest.raises(DomainError, match="open_rows: got operands"):
            ops.open_rows((one, other), whole, *check.checked, scales, weight.factors, 5)
