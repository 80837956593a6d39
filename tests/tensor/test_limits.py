"""Every operation holds up to the stated limits: products below 2^26 and compared values below 2^20 with 18 fractional
bits in a 64-bit ring, products below 2^(30 - 2 f) with f bits in a 32-bit ring. Debug sessions refuse what wraps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import private_llm.nn  # noqa: F401 - registers the rules
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from tests.harness import run_meta, run_parties
from tests.tensor.secrets import opened, plain_session, secret

RINGS = [(64, 18), (32, 10), (32, 8)]
PARTS = {64: 2.0**-13, 32: 2.0**-7}
"""Largest relative error: 1 / count is off by 2^-14, in a small ring of 8 bits by 2^-8; then units of the last bit."""


@dataclass(frozen=True)
class Case:
    """`run` on a secret of `shape` whose entries are `share` of the limit of a product; `part`: the error allowed."""

    name: str
    run: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]
    share: float = 0.99
    rings: tuple[int, ...] = (64, 32)
    part: float | None = None

    def __str__(self) -> str:
        return self.name


def _settled(x: Tensor) -> Tensor:
    """Truncated, as the next product would."""
    return SecretTensor(x.to_fixed()) if isinstance(x, SecretTensor) else x


def _rows(count: int) -> Tensor:
    return torch.full((count,), 0.7, dtype=torch.float64)


POOLS = [
    Case(f"adaptive {size} of {shape}", lambda x, size=size: F.adaptive_avg_pool2d(x, size), (1, 1, *shape))
    for shape, size in [
        ((224, 224), 1), ((112, 112), 1), ((7, 7), 1), ((225, 225), 3), ((15, 17), 4), ((3, 700), 1), ((3, 5), 2),
    ]
]  # fmt: skip
WINDOWS = [
    Case(f"average {how}", lambda x, how=how: F.conv2d(F.avg_pool2d(x, **how), torch.ones(1, 1, 1, 1)), (1, 1, 18, 18))
    for how in [
        {"kernel_size": 2}, {"kernel_size": 3, "stride": 1, "padding": 1}, {"kernel_size": 8}, {"kernel_size": 15},
        {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False},
        {"kernel_size": 5, "ceil_mode": True},
    ]
]  # fmt: skip
MEANS = [Case(f"mean of {n}", lambda x: x.mean(-1), (2, n)) for n in (3, 5, 64, 100, 1000, 4096, 50176, 300_000)]
OTHERS = [
    Case("mean of two dimensions", lambda x: x.mean((0, 2), keepdim=True), (3, 2, 100)),
    Case("square of a mean", lambda x: x.mean(-1) ** 2, (2, 64), 2.0**-13.01, rings=(64,)),
    Case("linear of a mean", lambda x: F.linear(x.mean(-1), torch.ones(3, 4)), (2, 4, 64), 0.24),
    Case("mean of a scaled map", lambda x: (x * 0.7).mean(-1), (2, 1000), part=2.0**-6),
    Case("sum of a scaled map", lambda x: (x * 0.0013).sum(-1), (2, 512), rings=(64,)),
    Case("factor of a factor", lambda x: x * 1.015625 * 0.7, (4,), 0.95),
    Case("factor of a mean", lambda x: x.mean(-1) * _rows(2), (2, 64), part=2.0**-6),
    Case("power of two after a factor", lambda x: x * 0.0013 * 512, (4,), rings=(64,)),
    Case("sum of two scales", lambda x: x * 0.7 + x * 0.01, (4,), part=2.0**-6),
    Case("a small factor and a constant", lambda x: x * 1e-6 + 1e7, (4,), rings=(64,)),
    Case("a small factor and a tensor", lambda x: x * 1e-6 + _rows(4) * 1e7, (4,), rings=(64,)),
    Case("a tiny factor", lambda x: x * 1e-30 + 1.0, (4,)),
    Case("softmax", lambda x: torch.softmax(torch.cat([x, -x], -1), -1), (2, 3), 2.0**-6.01, rings=(64,)),
]
CASES = [*POOLS, *WINDOWS, *MEANS, *OTHERS]


def _limit(ring: int, frac: int) -> float:
    return 2.0 ** (ring - 2 - 2 * frac)


def _given(case: Case, ring: int, frac: int) -> Tensor:
    return torch.full(case.shape, math.floor(case.share * _limit(ring, frac)), dtype=torch.float64)


@pytest.mark.parametrize(
    ("case", "ring", "frac"), [(case, *size) for case in CASES for size in RINGS if size[0] in case.rings], ids=str
)
def test_nothing_wraps_within_the_limits(case: Case, ring: int, frac: int) -> None:
    x = _given(case, ring, frac)
    for values in (x, -x):
        with torch.no_grad():
            want = case.run(values.float() if "linear" in case.name or "average" in case.name else values).double()
        got = opened(_settled(case.run(secret(plain_session(ring=ring, frac_bits=frac, debug_ranges=True), values))))
        assert got.shape == want.shape
        bound = (case.part or PARTS[ring]) * float(want.abs().max()) + 2.0 ** (3 - frac)
        assert float((got - want).abs().max()) <= bound


@pytest.mark.parametrize(("ring", "frac"), RINGS)
def test_a_constant_that_the_ring_cannot_hold_is_refused(ring: int, frac: int) -> None:
    """A number as a tensor is, from a fourth of the ring on."""
    session, limit = plain_session(ring=ring, frac_bits=frac), 2.0 ** (ring - 2 - frac)
    x = secret(session, torch.zeros(2, dtype=torch.float64))
    for sign in (1, -1):
        assert torch.equal(opened(x + sign * limit / 2), torch.full((2,), sign * limit / 2).double())
        for constant in (sign * limit, torch.full((2,), sign * limit, dtype=torch.float64)):
            with pytest.raises(DomainError, match=r"does not fit the ring|exceeds the ring"):
                x.value() + constant
            with pytest.raises(DomainError, match=r"does not fit the ring|exceeds the ring"):
                x + constant


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ring", "frac"), [(64, 18), (32, 10)], ids=str)
def test_trio_holds_the_same_limits(ring: int, frac: int) -> None:
    cases = [case for case in CASES if ring in case.rings and math.prod(case.shape) < 60_000]
    config = PrivateConfig(ring=ring, frac_bits=frac)

    def program(_: object, *inputs: Fixed) -> list[Fixed]:
        return [case.run(SecretTensor(x)).to_fixed() for case, x in zip(cases, inputs, strict=True)]

    inputs = [_given(case, ring, frac) for case in cases]
    found = run_parties(config, program, inputs)
    for case, x, got in zip(cases, inputs, found.values, strict=True):
        session = plain_session(ring=ring, frac_bits=frac, debug_ranges=True)
        want = opened(_settled(case.run(secret(session, x))))
        assert float((got - want).abs().max()) <= 2.0**-14 * float(want.abs().max()) + 2.0 ** (4 - frac), case
    assert run_meta(config, program, [x.shape for x in inputs]) == found.cost


def test_the_maps_that_wrapped() -> None:
    """A map of 224 x 224 times 20000 came out as -12768; in the small ring 112 x 112 times 200 as -134.4."""
    for ring, frac, size, value in ((64, 18, 224, 20000.0), (32, 10, 112, 200.0)):
        x = torch.full((1, 1, size, size), value)
        got = opened(F.adaptive_avg_pool2d(secret(plain_session(ring=ring, frac_bits=frac), x), 1))
        assert abs(got.item() - value) <= PARTS[ring] * value


def test_means_of_few_entries_stay_local() -> None:
    """Sums of less than 16 entries, and of any power of two up to 2^18, pay nothing."""
    for count in (2, 3, 7, 15, 64, 4096):
        made = run_meta(PrivateConfig(), lambda _, x: SecretTensor(x).mean(-1).value(full=True), [(5, count)])
        assert made.total == 0


def test_a_mean_of_many_truncates_its_result_only() -> None:
    one = run_meta(PrivateConfig(), lambda _, x: x.rescale(18), [(5,)], [18 + 5])
    made = run_meta(PrivateConfig(), lambda _, x: SecretTensor(x).mean(-1).value(full=True), [(5, 49)])
    assert made == one, "the sum of 49 is divided by 32 = 2^5"
    small = PrivateConfig(ring=32, frac_bits=10)
    pooled = lambda _, x: F.adaptive_avg_pool2d(SecretTensor(x), 1).value(full=True)  # noqa: E731
    parts = run_meta(small, pooled, [(1, 1, 112, 112)])
    rows = run_meta(small, lambda _, x: x.rescale(10), [(112,)], [10 + 7])
    whole = run_meta(small, lambda _, x: x.rescale(10), [(1,)], [10 + 6])
    assert parts == rows + whole, "112 sums of a row divided by 2^7, their sum by 2^6: 112 * 112 / 2^7 = 98 > 2^6"


@pytest.mark.parametrize("size", [16, 64, 80, 96, 128])
@pytest.mark.parametrize("rotary", [False, True])
def test_scores_up_to_the_range_of_comparisons(size: int, rotary: bool) -> None:
    """Queries find the key that equals them, whatever the size of heads and the bits that a rotary embedding leaves."""
    generator = torch.Generator().manual_seed(size)
    count = 5
    angle = torch.rand(count, size, generator=generator, dtype=torch.float64)
    value = torch.randn(1, 2, count, size, generator=generator, dtype=torch.float64)

    def turned(x: Tensor) -> Tensor:
        half = torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)
        return x * angle.cos() + half * angle.sin() if rotary else x

    def attention(x: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(turned(x), turned(x), v)

    for score in (2.0**8, 2.0**12, 2.0**18.5):
        signs = torch.randn(1, 2, count, size, generator=generator, dtype=torch.float64).sign()
        x = (signs * math.sqrt(score * size**-0.5)).float().double()
        session = plain_session(debug_ranges=True)
        got = opened(attention(secret(session, x), secret(session, value)))
        assert float((got - attention(x, value)).abs().max()) < 1e-2
