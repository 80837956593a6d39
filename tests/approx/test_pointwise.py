"""Pointwise functions against float64 over their whole domain, under both protocols; cost against formulas."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from private_llm.approx import activations
from private_llm.approx.activations import exp
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, UnsupportedOp
from private_llm.exact import comparisons
from private_llm.net.ledger import Cost
from private_llm.nn.activations import ACTIVATIONS, Activation
from tests.approx.cases import CASES, FITTED, Case, samples, truth
from tests.harness import PLAIN, TRIO, run_meta, run_parties

ULP = 2.0**-18
BY_WAVES = {"gelu": 1.7e-4, "gelu_tanh": 1.7e-4, "silu": 2e-4}
"""What trio computes by waves, and how near it comes to its function."""
each = pytest.mark.parametrize("case", CASES, ids=repr)


@each
@pytest.mark.parametrize("config", [PLAIN, TRIO], ids=["plain", "trio"])
def test_error_is_below_the_stated_bound(case: Case, config: PrivateConfig) -> None:
    x = samples(case)
    value = run_parties(config, lambda _, a: case.run(a), [x]).value
    assert float((value - case.truth(x)).abs().max()) <= case.error


@pytest.mark.parametrize("config", [PLAIN, TRIO, PrivateConfig(adder="keys")], ids=["plain", "trio", "keys"])
@pytest.mark.parametrize("made", ACTIVATIONS, ids=lambda made: made.name)
def test_records_state_the_error_over_their_domain(made: Activation, config: PrivateConfig) -> None:
    """In each spelling, by products, waves or keys."""
    for settings in itertools.product(*made.settings.values()):
        named = dict(zip(made.settings, settings, strict=True))
        run, want = partial(made.compute, **named), truth(made, **named)
        x = samples(Case(made.name, run, want, made.error, made.domain, (), lambda n: Cost()))[::7]
        value = run_parties(config, lambda _, a, run=run: run(a, *made.example), [x]).value
        assert bool(((value - want(x)).abs() <= made.error + made.relative * want(x).abs()).all())


@pytest.mark.parametrize("made", ACTIVATIONS, ids=lambda made: made.name)
def test_records_state_the_price_and_the_rings(made: Activation) -> None:
    cost = run_meta(TRIO, lambda _, a: made.compute(a, *made.example), [(64_000,)])
    assert abs(cost.total / 64_000 - made.price[0]) <= 0.051
    assert cost.rounds == made.price[1]
    narrow = PrivateConfig(ring=32, frac_bits=12)
    with pytest.raises(DomainError, match="64-bit ring") if made.wide else nullcontext():
        run_meta(narrow, lambda _, a: made.compute(a, *made.example), [(3,)])


@each
def test_trio_agrees_with_plain(case: Case) -> None:
    """Away from coarse thresholds both take the same branches, and every truncation of trio is plain's or one more.

    But for what trio computes in another way, exp, GELU and SiLU: there they are as near as their errors say.
    """
    x = samples(case)
    plain, trio = (run_parties(config, lambda _, a: case.run(a), [x]).value for config in (PLAIN, TRIO))
    near = torch.zeros_like(x, dtype=torch.bool)
    for threshold in case.thresholds:
        near |= (x >= threshold) & (x < threshold + 2.0**-6)
    if case.name == "exp":  # another method, which clears what is below -15
        near |= x < -13.75
    if case.name not in BY_WAVES:
        assert float((trio - plain)[~near].abs().max()) <= case.noise * ULP
    assert float((trio - plain).abs().max()) <= 2 * case.error


@each
def test_price_is_the_sum_of_its_steps_and_meta_agrees(case: Case) -> None:
    n = 640
    run = run_parties(TRIO, lambda _, a: case.run(a), [torch.linspace(-9, 0.2, n)])
    assert run.cost == case.price(n)
    assert run_meta(TRIO, lambda _, a: case.run(a), [(n,)]) == run.cost
    assert run_meta(PLAIN, lambda _, a: case.run(a), [(n,)]) == Cost()


@pytest.mark.parametrize(
    ("name", "per_element", "rounds"),
    [("absolute", 57, 5), ("gelu_tanh", 152, 6), ("exp", 84, 5)],
)  # fmt: skip
def test_documented_prices(name: str, per_element: float, rounds: int) -> None:
    case = next(case for case in CASES if case.name == name)
    price = case.price(64_000)
    assert price.total / 64_000 <= per_element
    assert price.rounds == rounds


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "sigmoid", "softplus"])
@pytest.mark.parametrize("config", [PLAIN, TRIO], ids=["plain", "trio"])
def test_saturation_is_exact(name: str, config: PrivateConfig) -> None:
    case = next(case for case in CASES if case.name == name)
    top = max(case.thresholds) + 2.0**-6
    x = torch.tensor([top, -top, 17.25, -17.25, 300.0, -300.0, 2.0**18, -(2.0**18)], dtype=torch.float64)
    expected = torch.where(x > 0, x, 0.0) if "lu" in name else torch.where(x > 0, 1.0, 0.0)
    value = run_parties(config, lambda _, a: case.run(a), [x]).value
    if config is TRIO and name in BY_WAVES:
        assert float((value - case.truth(x)).abs().max()) <= BY_WAVES[name]
    else:
        assert torch.equal(value, expected)


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("name", list(BY_WAVES))
def test_waves_are_nearer_than_stated(name: str, protocol: str) -> None:
    case = next(case for case in CASES if case.name == name)
    x = samples(case)
    value = run_parties(PrivateConfig(protocol=protocol), lambda _, a: case.run(a), [x]).value
    off = value - case.truth(x)
    assert float(off.abs().max()) <= BY_WAVES[name]
    assert float(off.abs().mean()) <= BY_WAVES[name] / 2


@each
@pytest.mark.parametrize("frac", [14, 16, 20])
def test_other_fractional_bits(case: Case, frac: int) -> None:
    """The bound holds with the argument's own resolution added: slopes are at most 1.2, plus 4 units of output."""
    x = samples(case, frac)[::7]
    config = PrivateConfig(protocol="plain", insecure=True, frac_bits=frac)
    result = run_parties(config, lambda _, a: case.run(a), [x])
    assert float((result.value - case.truth(x)).abs().max()) <= case.error + 4 * 2.0**-frac


