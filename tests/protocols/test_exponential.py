"""Exponentials in one step: against float64, cost against its formula, what the evaluators receive, refusals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels.waves import public_factors, secret_numbers
from private_llm.protocols.one_step import GIVEN_BITS, SPAN, TOP, TOTAL_BITS, Exponential
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.registry import trio_prices as cost
from private_llm.protocols.session import meta_session
from private_llm.protocols.share import Share
from private_llm.ring.ring import RING64
from tests.protocols.parties import run_ring
from tests.protocols.test_uniform import CHI_SQUARE_255, Tap, chi_square

FRAC, OUT = 18, 24


def config(protocol: str = "trio", **more: object) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": protocol, **more})


def kept(p: Protocol, x: Share, plan: Exponential) -> Share:
    """Exponentials of what is not below the range, zero elsewhere."""
    lowest = (SPAN - TOP) << plan.frac
    return p.exponential(x, p.invert(p.msb(x, [lowest])), plan)


def error(x: Tensor, made: Tensor, frac: int, out: int) -> Tensor:
    """In sizes of what is stated: relative 2^-15, absolute 2^-18, and one unit of the result."""
    real = x.double() / 2.0**frac
    truth = torch.where(real < TOP - SPAN, 0.0, real.exp())
    return (made.double() / 2.0**out - truth).abs() / (2.0**-15 * truth + 2.0**-18 + 2.0**-out)


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize(("frac", "out"), [(18, 24), (18, 18), (4, 20), (0, 10), (21, 24), (27, 30)])
def test_values(protocol: str, frac: int, out: int) -> None:
    """Over the whole range and below it, with masks that wrap and masks that do not."""
    x = torch.linspace((TOP - SPAN) * 2.0**frac, TOP * 2.0**frac - 1, 4001, dtype=torch.float64).long()
    x = torch.cat([x, torch.tensor([-1, 0, -(1 << 40), -(1 << 61), (TOP - SPAN << frac) - 1])])
    plan = Exponential(frac, TOTAL_BITS - out)
    made = run_ring(config(protocol), [x], lambda p, a: kept(p, a, plan), x.shape).result
    assert float(error(x, made, frac, out).max()) <= 1
    assert not bool(made[x < (TOP - SPAN) << frac].any())


def test_what_is_not_kept_is_zero_whatever_it_is() -> None:
    """Values far above the range, too: a zero bit makes a zero."""
    x = torch.tensor([5 << FRAC, 1 << 50, -(1 << 50), 0])

    def cleared(p: Protocol, a: Share) -> Share:
        nothing = p.msb(p.mul_public(a, 0), [0])
        return p.exponential(a, nothing, Exponential(FRAC, TOTAL_BITS - OUT))

    made = run_ring(config(), [x], cleared, x.shape).result
    assert int(made.abs().max()) <= 1


@pytest.mark.parametrize("n", [1, 63, 130, 70_000])
def test_price_shapes_and_meta(n: int) -> None:
    plan = Exponential(FRAC, TOTAL_BITS - OUT)
    x = torch.arange(n)[None] % (1 << FRAC)

    def on_a_known_bit(p: Protocol, a: Share) -> Share:
        return p.exponential(a, p.msb(a, [-TOP << FRAC]), plan)

    run = run_ring(config(), [x], on_a_known_bit, x.shape)
    price = cost.msb(n, 64) + cost.exponential(RING64, n, plan.shift)
    assert run.cost == price
    assert float(error(x, run.result, FRAC, OUT).max()) <= 1
    session = meta_session(config(), 1)
    meta = torch.empty(1, n, dtype=torch.int64, device="meta")
    assert on_a_known_bit(session.protocol, Share((meta, meta))).shape == (1, n)
    assert session.protocol.ledger.cost().sent == {(1, 2): price.sent[1, 2]}


def test_nothing_is_made_of_nothing() -> None:
    plan = Exponential(FRAC, TOTAL_BITS - OUT)
    assert run_ring(
        config(), [torch.zeros(0, dtype=torch.int64)], lambda p, a: kept(p, a, plan), (0,)
    ).result.shape == (0,)


def test_exact_division() -> None:
    x = torch.linspace((TOP - SPAN) * 2.0**FRAC, 0, 301, dtype=torch.float64).long()
    plan = Exponential(FRAC, TOTAL_BITS - OUT)
    made = run_ring(config(truncation="exact"), [x], lambda p, a: kept(p, a, plan), x.shape).result
    assert float(error(x, made, FRAC, OUT).max()) <= 1


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("secret", [0, -(5 << FRAC), -(1 << 40)])
def test_evaluators_receive_uniform_bytes(protocol: str, secret: int) -> None:
    n, tap = 4096, Tap()
    x = torch.full((n,), secret, dtype=torch.int64)
    plan = Exponential(FRAC, TOTAL_BITS - OUT)
    run_ring(config(protocol), [x], lambda p, a: kept(p, a, plan), (n,), wrap=tap)
    for party in (1, 2):
        large = [data for data in tap.received[party] if len(data) >= 8192]
        assert max(map(chi_square, large)) < CHI_SQUARE_255
        assert len(set(large)) == len(large)
    assert max(len(data) for data in tap.received[2]) == 4 * GIVEN_BITS * n // 8
    assert tap.received[0] == []


def test_tables_are_the_function() -> None:
    """Factors times secrets, digit by digit, for masks of both digits: no party, no ring."""
    plan = Exponential(10, 0)
    x = torch.arange((TOP - SPAN) << 10, TOP << 10, 7)
    for mask in (0, 5, 16 << 10, (31 << 10) + 1023, -1):
        a = torch.full_like(x, mask)
        digit, secret = secret_numbers(a, plan.digits, plan.secrets)
        zero, one = public_factors(x + a + plan.offset, plan.digits, plan.factors)
        product = torch.where(digit == 0, zero, one).double() * secret.double() / 2.0**TOTAL_BITS
        truth = (x.double() / 1024).exp()
        assert float(((product - truth).abs() / (2.0**-15 * truth + 2.0**-18)).max()) <= 1
        assert float(product.max()) * 2**TOTAL_BITS < 2 ** (GIVEN_BITS - 2)
        assert math.isclose(float(product[-1]), math.exp(float(x[-1]) / 1024), rel_tol=2.0**-15)


def test_refusals() -> None:
    plan = Exponential(FRAC, TOTAL_BITS - OUT)
    zeros = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(UnsupportedOp, match="want trio or dealer"):
        run_ring(config("quad"), [zeros], lambda p, a: kept(p, a, plan), (3,))
    with pytest.raises(DomainError, match="one row of as many"):
        run_ring(config(), [zeros], lambda p, a: p.exponential(a, p.msb(a, [0, 1]), plan), (3,))
    with pytest.raises(DomainError, match="32-bit ring"):
        run_ring(config(ring=32, frac_bits=12), [zeros.int()], lambda p, a: kept(p, a, Exponential(12, 9)), (3,))
    with pytest.raises(DomainError, match="want 0 or more"):
        Exponential(-1, 9)
