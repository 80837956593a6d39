"""Sums of waves: against float64, cost against its formula, what the evaluators receive, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from private_llm.approx.bump import WaveSum, angle_frac, waves_of
from private_llm.approx.tables import GELU_ERF, SILU
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, UnsupportedOp
from private_llm.protocols.one_step import PUBLIC_BITS, TABLE_BITS, Wave, Waves, turns
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.registry import trio_prices as cost
from private_llm.protocols.session import meta_session
from private_llm.protocols.share import Share
from private_llm.ring.ring import RING64
from tests.protocols.parties import run_ring
from tests.protocols.test_uniform import CHI_SQUARE_255, Tap, chi_square

FRAC = 18
PLAN = waves_of(SILU.waves, FRAC)


def config(protocol: str = "trio", **more: object) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": protocol, **more})


def rectified(p: Protocol, x: Share, angle: Share, plan: Waves = PLAN) -> Share:
    return p.relu_minus_waves(x, p.msb(x), angle, plan)


def truth(plan: Waves, angle: Tensor) -> Tensor:
    """The sum in float64."""
    turned = 2 * math.pi * angle.double() / 2.0**plan.angle_bits
    total = torch.full_like(turned, plan.constant)
    for k, wave in enumerate(plan.waves, 1):
        total += (wave.even * torch.cos(k * turned) + wave.odd * torch.sin(k * turned)) / 2.0**PUBLIC_BITS
    return total


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("frac", [8, 14, 18, 20])
def test_values(protocol: str, frac: int) -> None:
    """Whole turns, upper bits of angles that mean nothing, and x of all sizes."""
    plan = waves_of(SILU.waves, frac)
    n = 5000
    top = SILU.waves.top * SILU.waves.factor * 2.0 ** angle_frac(frac)
    inside = (torch.linspace(0, 0.98, n, dtype=torch.float64) * top).long() // 16
    angle = (inside << 4) + (torch.arange(n) << plan.angle_bits)
    x = torch.arange(n) * 987654321 % (1 << 40) - (1 << 39)
    made = run_ring(config(protocol), [x, angle], lambda p, a, b: rectified(p, a, b, plan), x.shape).result
    off = (x.clamp(min=0) - made).double() - truth(plan, angle) * 2.0**frac
    assert float(off.abs().max()) <= 2 + 6e-5 * 2.0**frac
    assert abs(float(off.mean())) <= 0.2 + 4e-6 * 2.0**frac  # rounding without bias


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_as_many_low_bits_are_right_as_its_reader_reads(protocol: str) -> None:
    n, bits = 2000, 30
    x, angle = torch.arange(n) * 987654321 % (1 << 28) - (1 << 27), torch.arange(n) << 10
    whole, short = (waves_of(SILU.waves, FRAC, read) for read in (64, bits))
    want, made = (
        run_ring(config(protocol), [x, angle], lambda p, a, b, plan=plan: rectified(p, a, b, plan), x.shape).result
        for plan in (whole, short)
    )
    half = 1 << bits - 1
    off = (made - want + half) % (1 << bits) - half
    assert float(off.abs().max()) <= 2 * (2 + 6e-5 * 2.0**FRAC)  # what each sum may be off
    assert bool(((made - want) >> bits != 0).any()), "what nobody reads is not sent"


@pytest.mark.parametrize("n", [1, 63, 130, 20_000])
def test_price_shapes_and_meta(n: int) -> None:
    x, angle = torch.arange(n)[None] << 10, torch.arange(n)[None]
    run = run_ring(config(), [x, angle], rectified, x.shape)
    price = cost.msb(n, 64) + cost.relu_minus_waves(RING64, n, PLAN)
    assert run.cost == price
    session = meta_session(config(), 1)
    meta = torch.empty(1, n, dtype=torch.int64, device="meta")
    assert rectified(session.protocol, Share((meta, meta)), Share((meta, meta))).shape == (1, n)
    assert session.protocol.ledger.cost().sent == {(1, 2): price.sent[1, 2]}


def test_nothing_is_made_of_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert run_ring(config(), [none, none], rectified, (0,)).result.shape == (0,)


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("secret", [0, -(5 << FRAC), 1 << 40])
def test_evaluators_receive_uniform_bytes(protocol: str, secret: int) -> None:
    n, tap = 4096, Tap()
    x = torch.full((n,), secret, dtype=torch.int64)
    run_ring(config(protocol), [x, x], rectified, (n,), wrap=tap)
    for party in (1, 2):
        large = [data for data in tap.received[party] if len(data) >= 8192]
        assert max(map(chi_square, large)) < CHI_SQUARE_255
        assert len(set(large)) == len(large)
    assert tap.received[0] == []


def test_tables_are_cosines_and_sines() -> None:
    upper_c, upper_s, lower_c, lower_s = turns().double() / 2.0**TABLE_BITS
    size = len(upper_c)
    angles = torch.arange(size, dtype=torch.float64) * 2 * math.pi / size
    for made, real in ((upper_c, angles.cos()), (upper_s, angles.sin()), (lower_c, (angles / size).cos())):
        assert float((made - real).abs().max()) < 2.0**-TABLE_BITS
    assert float((lower_s - (angles / size).sin()).abs().max()) < 2.0**-TABLE_BITS


@pytest.mark.parametrize("frac", [8, 18, 20])
@pytest.mark.parametrize("made", [SILU.waves, GELU_ERF.waves], ids=["silu", "gelu"])
def test_sums_and_shares_fit(made: WaveSum, frac: int) -> None:
    plan = waves_of(made, frac)
    beyond, unit = 2.0**-made.resolution, made.factor * 2.0 ** angle_frac(frac)
    inside = torch.linspace(-beyond * unit, (made.top + beyond) * unit, 9999, dtype=torch.float64).long()
    assert float(truth(plan, inside).abs().max()) < 0.49
    assert max(plan.widths) <= plan.wide <= 61


def test_refusals() -> None:
    zeros = torch.zeros(3, dtype=torch.int64)
    for refusing in (config("quad"), config(truncation="exact")):
        with pytest.raises(UnsupportedOp, match="want trio or dealer"):
            run_ring(refusing, [zeros, zeros], rectified, (3,))
    with pytest.raises(DomainError, match="want one row"):
        run_ring(config(), [zeros, zeros], lambda p, a, b: p.relu_minus_waves(a, p.msb(a, [0, 1]), b, PLAN), (3,))
    with pytest.raises(DomainError, match="32-bit ring"):
        run_ring(config(ring=32, frac_bits=12), [zeros.int(), zeros.int()], rectified, (3,))
    with pytest.raises(DomainError, match="1 or more"):
        Waves(18, 24, 0.0, ())
    with pytest.raises(DomainError, match="1 to 63"):
        Waves(18, 64, 0.0, (Wave(1, 1, 18),))