def test_the_ripple_adder_gives_the_same_functions() -> None:
    config = PrivateConfig(adder="ripple")
    for case in FITTED:
        x = samples(case)[::97]
        value = run_parties(config, lambda _, a, case=case: case.run(a), [x]).value
        assert float((value - case.truth(x)).abs().max()) <= case.error


def test_shapes_are_kept() -> None:
    x = torch.linspace(-3, 0.2, 42, dtype=torch.float64).reshape(2, 3, 7)
    for case in CASES:
        assert run_parties(TRIO, lambda _, a, case=case: case.run(a), [x]).value.shape == x.shape


def test_results_have_the_argument_s_fractional_bits() -> None:
    for case in CASES:
        if case.name == "exp":
            continue
        out = run_parties(PLAIN, lambda _, a, case=case: case.run(a).rescale(18), [torch.zeros(3)])
        meta = run_meta(PLAIN, lambda _, a, case=case: _assert_frac(case.run(a), 18), [(3,)])
        assert out.value.shape == (3,)
        assert meta == Cost()


def _assert_frac(x: object, frac: int) -> object:
    assert x.frac == frac  # type: ignore[attr-defined]
    return x


def test_exp_decays_far_below_its_error_bound() -> None:
    """Row sums of softmax add up many small terms: from -8 on error, and below -14 the value, are at most 4e-6."""
    x = torch.linspace(-8, -14, 4001, dtype=torch.float64)
    for config in (PLAIN, TRIO):
        assert float((run_parties(config, lambda _, a: exp(a), [x]).value - x.exp()).abs().max()) <= 4e-6
        far = run_parties(config, lambda _, a: exp(a), [torch.tensor([-14.5, -100.0, -1e6])]).value
        assert float(far.abs().max()) <= 4e-6


def test_clamp_bounds() -> None:
    x = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    x = (x * 2**18).round() / 2**18
    for low, high in [(-1.5, None), (None, 2.25), (0.5, 0.5), (-1.0, 3.0)]:
        for config in (PLAIN, TRIO, PrivateConfig(ring=32, frac_bits=12)):
            y = (x * 2**12).round() / 2**12
            run = run_parties(config, lambda _, a, lo=low, hi=high: comparisons.clamp(a, lo, hi), [y])
            assert torch.equal(run.value, y.clamp(low, high))


def test_clamp_refuses_nonsense() -> None:
    with pytest.raises(DomainError, match="no bound"):
        run_meta(PLAIN, lambda _, a: comparisons.clamp(a), [(3,)])
    with pytest.raises(DomainError, match="above"):
        run_meta(PLAIN, lambda _, a: comparisons.clamp(a, 2.0, 1.0), [(3,)])


def test_gelu_refuses_another_spelling() -> None:
    with pytest.raises(UnsupportedOp, match="'none' or 'tanh'"):
        run_meta(PLAIN, lambda _, a: activations.gelu(a, "sigmoid"), [(3,)])


def test_narrow_ring_runs_what_fits_and_refuses_the_rest() -> None:
    config = PrivateConfig(ring=32, frac_bits=12)
    x = (torch.linspace(-400, 400, 999, dtype=torch.float64) * 2**12).round() / 2**12
    assert torch.equal(run_parties(config, lambda _, a: comparisons.relu(a), [x]).value, x.relu())
    assert torch.equal(run_parties(config, lambda _, a: comparisons.absolute(a), [x]).value, x.abs())
    for case in FITTED:
        with pytest.raises(DomainError, match="64-bit ring"):
            run_meta(config, lambda _, a, case=case: case.run(a), [(3,)])


def test_a_debug_session_finds_no_product_out_of_range() -> None:
    config = PrivateConfig(protocol="plain", insecure=True, debug_ranges=True)
    for case in CASES:
        value = run_parties(config, lambda _, a, case=case: case.run(a), [samples(case)]).value
        assert bool(torch.isfinite(value).all())
