"""Layer norm and RMS norm: ordinary rows, outliers, the ends of the range, weights of every kind, cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from private_llm.approx.norms import WIDEST, layer_norm, one_sum, rms_norm
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.net.ledger import Cost
from private_llm.tensor.fixed import Fixed
from tests.harness import PLAIN, TRIO, run_meta, run_parties

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ranges.md"
Norm = Callable[..., Fixed]
both = pytest.mark.parametrize("config", [PLAIN, TRIO], ids=["plain", "trio"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bound(truth: Tensor, gain: float = 1.0) -> float:
    """4e-5 of the result (cubic, weight and product) and 4 units of 2^-18 times the gain."""
    return 4e-5 * float(truth.abs().max()) + 4 * 2.0**-18 * max(1.0, gain)


@both
@pytest.mark.parametrize("shape", [(5, 768), (2, 3, 64), (4, 1000), (3, 2)])
def test_layer_norm(config: PrivateConfig, shape: tuple[int, ...]) -> None:
    width = shape[-1]
    x, weight, bias = normal(*shape) * 3 + 1.5, normal(width, seed=1) + 1, normal(width, seed=2)
    truth = F.layer_norm(x, (width,), weight, bias, 1e-5)
    value = run_parties(config, lambda _, a, w, b: layer_norm(a, w, b, 1e-5), [x, weight, bias]).value
    assert float((value - truth).abs().max()) <= bound(truth, float(weight.abs().max())) + 2.0**-17


@both
@pytest.mark.parametrize("shape", [(5, 768), (2, 3, 64)])
def test_rms_norm(config: PrivateConfig, shape: tuple[int, ...]) -> None:
    width = shape[-1]
    x, weight = normal(*shape) * 5, normal(width, seed=1) + 1
    truth = F.rms_norm(x, (width,), weight, 1e-6)
    value = run_parties(config, lambda _, a, w: rms_norm(a, w, 1e-6), [x, weight]).value
    assert float((value - truth).abs().max()) <= bound(truth, float(weight.abs().max()))


@both
def test_public_weights_and_none(config: PrivateConfig) -> None:
    x, weight, bias = normal(4, 96), normal(96, seed=1), normal(96, seed=2)
    public = run_parties(config, lambda _, a: layer_norm(a, weight, bias, 1e-5), [x]).value
    truth = F.layer_norm(x, (96,), weight, bias, 1e-5)
    assert float((public - truth).abs().max()) <= bound(truth) + 2.0**-17
    bare = run_parties(config, lambda _, a: rms_norm(a, None, 1e-5), [x]).value
    truth = F.rms_norm(x, (96,), None, 1e-5)
    assert float((bare - truth).abs().max()) <= bound(truth)


@both
@pytest.mark.parametrize("scale", [1e-3, 0.03, 40.0, 290.0])
def test_scales(config: PrivateConfig, scale: float) -> None:
    """From rows that eps dominates to the end of the range; tiny rows have the resolution of their own entries."""
    x = (normal(6, 768) * scale).clamp(-4000, 4000)
    x = x * scale / x.square().mean(-1, keepdim=True).sqrt()
    x = (x * 2**18).round() / 2**18
    truth = F.layer_norm(x, (768,), None, None, 1e-5)
    value = run_parties(config, lambda _, a: layer_norm(a, None, None, 1e-5), [x]).value
    assert float((value - truth).abs().max()) <= bound(truth) + 2.0**-17 / (scale**2 + 1e-5) ** 0.5


@both
def test_outliers(config: PrivateConfig) -> None:
    x = normal(3, 768)
    x[0, 7], x[1, 100], x[2, :2] = 8000.0, -8000.0, torch.tensor([5000.0, -5000.0])
    for run, truth in (
        (lambda _, a: layer_norm(a, None, None, 1e-5), F.layer_norm(x, (768,), None, None, 1e-5)),
        (lambda _, a: rms_norm(a, None, 1e-6), F.rms_norm(x, (768,), None, 1e-6)),
    ):
        value = run_parties(config, run, [x]).value
        assert float((value - truth).abs().max()) <= bound(truth) + 2.0**-24 * 8000


@both
def test_constant_rows(config: PrivateConfig) -> None:
    """No variance: what is left is the mean's error, 2^-20 relative and one unit, over sqrt(eps) = 1 / 316."""
    x = torch.stack([torch.zeros(48), torch.full((48,), 7.0), torch.full((48,), -300.0)]).double()
    value = run_parties(config, lambda _, a: layer_norm(a, None, None, 1e-5), [x]).value
    assert float(value.abs().max()) <= 300 * 2.0**-20 / 1e-5**0.5 + 2 * 2.0**-18 / 1e-5**0.5
    value = run_parties(config, lambda _, a: rms_norm(a, None, 1e-6), [x[:1]]).value
    assert torch.equal(value, torch.zeros_like(value))


