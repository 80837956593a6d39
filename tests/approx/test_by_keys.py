"""Functions by comparison keys: stated errors over their domains, rounds, prices, and the choice between two ways."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_UP, localcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from private_llm.approx import lines as power_lines
from private_llm.approx import tables
from private_llm.approx.activations import FromTables, exp, gelu
from private_llm.approx.curves import LARGEST, LEADING, Curve
from private_llm.approx.lines import REACH, Lines, power_by_lines
from private_llm.approx.normalise import reciprocal
from private_llm.approx.norms import layer_norm, lines_of, rms_norm
from private_llm.approx.softmax import softmax, softmax_ragged
from private_llm.config import PrivateConfig
from private_llm.exact.comparisons import absolute, clamp, relu
from private_llm.exact.maximum import concatenated, maximum
from private_llm.exact.ragged_rows import Rows
from private_llm.protocols.session import Session
from private_llm.ranges import Ranges
from private_llm.tensor.fixed import Fixed
from tests.harness import TRIO, run_meta, run_parties

KEYS = PrivateConfig(adder="keys")
silu, softplus, sigmoid = map(FromTables, ("SILU", "SOFTPLUS", "LOGISTIC"))
WIDE = 2.0**20 - 2**10
CURVES = [
    tables.EXP.curve,
    tables.GELU_ERF.curve,
    tables.GELU_TANH.curve,
    tables.SILU.curve,
    tables.SOFTPLUS.curve,
    tables.LOGISTIC.curve,
]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def around(curve: Curve, low: float, high: float) -> Tensor:
    """The whole range, all thresholds, and what lies within a coarse comparison of them."""
    ends = torch.tensor(curve.ends, dtype=torch.float64)
    near = torch.cat([ends + step for step in (-(2.0**-18), 0.0, 2.0**-18, 2.0**-7, 2.0**-6 - 2.0**-18, 2.0**-6)])
    far = torch.tensor(
        [-WIDE, -1e4, -40.0] + ([] if curve is tables.EXP.curve else [40.0, 1e4, WIDE]), dtype=torch.float64
    )
    return torch.cat([torch.linspace(low, high, 2500, dtype=torch.float64), near[near <= high], far])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("frac", [16, 18, 19])
@pytest.mark.parametrize(
    ("fn", "truth", "curve", "error", "rounds"),
    [
        (exp, torch.exp, tables.EXP.curve, 5e-5, 2),
        (gelu, F.gelu, tables.GELU_ERF.curve, 1.8e-4, 2),
        (lambda x: gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh"), tables.GELU_TANH.curve, 1.8e-4, 2),
        (silu, F.silu, tables.SILU.curve, 5e-5, 2),
        (softplus, F.softplus, tables.SOFTPLUS.curve, 1e-4, 2),
        (sigmoid, torch.sigmoid, tables.LOGISTIC.curve, 5e-5, 2),
    ],
)  # fmt: skip
def test_curves(
    fn: Callable[[Fixed], Fixed], truth: Callable[[Tensor], Tensor], curve: Curve, error: float, rounds: int, frac: int
) -> None:
    x = around(curve, -16.0, 0.25 if curve is tables.EXP.curve else 16.0)
    x = (x * 2**frac).round() / 2**frac
    outcome = run_parties(KEYS, lambda _, a: fn(a), [x], [frac])
    assert float((outcome.value - truth(x)).abs().max()) <= error + 2.0**-frac
    assert outcome.cost.rounds == rounds
    assert outcome.cost == run_meta(KEYS, lambda _, a: fn(a), [x.shape], [frac])


def test_errors_of_exp_are_small_where_it_is() -> None:
    x = torch.linspace(-14, -8, 1000, dtype=torch.float64)
    made = run_parties(KEYS, lambda _, a: exp(a), [x]).value
    assert float((made - x.exp()).abs().max()) <= 1.5e-6


def test_more_fractional_bits_than_the_ring_has_room_for_go_the_other_way() -> None:
    ways = [run_meta(config, lambda _, a: silu(a), [(3,)], [21]) for config in (KEYS, TRIO)]
    assert ways[0] == ways[1]
    x = torch.linspace(-15, 0.25, 500, dtype=torch.float64)
    outcome = run_parties(KEYS, lambda _, a: exp(a), [x], [21])
    assert float((outcome.value - x.exp()).abs().max()) <= 6e-5
    assert outcome.cost.rounds == 2


@pytest.mark.parametrize("curve", CURVES)
def test_tables_are_in_order(curve: Curve) -> None:
    assert list(curve.ends) == sorted(curve.ends)
    assert len(curve.pieces) == len(curve.ends) - 1
    assert curve.error <= 4.1e-5
    assert all(abs(piece[0]) < 2.0**curve.size for piece in curve.pieces)
    assert LARGEST - curve.size - 2 * 19 >= LEADING


def test_exact_piecewise_linear_functions() -> None:
    x = torch.cat([normal(500) * 3, torch.tensor([0.0, 2.0**-18, -(2.0**-18), WIDE, -WIDE, 3.0, -2.0])])
    x = (x * 2**18).round() / 2**18
    ways: list[tuple[Callable[[Fixed], Fixed], Tensor]] = [
        (relu, x.relu()), (absolute, x.abs()), (lambda a: clamp(a, -2.0, 3.0), x.clamp(-2, 3)),
        (lambda a: clamp(a, None, 1.5), x.clamp(max=1.5)), (lambda a: clamp(a, -1.5), x.clamp(min=-1.5)),
    ]  # fmt: skip
    for fn, want in ways:
        outcome = run_parties(KEYS, lambda _, a, fn=fn: fn(a), [x])
        assert torch.equal(outcome.value, want)
        assert outcome.cost.rounds == 1


@pytest.mark.parametrize("config", [KEYS, TRIO])
def test_bounds_beyond_a_known_range(config: PrivateConfig) -> None:
    """Entries below 2 where calibration says 2^6, bounds of 1000: no difference wraps."""
    x = torch.tensor([0.0, 1.5, -1.5, 60.0, -60.0, 127.0, -127.0], dtype=torch.float64)
    bounds = ((None, 1000.0), (-1000.0, None), (-900.0, 1000.0), (-1.0, 100.0))

    def clamped(session: Session, a: Fixed) -> Fixed:
        session.numerics.ranges = Ranges({session.protocol.module: {"compare": 6}})
        return concatenated([clamp(a, *pair) for pair in bounds], -1)

    want = torch.cat([x.clamp(*pair) for pair in bounds])
    assert torch.equal(run_parties(config, clamped, [x]).value, want)


@pytest.mark.parametrize("coarse", [True, False])
def test_a_maximum_takes_a_round_a_level(coarse: bool) -> None:
    x = normal(7, 100) * 50
    outcome = run_parties(KEYS, lambda _, a: maximum(a, coarse), [x])
    off = x.amax(-1, keepdim=True) - outcome.value
    assert float(off.max()) <= (7 * 2.0**-6 if coarse else 2.0**-18)
    assert float(off.min()) >= -(2.0**-18)
    assert outcome.cost.rounds == 7


@pytest.mark.parametrize("scale", [0.1, 3.0, 100.0, 3000.0])
def test_softmax(scale: float) -> None:
    x = normal(12, 128) * scale
    outcome = run_parties(KEYS, lambda _, a: softmax(a), [x])
    assert float((outcome.value - x.softmax(-1)).abs().max()) <= 1.5e-4
    assert outcome.cost.rounds == 13  # 7 of the maximum, 2 each of exp, reciprocal and product
    assert run_meta(TRIO, lambda _, a: softmax(a), [x.shape]).rounds == 28


def test_ragged_softmax() -> None:
    lengths = torch.tensor([5, 1, 0, 17])
    x = normal(23) * 4
    outcome = run_parties(KEYS, lambda _, a: softmax_ragged(a, Rows.of(lengths)), [x])
    want = torch.cat([row.softmax(-1) for row in x.split(lengths.tolist())])
    assert float((outcome.value - want).abs().max()) <= 1e-4
    assert outcome.cost.rounds == 5 + 6


@pytest.mark.parametrize(("low", "high"), [(0.99, 1.3), (0.99, 166.0), (0.99, 1.3 * 2**16)])
def test_reciprocal(low: float, high: float) -> None:
    x = torch.logspace(torch.tensor(low).log2(), torch.tensor(high).log2(), 600, 2.0, dtype=torch.float64)
    x = (x.clamp(low, high) * 2**24).round() / 2**24
    outcome = run_parties(KEYS, lambda _, a: reciprocal(a, low, high), [x], [24])
    assert float((outcome.value * x - 1).abs().max()) <= 7e-5 + float(x.max()) * 2.0**-23
    assert outcome.cost.rounds == 2


@pytest.mark.parametrize("exponent", [-1.0, -0.5])
def test_lines_over_their_whole_reach_and_beyond(exponent: float) -> None:
    low, octaves = 2.0**-4, 12.0 if exponent == -1.0 else REACH
    lines = Lines(exponent, 20, low, low * 2**octaves, 26, 3.0)
    assert lines.fit
    x = low * torch.logspace(0.0, octaves, 900, 2.0, dtype=torch.float64)
    x = (x * 2**20).round() / 2**20
    outcome = run_parties(KEYS, lambda _, a: power_by_lines(a, lines), [x], [20])
    want = 3.0 * x**exponent
    assert bool(((outcome.value - want).abs() <= 7e-5 * want + 2.0**-25).all())
    beneath = torch.tensor([low / 2, low / 100, 0.0], dtype=torch.float64)
    small = run_parties(KEYS, lambda _, a: power_by_lines(a, lines), [beneath], [20]).value
    top = 3.0 * low**exponent
    assert bool(((small > top) & (small < 2.1 * top)).all())


@pytest.mark.parametrize(("low", "high", "frac"), [(1.0, 2.0**25, 20), (1.0, 2.0, 61)])
def test_what_does_not_fit_the_ring_is_known_before(low: float, high: float, frac: int) -> None:
    assert not Lines(-0.5, 18, low, high, frac).fit


@pytest.mark.parametrize("width", [16, 64, 768, 1000])
@pytest.mark.parametrize("size", [0.02, 1.0, 12.0])
def test_norms(width: int, size: float) -> None:
    x, weight, bias = normal(3, width) * size + size / 3, normal(width, seed=1) + 1, normal(width, seed=2)
    truth = F.layer_norm(x, (width,), weight, bias, 1e-5)
    outcome = run_parties(KEYS, lambda _, a, w, b: layer_norm(a, w, b, 1e-5, square=8), [x, weight, bias])
    assert float((outcome.value - truth).abs().max()) <= 2e-4 * float(truth.abs().max()) + 2.0**-18 / size
    assert outcome.cost.rounds == (9 if width >= 64 else 8), "deviations of short rows are local"
    truth = F.rms_norm(x, (width,), weight, 1e-6)
    outcome = run_parties(KEYS, lambda _, a, w: rms_norm(a, w, 1e-6, square=8), [x, weight])
    assert float((outcome.value - truth).abs().max()) <= 2e-4 * float(truth.abs().max()) + 2.0**-18 / size
    assert outcome.cost.rounds == 8


@pytest.mark.parametrize("width", [7, 32])
def test_layer_norms_of_rows_too_short_for_a_truncation(width: int) -> None:
    """Deviations then have room for all their bits, and nothing is dropped."""
    x = normal(3, width)
    outcome = run_parties(KEYS, lambda _, a: layer_norm(a, None, None, 1e-5, square=3), [x])
    assert float((outcome.value - F.layer_norm(x, (width,))).abs().max()) <= 2e-4
    assert outcome.cost.rounds == 6


@pytest.mark.parametrize("width", [768, 1024, 1100])
@pytest.mark.parametrize("square", [10, 11])
def test_small_rows_are_right_down_to_the_stated_size(width: int, square: int) -> None:
    """A mean square of 2^-13, where the range of the norm is as wide as lines are used for, or wider."""
    x = normal(2, width)
    x = x - x.mean(-1, keepdim=True)
    x = x / x.square().mean(-1, keepdim=True).sqrt() * 2.0**-6.49
    want = F.layer_norm(x, (width,), eps=1e-7)
    outcome = run_parties(KEYS, lambda _, a: layer_norm(a, None, None, 1e-7, square=square), [x])
    assert float((outcome.value - want).norm() / want.norm()) <= 3e-4


@pytest.mark.parametrize(("width", "eps", "square"), [(96, 1e3, 8), (4096, 90.0, 13)])
def test_norms_of_a_large_epsilon(width: int, eps: float, square: int) -> None:
    """An epsilon that leaves no range goes the other way; one beyond 2^16 in sum needs no fractional bits."""
    x = normal(2, width) * 2.0 ** (square / 2 - 2)
    outcome = run_parties(KEYS, lambda _, a: rms_norm(a, None, eps, square=square), [x])
    want = F.rms_norm(x, (width,), None, eps)
    assert float((outcome.value - want).abs().max()) <= 2e-4 * float(want.abs().max()) + 2.0**-16


def wrong_by_a_unit(fn: Callable[..., float], up: bool) -> Callable[..., float]:
    """As another machine's library may have it: not the nearest float, but the next."""
    return lambda *given: math.nextafter(fn(*given), math.inf if up else -math.inf)


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize(("low", "high"), [(2.0**-4, 2.0**20), (0.75, 0.75 * 2**24), (2.0**-3, 2.0**21)])
def test_sizes_of_lines_do_not_hang_on_a_logarithm(
    low: float, high: float, up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sizes() -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        for exponent in (-0.5, -1.0):
            lines = Lines(exponent, 20, low, high, 20, 1.0)
            found.append((lines.fit, lines.cells, lines.total, lines.shape))
        return found

    here = sizes()
    assert [each[1] for each in here] == [24 * 24, 24 * 33]
    power_lines._cells.cache_clear()
    monkeypatch.setattr(math, "log2", wrong_by_a_unit(math.log2, up))
    assert sizes() == here


def test_lines_do_not_hang_on_how_a_program_rounds_decimals() -> None:
    lines = Lines(-0.5, 20, 2.0**-4, 2.0**4, 20, 1.0)
    here = power_lines._pieces(lines)
    power_lines._pieces.cache_clear()
    with localcontext() as context:
        context.rounding = ROUND_UP
        assert power_lines._pieces(lines) == here


@pytest.mark.parametrize("own", [18, 24])
def test_what_slopes_without_room_cost(own: int) -> None:
    """The stated error of 1/x at every place of a long range, by the integers alone."""
    lines = Lines(-1.0, own, 0.99, 1.3 * 2**16, 40)
    made, generator = power_lines._pieces(lines), torch.Generator().manual_seed(1)
    slack = 1 << lines.shape.low
    for octave in torch.rand(2000, generator=generator, dtype=torch.float64).tolist():
        x = round(0.99 * (1.3 * 2**16 / 0.99) ** octave * 2**own)
        for late in (0, slack - 1):  # a coarse comparison may say "below" that far above
            held = sum(x + at - late < 0 for at in made.offsets)
            c0, c1 = (sum(step[i] for step in made.steps[0][len(made.offsets) - held :]) for i in (0, 1))
            value = (made.rest[0][0] + c0 + (made.rest[0][1] + c1) * x) / 2.0**lines.total
            real = x / 2.0**own
            assert abs(value * real - 1) <= 5.8e-5 + real**2 * 2.0 ** (own - lines.total) / 180


def test_norms_of_unknown_range_go_the_other_way() -> None:
    found = []

    def look(session: object, a: Fixed) -> Fixed:
        found.append((lines_of(a, 1e-5, 36), lines_of(a, 1e-5, 8) is not None, lines_of(a, 0.0, 8)))
        return layer_norm(a, None, None, 1e-5)

    x = normal(2, 96) * 100
    outcome = run_parties(KEYS, look, [x])
    assert float((outcome.value - F.layer_norm(x, (96,))).abs().max()) <= 3e-4
    assert found == [(None, True, None)] * 3


def test_other_settings_are_as_they_were() -> None:
    """Without keys, and in a 32-bit ring, nothing takes them, so their bytes and rounds are those of the circuits."""
    x = normal(3, 40)
    for config in (TRIO, PrivateConfig(adder="auto", bandwidth_mbit=10_000.0, latency_ms=0.0)):
        assert run_meta(config, lambda _, a: exp(a), [x.shape]).rounds == 5
    small = PrivateConfig(adder="keys", ring=32, frac_bits=12)
    assert run_parties(small, lambda _, a: relu(a), [x]).cost.rounds == 1


def test_a_slow_network_takes_keys_for_few_elements() -> None:
    far = PrivateConfig(adder="auto", bandwidth_mbit=1000.0, latency_ms=20.0)
    assert run_meta(far, lambda _, a: softmax(a), [(12, 128)]).rounds == 11
    assert run_meta(far, lambda _, a: softmax(a), [(12 * 512, 512)]).rounds > 40


def test_thresholds_of_a_key_are_counted_together() -> None:
    """SiLU of a step of 3 tokens, 1536 wide, takes keys at 20 ms: its 33 thresholds share most of their ways."""

    def widths(session: Session, x: Fixed) -> Fixed:
        session.numerics.ranges = Ranges({session.protocol.module: {"compare": 6}})
        return silu(x)

    far = PrivateConfig(adder="auto", bandwidth_mbit=1000.0, latency_ms=20.0)
    assert run_meta(far, widths, [(3, 1536)]).rounds == 2
    assert run_meta(far, widths, [(8, 1536)]).rounds > 2


def test_quad_takes_circuits_whatever_the_network_says() -> None:
    """Its bits come from Trio, whose choice by the stated network must not become its own."""
    x = normal(3, 9) * 3
    far = PrivateConfig(protocol="quad", adder="auto", bandwidth_mbit=1000.0, latency_ms=20.0)
    near = PrivateConfig(protocol="quad", adder="prefix")
    outcome = run_parties(far, lambda _, a: softmax(a), [x])
    assert float((outcome.value - x.softmax(-1)).abs().max()) <= 1e-4
    assert outcome.cost.rounds == run_parties(near, lambda _, a: softmax(a), [x]).cost.rounds
