"""Piecewise polynomials by comparison keys: against integer arithmetic, cost against its formula, what parties see."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, UnsupportedOp
from private_llm.net.ledger import Cost, merge
from private_llm.protocols.one_step import Pieces, PiecesShape
from private_llm.protocols.prices import Adder
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.registry import trio_prices as cost
from private_llm.protocols.session import meta_session
from private_llm.protocols.share import Share
from private_llm.ring import comparison_keys
from private_llm.ring.ring import RING64, Ring
from tests.protocols.parties import ring_values, run_ring
from tests.protocols.test_uniform import CHI_SQUARE_255, Tap, chi_square

BITS = 20
OFFSETS = (0, -5, 1000, -70000)


def config(protocol: str = "trio", ring: int = 64, **more: object) -> PrivateConfig:
    return PrivateConfig.from_dict(
        {"protocol": protocol, "ring": ring, "frac_bits": 12 if ring == 32 else 18, "adder": "keys", **more}
    )


def pieces(degree: int, shifts: tuple[int, ...], low: int = 0) -> Pieces:
    words = degree + 1
    steps = (
        tuple((3 * k + 1, 5 - 2 * k, 1)[:words] for k in range(4)),
        tuple((-k, 7, k)[:words] for k in range(4)),
        tuple((0, 0, 0)[:words] for k in range(4)),
    )
    rest = ((11, -3, 2)[:words], (0, 1, 0)[:words], (-9, 4, 1)[:words])
    count = len(shifts)
    return Pieces(OFFSETS, steps[:count], rest[:count], BITS, low, shifts)


def truth(x: Tensor, made: Pieces) -> Tensor:
    def polynomial(c: tuple[int, ...]) -> Tensor:
        return sum((k * x**i for i, k in enumerate(c)), torch.zeros_like(x))

    x = x.long()
    total = [
        polynomial(made.rest[o])
        + sum(((x + c < 0) * polynomial(step) for c, step in zip(made.offsets, made.steps[o], strict=True)), 0 * x)
        for o in range(len(made.rest))
    ]
    return torch.stack([value >> shift for value, shift in zip(total, made.shifts, strict=True)])


def stacked(p: Protocol, x: Share, made: Pieces) -> Share:
    return Share(tuple(torch.stack(parts) for parts in zip(*(out.parts for out in p.piecewise(x, made)), strict=True)))


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("ring", [64, 32])
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("shifts", [(0,), (7,), (0, 7, 0), (3, 9)])
@pytest.mark.parametrize("n", [1, 130])
def test_values_and_price(protocol: str, ring: int, degree: int, shifts: tuple[int, ...], n: int) -> None:
    x = ring_values(ring, (n,), BITS - 1 if ring == 64 or degree == 1 else 12)
    made = pieces(degree, shifts)
    run = run_ring(config(protocol, ring), [x], lambda p, a: stacked(p, a, made), (len(shifts), n))
    off = run.result.long() - truth(x, made)
    slack = torch.tensor([int(shift > 0) for shift in shifts])[:, None]
    assert int(off.min()) >= 0
    assert bool((off <= slack).all())
    price = cost.piecewise(Ring(ring), n, made.shape)
    assert {link: count for link, count in run.cost.sent.items() if count} == price.sent
    assert run.cost.rounds == price.rounds == (2 * len(set(shifts) - {0}) or 1)


def test_shapes_stay_and_nothing_is_made_of_nothing() -> None:
    x = ring_values(64, (2, 3, 5), 10)
    run = run_ring(config(), [x], lambda p, a: stacked(p, a, pieces(1, (0, 4))), (2, 2, 3, 5))
    assert torch.equal(run.result[0], truth(x, pieces(1, (0, 4)))[0])
    empty = run_ring(config(), [x[:0]], lambda p, a: stacked(p, a, pieces(1, (0,))), (1, 0, 3, 5))
    assert empty.result.numel() == 0


def test_many_thresholds_are_evaluated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("private_llm.protocols.trio.one_step._POINTS", 64)
    x = ring_values(64, (50,), BITS - 1)
    run = run_ring(config(), [x], lambda p, a: stacked(p, a, pieces(2, (0,))), (1, 50))
    assert torch.equal(run.result, truth(x, pieces(2, (0,))))


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_keys_of_many_elements_come_in_parts(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No message has more than so many keys, whatever the shape; bytes and rounds are the same."""
    monkeypatch.setattr("private_llm.protocols.trio.one_step._KEYS", 16)
    x, made, tap = ring_values(64, (5, 10), BITS - 1), pieces(2, (0, 7)), Tap()
    run = run_ring(config(protocol), [x], lambda p, a: stacked(p, a, made), (2, 5, 10), wrap=tap)
    off = run.result - truth(x, made)
    assert torch.equal(run.result[0], truth(x, made)[0])
    assert bool(((off == 0) | (off == 1)).all())
    assert {link: count for link, count in run.cost.sent.items() if count} == cost.piecewise(
        RING64, 50, made.shape
    ).sent
    most = 16 * 8 * comparison_keys.key_words(made.shape.levels, 3)
    assert [len(data) for data in tap.received[1]].count(most) == 3
    assert max(len(data) for data in tap.received[2]) == most


