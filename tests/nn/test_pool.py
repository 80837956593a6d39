"""Pools of secret images against PyTorch's: exact maxima, means within the rounding of 1/n, the same windows."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import private_llm.nn  # noqa: F401 - registers the rules
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, UnsupportedOp
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from tests.harness import run_meta, run_parties
from tests.tensor.secrets import noise, opened, plain_session, secret

S64, S32 = plain_session(), plain_session(ring=32, frac_bits=10)
SESSIONS = {"64": S64, "32": S32}
X = noise(2, 3, 9, 7)

MEAN_ERROR = {"64": 12 * 2.0**-17, "32": 12 * 2.0**-11 + 2.0**-10}
"""Sums of these windows stay below 12; 1/n is off by half a unit of 16 bits (10 in the small ring); one truncation."""

WINDOWS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": (1, 3)},
    {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    {"kernel_size": 3, "stride": 3, "padding": 1, "ceil_mode": True},
    {"kernel_size": (9, 7)},
    {"kernel_size": 1, "stride": 2},
]


@pytest.mark.parametrize("ring", SESSIONS)
@pytest.mark.parametrize("how", [*WINDOWS, {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2}], ids=str)
def test_max_pool_is_exact(how: dict[str, object], ring: str) -> None:
    for x in (X, -X.abs() - 3.0):  # padding stands for minus infinity, not for zero
        got = F.max_pool2d(secret(SESSIONS[ring], x), **how)
        assert isinstance(got, SecretTensor)
        assert torch.equal(opened(got), F.max_pool2d(x, **how))


@pytest.mark.parametrize("ring", SESSIONS)
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("how", WINDOWS, ids=str)
def test_avg_pool(how: dict[str, object], counted: bool, ring: str) -> None:
    got = F.avg_pool2d(secret(SESSIONS[ring], X), **how, count_include_pad=counted)
    want = F.avg_pool2d(X, **how, count_include_pad=counted)
    assert got.shape == want.shape
    assert (opened(got) - want).abs().max() <= MEAN_ERROR[ring]


@pytest.mark.parametrize("size", [1, 3, (2,)])
def test_adaptive_avg_pool_of_lines(size: int | tuple[int]) -> None:
    got, want = F.adaptive_avg_pool1d(secret(S64, X[0]), size), F.adaptive_avg_pool1d(X[0], size)
    assert (opened(got) - want).abs().max() <= MEAN_ERROR["64"]


@pytest.mark.parametrize("ring", SESSIONS)
@pytest.mark.parametrize("size", [1, (3, 7), (4, 3), (None, 2), (9, 7), (1, 1)], ids=str)
def test_adaptive_avg_pool(size: object, ring: str) -> None:
    got, want = F.adaptive_avg_pool2d(secret(SESSIONS[ring], X), size), F.adaptive_avg_pool2d(X, size)
    assert got.shape == want.shape
    assert (opened(got) - want).abs().max() <= MEAN_ERROR[ring]


def test_modules_and_images_without_a_batch() -> None:
    x = secret(S64, X[0])
    assert torch.equal(opened(nn.MaxPool2d(2)(x)), nn.MaxPool2d(2)(X[0]))
    assert torch.equal(opened(nn.AvgPool2d(2)(x)), nn.AvgPool2d(2)(X[0])), "a quarter is exact"
    assert nn.AdaptiveAvgPool2d((1, 1))(x).shape == (3, 1, 1)
    total = F.avg_pool2d(x, 2, divisor_override=1)
    assert torch.equal(opened(total), F.avg_pool2d(X[0], 2, divisor_override=1))


@pytest.mark.parametrize("ring", SESSIONS)
def test_relu6_and_hardtanh(ring: str) -> None:
    x = torch.arange(-40, 41, dtype=torch.float64) / 4
    value = secret(SESSIONS[ring], x)
    assert torch.equal(opened(nn.ReLU6()(value)), F.relu6(x))
    assert torch.equal(opened(F.hardtanh(value, -2.0, 1.5)), F.hardtanh(x, -2.0, 1.5))
    assert nn.ReLU6(inplace=True)(value) is value
    assert torch.equal(opened(value), F.relu6(x))


def test_windows_that_do_not_fit_are_refused() -> None:
    x = secret(S64, X)
    with pytest.raises(DomainError, match=r"windows of 10 do not fit into 7"):
        F.max_pool2d(x, 10)
    with pytest.raises(DomainError, match="want at most half of the window"):
        F.avg_pool2d(x, 2, padding=2)
    with pytest.raises(DomainError, match="a window of 2 lies outside the image"):
        F.max_pool2d(secret(S64, X[..., :1, :1]), 2, padding=1, stride=2, dilation=2)
    with pytest.raises(DomainError, match=r"got shape \(9, 7\)"):
        F.avg_pool2d(secret(S64, X[0, 0]), 2)
    with pytest.raises(UnsupportedOp, match="max_pool2d_with_indices"):
        F.max_pool2d(x, 2, return_indices=True)


def _both(_: object, x: Fixed) -> list[Fixed]:
    """Maxima and means of overlapping windows."""
    value = SecretTensor(x)
    return [F.max_pool2d(value, 3, 2, 1).to_fixed(), F.avg_pool2d(value, 2).value(full=True)]


@pytest.mark.parametrize("bits", [64, 32])
def test_trio_gives_the_same_for_the_stated_cost(bits: int) -> None:
    """Maxima cost 6 comparisons an output of a 3 x 3 window with stride 2; means of four cost nothing."""
    config = PrivateConfig(ring=bits, frac_bits=18 if bits == 64 else 10)
    x = noise(2, 3, 8, 8, seed=4)
    found = run_parties(config, _both, [x])
    assert torch.equal(found.values[0], F.max_pool2d(x, 3, 2, 1))
    assert torch.equal(found.values[1], F.avg_pool2d(x, 2))
    assert run_meta(config, _both, [x.shape]) == found.cost
    alone = run_meta(config, lambda _, v: F.max_pool2d(SecretTensor(v), 3, 2, 1).to_fixed(), [x.shape])
    assert alone == found.cost, "the mean of four is local"


def test_a_maximum_takes_as_few_comparisons_as_stated() -> None:
    """Along the width 2 per entry of half the columns, along the height 2 per output: counted by their bytes."""
    config = PrivateConfig()
    one = run_meta(config, lambda _, v: F.max_pool2d(SecretTensor(v), (1, 2)).to_fixed(), [(1, 1, 64, 128)])
    each = one.total / (64 * 64)
    pooled = run_meta(config, lambda _, v: F.max_pool2d(SecretTensor(v), 3, 2, 1).to_fixed(), [(1, 1, 64, 64)])
    comparisons = 2 * 64 * 32 + 2 * 32 * 32
    assert abs(pooled.total / each - comparisons) < 0.01 * comparisons
    assert pooled.rounds == 4 * one.rounds


def test_all_pools_agree_with_pytorch_on_small_sizes() -> None:
    for size, kernel, stride, padding, ceil in itertools.product(
        (3, 4, 5), (1, 2, 3), (1, 2, 3), (0, 1), (False, True)
    ):
        if 2 * padding > kernel:
            continue
        x = noise(1, 1, size, size, seed=size)
        how = {"stride": stride, "padding": padding, "ceil_mode": ceil}
        assert torch.equal(opened(F.max_pool2d(secret(S64, x), kernel, **how)), F.max_pool2d(x, kernel, **how))
        got = opened(F.avg_pool2d(secret(S64, x), kernel, **how))
        assert (got - F.avg_pool2d(x, kernel, **how)).abs().max() <= MEAN_ERROR["64"]
