"""Functions of MPCFormer, SecFormer and PUMA: against their formulas, breaks, extremes, rows, price, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rivals import formulas, secformer
from rivals.mpcformer import inverse, quad, two_quad, two_quad_ragged
from rivals.puma import puma_exp, puma_gelu
from rivals.secformer import fourier_gelu, goldschmidt
from torch import Tensor

from private_llm.approx.activations import gelu
from private_llm.approx.chain import Chain
from private_llm.approx.softmax import softmax, softmax_ragged
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError
from private_llm.exact.ragged_rows import Rows
from private_llm.protocols.session import Session
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.range_check import verdict
from private_llm.token_sharding import ShardingPlan
from tests.approx.tables import run_table
from tests.harness import PLAIN, TRIO, run_meta, run_parties
from tests.test_docstring_figures import docstring, states

QUAD = PrivateConfig(protocol="quad")
CONFIGS = [PLAIN, TRIO, QUAD]
under = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.protocol)
named = pytest.mark.parametrize("name", ["mpcformer", "secformer", "puma"])
STEP = 2.0**-6


@dataclass(frozen=True)
class Case:
    """error: from the formula, away from `breaks`; price: bytes an element and rounds under trio, as documented."""

    name: str
    run: Callable[[Fixed], Fixed]
    error: float
    breaks: tuple[float, ...]
    price: tuple[float, int]

    def __repr__(self) -> str:
        return self.name


GELUS = [
    Case("mpcformer", quad, 2 * 2.0**-18, (), (31.875, 2)),
    Case("secformer", fourier_gelu, 2e-4, (-secformer.END, secformer.END), (197.75, 12)),
    Case("puma", puma_gelu, 5e-5, formulas.PUMA_BREAKS, (282.125, 13)),
]
gelus = pytest.mark.parametrize("case", GELUS, ids=repr)


def chosen_as(config: PrivateConfig, name: str) -> PrivateConfig:
    return dataclasses.replace(config, approximations=name, plugins=("rivals",))


def grid() -> Tensor:
    x = torch.cat([torch.linspace(-9, 9, 8001, dtype=torch.float64), torch.linspace(-4.1, 3.1, 4001).double()])
    return (x * 2**18).round() / 2**18


@gelus
@under
def test_gelu_is_its_formula(case: Case, config: PrivateConfig) -> None:
    x = grid()
    value = run_parties(chosen_as(config, case.name), lambda _, a: gelu(a, "tanh"), [x]).value
    error = (value - formulas.gelu(case.name)(x)).abs()
    near = torch.zeros_like(x, dtype=torch.bool)
    for at in case.breaks:  # either side, up to 2^-6 above
        near |= (x >= at - 2.0**-17) & (x < at + STEP)
    assert float(error[~near].max()) <= case.error
    assert float(error.max()) <= 0.03


@pytest.mark.parametrize(("name", "bound"), [("secformer", 0.02), ("puma", 0.02)])
def test_the_formulas_are_gelu_where_they_say_so(name: str, bound: float) -> None:
    x = torch.linspace(-12, 12, 240_001, dtype=torch.float64)
    error = float((formulas.gelu(name)(x) - F.gelu(x)).abs().max())
    assert 0.8 * bound <= error <= bound


def test_quad_is_worst_where_gelu_is_flat() -> None:
    x = torch.tensor([-4.0, -1.0, 0.0, 2.0, 4.0], dtype=torch.float64)
    assert torch.equal(formulas.quad(x), torch.tensor([1.5, 0.375, 0.5, 1.5, 3.5], dtype=torch.float64))


@gelus
@under
def test_extremes(case: Case, config: PrivateConfig) -> None:
    """Beyond the middle the polynomials are garbage, and nothing of it comes through."""
    if case.name == "mpcformer":
        x = torch.tensor([4000.0, -4000.0, 0.0])
        value = run_parties(config, lambda _, a: case.run(a), [x]).value
        assert float((value - formulas.quad(x.double())).abs().max()) <= 2 * 2.0**-18
        return
    x = torch.tensor([1e6, -1e6, 3e5, -3e5, 77.25, -77.25, 4.5, -4.5, 2.0**15, -(2.0**15)], dtype=torch.float64)
    assert torch.equal(run_parties(config, lambda _, a: case.run(a), [x]).value, x.relu())


@gelus
def test_documented_prices_of_gelu(case: Case) -> None:
    price = run_meta(TRIO, lambda _, a: case.run(a), [(64_000,)])
    assert (price.total / 64_000, price.rounds) == case.price
    run = run_parties(TRIO, lambda _, a: case.run(a), [torch.linspace(-9, 9, 640)])
    assert run.cost == run_meta(TRIO, lambda _, a: case.run(a), [(640,)])


@pytest.mark.parametrize("frac", [14, 16, 20])
@gelus
def test_other_fractional_bits(case: Case, frac: int) -> None:
    x = (torch.linspace(-8, 8, 997, dtype=torch.float64) * 2**frac).round() / 2**frac
    config = dataclasses.replace(PLAIN, frac_bits=frac)
    value = run_parties(config, lambda _, a: case.run(a), [x]).value
    near = torch.zeros_like(x, dtype=torch.bool)
    for at in case.breaks:
        near |= (x >= at - 2.0**-13) & (x < at + STEP)
    assert float((value - formulas.gelu(case.name)(x))[~near].abs().max()) <= case.error + 8 * 2.0**-frac


def test_secformer_polynomial_is_the_series() -> None:
    """Its constants are those of least squares, and its products stay in the ring."""
    table: Chain = secformer.HALF_X_ERF
    z = torch.linspace(-1.21, 1.21, 100_001, dtype=torch.float64)
    *values, last = run_table(table, z)
    series = sum(w * torch.sin((k + 1) * torch.pi / 10 * (2 * z / 2**0.5)) for k, w in enumerate(formulas.FOURIER))
    assert float((last - z * series).abs().max()) <= 1.5e-4
    for step, value in zip(table.steps, [*values, last], strict=True):
        assert float(value.abs().max()) * 2.0 ** (step.left.frac + step.right.frac) <= 2.0**61
    end = secformer.END + STEP
    x = end * (1 + np.cos(np.pi * (np.arange(2000) + 0.5) / 2000)) / 2
    truth = x / 2 * sum(w * np.sin((k + 1) * np.pi / 10 * x / 2**0.5) for k, w in enumerate(formulas.FOURIER))
    v = (x / 2) ** 2
    fitted = np.linalg.lstsq(np.stack([v**k for k in (1, 2, 3, 4)], 1), truth, rcond=None)[0]
    root, b, c, d = secformer.FACTORS
    # (v^2 + root v)(b (v^2 + root v) + c v + d) by powers of v
    product = [root * d, d + root * (c + b * root), c + b * root + root * b, b]
    assert np.allclose(product, fitted, atol=1e-6)


@under
def test_puma_exponential(config: PrivateConfig) -> None:
    x = torch.cat([torch.linspace(-20, 0, 2001, dtype=torch.float64), torch.tensor([-1e6, -3e4])])
    value = run_parties(config, lambda _, a: puma_exp(a), [x]).value
    d = x.clamp_min(-14.0)
    assert float((value - (1 + d / 32) ** 32).abs().max()) <= 4e-6
    assert float((value - d.exp()).abs().max()) <= 0.0086
    price = run_meta(TRIO, lambda _, a: puma_exp(a), [(64_000,)])
    assert (price.total / 64_000, price.rounds) == (216.25, 14)


SOFTMAX_PRICES = {"mpcformer": (80.8203125, 12), "secformer": (75.2734375, 31), "puma": (318.994140625, 59)}


@named
@under
@pytest.mark.parametrize("shape", [(6, 128), (2, 3, 5, 7), (5, 1), (2, 200)])
def test_softmax_is_its_formula(name: str, config: PrivateConfig, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * (
        3 if shape[-1] > 1 else 1
    )
    value = run_parties(chosen_as(config, name), lambda _, a: softmax(a), [x]).value
    assert float((value - formulas.softmax(name)(x)).abs().max()) <= 1e-4
    assert float((value.sum(-1) - 1).abs().max()) <= 3e-5 + shape[-1] * 2.0**-18


@named
@under
def test_rows_of_different_lengths(name: str, config: PrivateConfig) -> None:
    rows = Rows((1, 3, 64, 65, 2, 128))
    x = torch.randn(rows.total, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    value = run_parties(chosen_as(config, name), lambda _, a: softmax_ragged(a, rows), [x]).value
    truth = torch.cat([formulas.softmax(name)(part) for part in x.split(list(rows.lengths))])
    assert float((value - truth).abs().max()) <= 1e-4


@named
def test_sinks(name: str) -> None:
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    config, sink = chosen_as(PLAIN, name), x[:, :1] / 2
    truth = formulas.softmax(name)(torch.cat([x, sink], -1))[:, :-1]
    whole = run_parties(config, lambda _, a, s: softmax(a, s), [x, sink]).value
    flat = [x.reshape(-1), sink.reshape(-1)]
    ragged = run_parties(config, lambda _, a, s: softmax_ragged(a, Rows((9,) * 4), s), flat).value
    assert float((whole - truth).abs().max()) <= 1e-4
    assert float((ragged.view(4, 9) - truth).abs().max()) <= 1e-4


@named
def test_documented_prices_of_softmax(name: str) -> None:
    config = chosen_as(TRIO, name)
    price = run_meta(config, lambda _, a: softmax(a), [(12, 128, 128)])
    assert (price.total / 12 / 128**2, price.rounds) == SOFTMAX_PRICES[name]
    run = run_parties(config, lambda _, a: softmax(a), [torch.ones(3, 64)])
    assert run.cost == run_meta(config, lambda _, a: softmax(a), [(3, 64)])


@pytest.mark.parametrize(("way", "price"), [(inverse, 1391.5), (goldschmidt, 800.375)], ids=["own", "goldschmidt"])
@under
def test_division(way: Callable[[Fixed], Fixed], price: float, config: PrivateConfig) -> None:
    mean = torch.cat([torch.linspace(0.2, 2, 500, dtype=torch.float64), torch.linspace(2, 254, 2000).double()])
    value = run_parties(config, lambda _, a: way(a), [mean]).value
    assert float((value * mean - 1).abs().max()) <= (3e-5 if way is inverse else 2e-4)
    if config is TRIO:
        assert abs(run_meta(TRIO, lambda _, a: way(a), [(6400,)]).total / 6400 - price) < 1


def test_long_rows() -> None:
    x = torch.randn(1, 5000, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    value = run_parties(TRIO, lambda _, a: two_quad(a), [x]).value
    assert float((value - formulas.two_quad(x)).abs().max()) <= 1e-5


def test_hidden_entries_count_as_zero() -> None:
    x = torch.tensor([[1.0, float("-inf"), 3.0]])
    assert torch.allclose(formulas.two_quad(x), torch.tensor([[0.36, 0.0, 0.64]]))
    assert float(formulas.puma_softmax(x)[0, 1]) == 0.0


@named
def test_refusals(name: str) -> None:
    with pytest.raises(ConfigError, match="32-bit ring"):
        PrivateConfig(ring=32, frac_bits=12, approximations=name, plugins=("rivals",))
    with pytest.raises(ConfigError, match="in the clear"):
        PrivateConfig(protocol="cascade", approximations=name, plugins=("rivals",))
    with pytest.raises(ConfigError, match="in the clear"):
        PrivateConfig(split=1, plan=ShardingPlan(8, 8, 2), weights="public", approximations=name, plugins=("rivals",))
    with pytest.raises(DomainError, match="rows of 0"):
        run_meta(chosen_as(TRIO, name), lambda _, a: softmax(a), [(3, 0)])
    assert PrivateConfig(approximations=name, plugins=("rivals",)).agreement() != PrivateConfig().agreement()


@pytest.mark.parametrize("name", ["mpcformer", "secformer"])
@pytest.mark.parametrize("ragged", [False, True])
@under
def test_rows_out_of_range_owe_an_alarm(name: str, ragged: bool, config: PrivateConfig) -> None:
    """Means of (x + 5)^2 of 729 and 0.01 leave the reciprocal's range; probabilities then do not sum to 1."""

    def told(session: Session, x: Fixed) -> Fixed:
        if ragged:
            softmax_ragged(x.view(lambda part: part.reshape(-1)), Rows((8,) * 4))
        else:
            softmax(x)
        found = verdict(session)
        assert found is not None
        return found

    usual = torch.randn(4, 8, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    for odd, wrong in ((0.0, 0.0), (22.0, 1.0), (-4.9, 1.0)):
        x = usual.clone()
        if wrong:
            x[2] = odd
        assert float(run_parties(chosen_as(config, name), told, [x]).value) == wrong


def test_rows_of_a_squared_softmax_are_told_apart() -> None:
    """2Quad of rows of different lengths, of three rows of a batch: a mean beyond its range is of one of them."""
    values = torch.randn(12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    values[6] = 300.0

    def check(session: Session, secret: Fixed) -> Fixed:
        session.checks.batch = 3
        two_quad_ragged(secret, Rows.of([2, 3, 4, 0, 1, 2], (2, 1, 2)))
        found = verdict(session)
        assert found is not None
        return found

    assert run_parties(PLAIN, check, [values]).value.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("function", [quad, puma_gelu, puma_exp, fourier_gelu, goldschmidt])
def test_docstrings_state_what_an_element_costs(function: Callable[[Fixed], Fixed]) -> None:
    cost = run_meta(TRIO, lambda _, x: function(x), [(64_000,)])
    assert states(docstring(function), cost.total / 64_000)
    assert states(docstring(function), cost.rounds)


def test_the_docstring_of_two_quad_states_what_an_entry_costs() -> None:
    cost = run_meta(TRIO, lambda _, x: two_quad(x), [(500, 128)])
    assert states(docstring(two_quad), cost.total / (500 * 128))