@both
def test_sixteen_fractional_bits(config: PrivateConfig) -> None:
    settings = PrivateConfig.from_dict({**config.to_dict(), "frac_bits": 16})
    x = normal(4, 256) * 2
    truth = F.layer_norm(x, (256,), None, None, 1e-5)
    value = run_parties(settings, lambda _, a: layer_norm(a, None, None, 1e-5), [x]).value
    assert float((value - truth).abs().max()) <= 4e-5 * 4 + 6 * 2.0**-16


KNOWN = 13
"""What calibration tells of rows with a root mean square of up to 16: one sum of squares is enough."""


def rows_of_every_size(width: int) -> Tensor:
    """Mean squares from 2^-12 to almost 2^36, of either sign or one, and single entries as massive as 2^20."""
    rows = []
    for index, scale in enumerate((2.0**-6, 0.1, 1.0, 30.0, 300.0, 1000.0, 2.0**12, 2.0**15, 2.0**17.9)):
        row = normal(width, seed=index)
        row = row * scale / row.square().mean().sqrt()
        rows += [row, row.abs()]
    for spike in (24926.0, 2.0**20):
        row = normal(width, seed=int(spike))
        row[width // 2] = spike
        rows.append(row)
    return (torch.stack(rows).clamp(-(2.0**20), 2.0**20) * 2**18).round() / 2**18


@pytest.mark.parametrize("protocol", ["plain", "trio", "quad", "dealer"])
@pytest.mark.parametrize("width", [64, 576])
def test_rows_of_every_size_side_by_side(protocol: str, width: int) -> None:
    """Nothing is known of the rows, and each comes out with a relative error of 1e-4."""
    config, x = PrivateConfig(protocol=protocol, insecure=protocol == "plain"), rows_of_every_size(width)
    for run, truth in (
        (lambda _, a: rms_norm(a, None, 1e-5), F.rms_norm(x, (width,), None, 1e-5)),
        (lambda _, a: layer_norm(a, None, None, 1e-5), F.layer_norm(x, (width,), None, None, 1e-5)),
    ):
        value = run_parties(config, run, [x]).value
        assert float(((value - truth).norm(dim=-1) / truth.norm(dim=-1)).max()) <= 1e-4


def test_rows_beside_a_massive_one_keep_their_precision_when_their_range_is_known() -> None:
    """12 fractional bits are enough for rows near 30 beside one of 24,926: a norm then needs one sum, at any row."""
    x = normal(6, 576) * 8
    x[0, 3] = 24926.0
    x = (x * 2**12).round() / 2**12
    known = math.ceil(math.log2(float(x.square().mean(-1).max()))) + 5
    assert one_sum(12, 576, known)
    value = run_parties(TRIO, lambda _, a: rms_norm(a, None, 1e-5, square=known), [x], [12]).value
    truth = F.rms_norm(x, (576,), None, 1e-5)
    assert float(((value - truth).norm(dim=-1) / truth.norm(dim=-1)).max()) <= 1e-4


def weighed_rows(width: int, square: int, gain: int, frac: int) -> tuple[Tensor, Tensor]:
    """Rows from small to as large as the bound allows, flat and with one spike, and weights from tiny to the bound."""
    weight = normal(width, seed=1) * 2.0 ** (gain - 3)
    weight[0], weight[1], weight[2] = 2.0**gain, -(2.0**gain), 2.0 ** (gain - 8)
    rows = []
    for size in (2.0 ** (4 - frac / 2), 1.0, 2.0 ** (square / 2 - 3), 2.0 ** (square / 2 - 0.01)):
        row = normal(width, seed=int(size)) + 0.1
        rows.append(row * size / row.square().mean().sqrt())
    spike = torch.full((width,), 2.0**-5, dtype=torch.float64)
    spike[0] = 2.0 ** (square / 2 - 0.01) * math.sqrt(width)
    return ((torch.stack([*rows, spike]) * 2**frac).round() / 2**frac), weight.clamp(-(2.0**gain), 2.0**gain)


@pytest.mark.parametrize("adder", ["prefix", "keys"])
@pytest.mark.parametrize(
    ("width", "square", "gain", "frac"), [(96, 8, 0, 18), (768, 10, 3, 18), (7, 4, 1, 16), (576, 27, 0, 12)]
)
def test_weights_of_known_size_are_multiplied_beside_the_squares(
    width: int, square: int, gain: int, frac: int, adder: str
) -> None:
    """Two rounds less, with the same errors, and nothing leaves the ring where rows and weights are largest."""
    x, weight = weighed_rows(width, square, gain, frac)
    debug = PrivateConfig(protocol="plain", insecure=True, debug_ranges=True)
    for norm, truth in (
        (rms_norm, F.rms_norm(x, (width,), weight, 1e-5)),
        (_without_bias, F.layer_norm(x, (width,), weight, None, 1e-5)),
    ):
        rounds = []
        for config in (PrivateConfig(adder=adder), debug):
            for known in (None, gain):

                def run(_: object, a: Fixed, w: Fixed, norm: Norm = norm, known: int | None = known) -> Fixed:
                    return norm(a, w, 1e-5, square=square, gain=known)

                outcome = run_parties(config, run, [x, weight], [frac, 18])
                error = ((outcome.value - truth).norm(dim=-1) / truth.norm(dim=-1)).max()
                assert float(error) <= 1e-4 + 2.0 ** (-frac / 2 - 2), (config.protocol, known)
                rounds.append(outcome.cost.rounds)
        assert rounds[1] == rounds[0] - 2


@pytest.mark.parametrize("protocol", ["trio", "quad", "dealer"])
def test_weights_beside_the_squares_under_every_protocol(protocol: str) -> None:
    x, weight = normal(2, 3, 48) * 3, normal(48, seed=1)
    run = run_parties(PrivateConfig(protocol=protocol), _known_norm, [x, weight])
    truth = F.rms_norm(x, (48,), weight, 1e-5)
    assert float((run.value - truth).abs().max()) <= bound(truth)
    if protocol != "quad":  # whose shares have three parts
        assert run.cost == run_meta(PrivateConfig(protocol=protocol), _known_norm, [x.shape, weight.shape])


def _without_bias(x: Fixed, weight: Fixed, eps: float, square: int, gain: int | None) -> Fixed:
    return layer_norm(x, weight, None, eps, square=square, gain=gain)


def _known_norm(_: object, a: Fixed, w: Fixed) -> Fixed:
    return rms_norm(a, w, 1e-5, square=9, gain=2)


def test_weights_without_room_beside_the_squares_come_last() -> None:
    """Weights of up to 2^18 in rows as long as 4096: the result is right, two rounds later."""
    x, weight = normal(2, 4096), normal(4096, seed=1) * 2.0**15
    truth = F.rms_norm(x, (4096,), weight, 1e-5)
    outcome = run_parties(TRIO, lambda _, a, w: rms_norm(a, w, 1e-5, square=6, gain=18), [x, weight])
    assert float((outcome.value - truth).abs().max()) <= bound(truth, float(weight.abs().max()))
    assert outcome.cost.rounds == 16


def test_price() -> None:
    """64 bytes an element and 5 kB a row with a secret weight; 17 rounds. Meta and ledger agree."""
    shapes = [(128, 768), (768,), (768,)]
    for square in (KNOWN, WIDEST):

        def norm(_: object, a: Fixed, w: Fixed, b: Fixed, square: int = square) -> Fixed:
            return layer_norm(a, w, b, 1e-5, square=square)

        run = run_parties(TRIO, norm, [normal(3, 80), normal(80), normal(80)])
        assert run_meta(TRIO, norm, [(3, 80), (80,), (80,)]) == run.cost
    known = run_meta(TRIO, lambda _, a, w, b: layer_norm(a, w, b, 1e-5, square=KNOWN), shapes)
    assert known.total <= 128 * (768 * 64 + 5400)
    assert known.rounds == 18
    bare = run_meta(TRIO, lambda _, a: rms_norm(a, None, 1e-6, square=KNOWN), shapes[:1])
    assert bare.total <= 128 * (768 * 33.5 + 5600)
    assert bare.rounds == 14


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("width", [64, 576, 768, 2048, 4096])
def test_rows_that_nobody_knows_cost_at_most_60_percent_more(norm: str, width: int) -> None:
    def price(square: int) -> Cost:
        def run(_: object, a: Fixed, w: Fixed) -> Fixed:
            if norm == "rms":
                return rms_norm(a, w, 1e-5, square=square)
            return layer_norm(a, w, None, 1e-5, square=square)

        return run_meta(TRIO, run, [(128, width), (width,)])

    known, unknown = price(12), price(WIDEST)
    assert unknown.total <= 1.6 * known.total
    assert unknown.rounds == known.rounds + 3
    shown = re.search(
        rf"^\| {width} \| {'RMS' if norm == 'rms' else 'layer'} norm \|(.*)$", PAGE.read_text("utf-8"), re.M
    )
    if shown:
        a_row = [f"{round(cost.total / 128):,}, {cost.rounds}" for cost in (known, unknown)]
        assert shown[1].startswith(f" {a_row[0]} | {a_row[1]} | {100 * unknown.total / known.total - 100:.0f} %")


def test_refusals() -> None:
    with pytest.raises(DomainError, match="positive"):
        run_meta(TRIO, lambda _, a: rms_norm(a, None, 0.0), [(2, 8)])
    with pytest.raises(DomainError, match="64-bit ring"):
        run_meta(PrivateConfig(ring=32, frac_bits=12), lambda _, a: layer_norm(a, None, None, 1e-5), [(2, 8)])
    with pytest.raises(DomainError, match="truncate first"):
        run_meta(TRIO, lambda _, a: layer_norm(a.finer(30), None, None, 1e-5), [(2, 768)])
