"""Exact truncation: the floor, never one unit more, in every operation that divides; and its price."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, UnsupportedOp
from private_llm.kernels.forms import Conv2d
from private_llm.net.ledger import merge
from private_llm.protocols import session as session_module
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.registry import protocol_spec
from private_llm.protocols.session import meta_session
from private_llm.protocols.share import Share
from private_llm.ring.ring import Ring
from tests.protocols.parties import ring_values, run_ring

N = 4096
Program = Callable[[Protocol, Share], Share]


def _square(part: Tensor) -> Tensor:
    return part.view(64, 64)


def _image(part: Tensor) -> Tensor:
    return part.view(1, 4, 32, 32)


CASES: dict[str, tuple[Program, Callable[[Tensor], Tensor]]] = {
    "truncate": (lambda p, x: p.truncate(x, 7), lambda x: x >> 7),
    "mul": (lambda p, x: p.mul(x, x, 7), lambda x: x * x >> 7),
    "matmul": (
        lambda p, x: p.matmul(x.map(_square), x.map(_square), 7).map(torch.flatten),
        lambda x: (_square(x) @ _square(x) >> 7).view(-1),
    ),
    "conv2d": (
        lambda p, x: p.conv2d(
            x.map(_image), x.map(lambda part: part[:16].view(4, 4, 1, 1)), Conv2d(), 7
        ).map(torch.flatten),
        lambda x: (torch.einsum("oc,bchw->bohw", x[:16].view(4, 4), _image(x)) >> 7).reshape(-1),
    ),
    "poly": (lambda p, x: p.poly(x, [5, -3, 2], 7), lambda x: 5 - 3 * x + 2 * x * x >> 7),
    "inject": (
        lambda p, x: p.inject(p.invert(p.msb(x)), x, [3], [1], 7),
        lambda x: torch.where(x >= 0, 3 * x + 1, 0) >> 7,
    ),
}  # fmt: skip


def config(ring: int, truncation: str, protocol: str = "trio") -> PrivateConfig:
    return PrivateConfig.from_dict({"ring": ring, "frac_bits": 12, "truncation": truncation, "protocol": protocol})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("ring", "protocol"), [(64, "trio"), (32, "trio"), (64, "quad"), (64, "dealer")])
def test_the_floor_and_nothing_else(name: str, ring: int, protocol: str) -> None:
    """With 4096 values, truncation by one unit at most gives the floor everywhere with probability 2^-1000."""
    program, truth = CASES[name]
    x = ring_values(ring, (N,), 11, 3)
    expected = truth(x)
    assert torch.equal(run_ring(config(ring, "exact", protocol), [x], program, (N,)).result, expected)
    assert not torch.equal(run_ring(config(ring, "unit", protocol), [x], program, (N,)).result, expected)


@pytest.mark.parametrize("ring", [64, 32])
def test_at_the_limits_of_the_range(ring: int) -> None:
    x = ring_values(ring, (N,), ring - 2, 3)
    x[:1000], x[1000:2000] = (1 << (ring - 2)) - 1, -(1 << (ring - 2)) + 1
    run = run_ring(config(ring, "exact"), [x], lambda p, a: p.truncate(a, ring - 4), (N,))
    assert torch.equal(run.result, x >> (ring - 4))


@pytest.mark.parametrize(("ring", "protocol"), [(64, "trio"), (32, "trio"), (64, "quad"), (64, "dealer")])
def test_price(ring: int, protocol: str) -> None:
    """A product without division, one truncation, one comparison of shift + 1 bits, one bit to arithmetic."""
    cost = protocol_spec(protocol).cost
    assert cost is not None
    settings = config(ring, "exact", protocol)
    x = ring_values(ring, (N,), 10, 3)
    run = run_ring(settings, [x], lambda p, a: p.mul(a, a, 12), (N,))
    r = Ring(ring)
    parts = [cost.product(r, N, 0), cost.truncate(r, N, 12), cost.msb(N, 13), cost.inject(r, N, 1, 0, 0)]
    wanted = parts[0] + parts[1] + parts[2] + parts[3]
    assert run.cost == wanted
    meta = [meta_session(settings, party) for party in range(settings.parties)]
    for session in meta:
        empty = torch.empty(N, dtype=r.dtype, device="meta")
        share = Share((empty,) * (3 if protocol == "quad" else 2))
        session.protocol.mul(share, share, 12)
    assert merge([session.protocol.ledger for session in meta]) == wanted


def test_a_protocol_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was added from outside may know nothing of this setting."""
    spec = protocol_spec("trio")
    unaware = replace(spec, party=lambda setup: spec.party(replace(setup, config=config(64, "unit"))))
    monkeypatch.setattr(session_module, "protocol_spec", lambda name: unaware)
    with pytest.raises(ConfigError, match="truncation: got 'exact'; protocol 'trio' gives the floor or one unit more"):
        meta_session(config(64, "exact"), 0)
    assert not meta_session(config(64, "unit"), 0).protocol.divides_exactly


@pytest.mark.parametrize("protocol", ["trio", "quad", "dealer"])
def test_exact_divisions_add_no_primitive_and_leave_out_what_rounds_by_masks(protocol: str) -> None:
    usual = meta_session(PrivateConfig(protocol=protocol), 0).protocol
    exact = meta_session(PrivateConfig(protocol=protocol, truncation="exact"), 0).protocol
    has = protocol != "quad"
    names = ("exponential", "relu_minus_waves", "local_truncate")
    assert [name in usual.primitives for name in names] == [has, has, has]
    assert [name in exact.primitives for name in names] == [has, False, False]
    with pytest.raises(UnsupportedOp, match="a local division: protocol"):
        exact.local_truncate(Share((torch.zeros(2, dtype=torch.int64),) * 2), 3)