def test_low_bits_may_be_left_out() -> None:
    """The bit is right but up to 2^low above a threshold, and the key is shorter by low levels."""
    low = 6
    x = torch.arange(-300, 300)
    step = Pieces((0,), (((1, 0),),), ((0, 0),), BITS, low)
    run = run_ring(config(), [x], lambda p, a: stacked(p, a, step), (1, 600))
    right = (x < 0).long()
    assert torch.equal(run.result[0][(x < 0) | (x >= 1 << low)], right[(x < 0) | (x >= 1 << low)])
    assert bool(((run.result[0] == 0) | (run.result[0] == 1)).all())
    whole = cost.piecewise(RING64, 1, Pieces((0,), (((1, 0),),), ((0, 0),), BITS).shape).total
    assert whole - cost.piecewise(RING64, 1, step.shape).total == 2 * 8 * 4 * low


def test_exact_truncation_stays_exact() -> None:
    x = ring_values(64, (200,), BITS - 1)
    made = pieces(2, (7, 0))
    run = run_ring(config(truncation="exact"), [x], lambda p, a: stacked(p, a, made), (2, 200))
    assert torch.equal(run.result, truth(x, made))


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("secret", [0, 1 << 17, -(1 << 17)])
def test_receivers_see_keys_and_masked_values_only(protocol: str, secret: int) -> None:
    """All words but those of control bits and the cleared bits of seeds are uniform, whatever the value is."""
    n = 1024
    x = torch.full((n,), secret, dtype=torch.int64)
    tap, made = Tap(), pieces(1, (0,))
    run_ring(config(protocol), [x], lambda p, a: p.piecewise(a, made)[0], (n,), wrap=tap)
    assert tap.received[0] == []
    levels = made.shape.levels
    for party in (1, 2):
        input_, key, *others = tap.received[party]
        table = np.frombuffer(key, np.uint64).reshape(n, -1)
        values = np.ascontiguousarray(table[:, 2 * levels : 4 * levels])
        for data in (input_, values.tobytes(), np.ascontiguousarray(table[:, -2:]).tobytes(), *others):
            assert chi_square(data) < CHI_SQUARE_255


@pytest.mark.parametrize("protocol", ["quad", "plain"])
def test_protocols_without_keys_refuse(protocol: str) -> None:
    settings = PrivateConfig.from_dict({"protocol": protocol, "insecure": protocol == "plain"})
    with pytest.raises(UnsupportedOp, match="want trio or dealer"):
        run_ring(settings, [torch.zeros(3, dtype=torch.int64)], lambda p, a: p.piecewise(a, pieces(1, (0,)))[0], (3,))
    with pytest.raises(ConfigError, match="adder='keys' is a way of protocol='trio' or 'dealer'"):
        config(protocol, insecure=protocol == "plain")


@pytest.mark.parametrize(("bits", "low"), [(1, 0), (65, 0), (20, 19), (20, -1)])
def test_impossible_widths_are_refused(bits: int, low: int) -> None:
    step = Pieces((0,), (((1, 0),),), ((0, 0),), bits, low)
    with pytest.raises(DomainError, match="piecewise: got bits="):
        run_ring(config(), [torch.zeros(3, dtype=torch.int64)], lambda p, a: p.piecewise(a, step)[0], (3,))


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_meta_run_equals_real_ledger(protocol: str) -> None:
    made = pieces(2, (0, 5))
    real = run_ring(config(protocol), [ring_values(64, (70,), 12)], lambda p, a: stacked(p, a, made), (2, 70))
    ledgers = []
    for party in range(3):
        session = meta_session(config(protocol), party)
        meta = torch.empty(70, dtype=torch.int64, device="meta")
        out = session.protocol.piecewise(Share((meta, meta)), made)
        assert [share.shape for share in out] == [(70,), (70,)]
        ledgers.append(session.protocol.transport.ledger)
    assert merge(ledgers) == real.cost


def test_the_network_decides() -> None:
    """Few elements on a slow network take keys, many on a fast one do not; without a bandwidth nothing does."""
    shape = PiecesShape(1, 1, 40)

    def chosen(adder: Adder, count: int, blocks: int = 0) -> bool:
        return adder.takes_keys(
            lambda: cost.piecewise(RING64, count, shape), lambda: Cost({(1, 2): 50 * count}, 5), blocks
        )

    far, near = Adder("auto", 1000.0, 20.0), Adder("auto", 1000.0, 0.05)
    assert chosen(far, 1000)
    assert not chosen(near, 1000)
    assert chosen(near, 10)
    assert not chosen(far, 1_000_000)
    assert not chosen(far, 1000, blocks=10**9)
    assert not chosen(Adder("auto", None, 20.0), 10)
    assert not chosen(Adder("prefix", 1000.0, 20.0), 10)
    assert chosen(Adder("keys"), 10**9)
    assert PrivateConfig(adder="keys").may_take_keys
    assert not PrivateConfig(adder="prefix", bandwidth_mbit=1000.0).may_take_keys
