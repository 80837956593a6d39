"""Counting on meta tensors equals the ledger of a real run, and the transcript's shape ignores the secrets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.net.ledger import merge
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.session import meta_session
from private_llm.protocols.share import Share
from tests.protocols.parties import ring_values, run_ring

Program = Callable[[Protocol, Share, Share], Share]


def relu(p: Protocol, x: Share, y: Share) -> Share:
    return p.inject(p.invert(p.msb(x)), x, [1], [0], 3)


def thresholds(p: Protocol, x: Share, y: Share) -> Share:
    return p.inject(p.msb(x, [1, 2, 3], bits=20), y, [1, 0, 5], [1, 2, 3])


def products(p: Protocol, x: Share, y: Share) -> Share:
    return p.truncate(p.add_public(p.mul(p.mul(x, y, 7), y), 5), 11)


def matrices(p: Protocol, x: Share, y: Share) -> Share:
    square = y.map(lambda part: part.view(10, 10))
    full = p.matmul(x.map(lambda part: part.view(2, 5, 10)), square, 4)
    return p.matmul(full, square, 0, select=torch.arange(0, 100))


def cubic(p: Protocol, x: Share, y: Share) -> Share:
    return p.poly(p.poly(x, [1, 2, 3], 2), [1, 2, 3, 4])


def decomposition(p: Protocol, x: Share, y: Share) -> Share:
    return p.inject(p.and_(p.a2b(x).row(3), p.msb(y)), None, [0], [1])


PROGRAMS = [relu, thresholds, products, matrices, cubic, decomposition]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("ring", [64, 32])
@pytest.mark.parametrize("adder", ["prefix", "ripple"])
@pytest.mark.parametrize("protocol", ["trio", "quad"])
def test_meta_run_equals_real_ledger(program: Program, ring: int, adder: str, protocol: str) -> None:
    config = PrivateConfig.from_dict({"protocol": protocol, "ring": ring, "frac_bits": 12, "adder": adder})
    x, y = ring_values(ring, (100,), 10, 1), ring_values(ring, (100,), 10, 2)
    real = run_ring(config, [x, y], program, (100,))
    ledgers = []
    for party in range(config.parties):
        session = meta_session(config, party)
        meta = torch.empty(100, dtype=session.ring.dtype, device="meta")
        out = program(session.protocol, *[Share((meta,) * (config.parties - 1))] * 2)
        assert out.shape == (100,)
        assert out.parts[0].is_meta
        ledgers.append(session.protocol.ledger)
        assert ledgers[-1].sent == real.ledgers[party].sent
        assert ledgers[-1].rounds == real.ledgers[party].rounds
    assert merge(ledgers).total == real.cost.total


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("protocol", ["trio", "quad"])
def test_cost_does_not_depend_on_the_secrets(program: Program, protocol: str) -> None:
    config = PrivateConfig.from_dict({"protocol": protocol, "frac_bits": 12})
    zeros = torch.zeros(100, dtype=torch.int64)
    wild = ring_values(64, (100,), 24, 3)
    quiet = run_ring(config, [zeros, zeros], program, (100,))
    loud = run_ring(config, [wild, wild - 1], program, (100,))
    assert [ledger.sent for ledger in quiet.ledgers] == [ledger.sent for ledger in loud.ledgers]
    assert [ledger.rounds for ledger in quiet.ledgers] == [ledger.rounds for ledger in loud.ledgers]
