"""A debug session names the module whose products leave the ring; an ordinary session is not slowed by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError
from private_llm.kernels.forms import Conv2d, Matmul
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.share import Share
from tests.protocols.parties import run_ring


def _image(x: Share) -> Share:
    return x.map(lambda part: part.view(1, 1, 2, 2))


PRODUCTS: list[Callable[[Protocol, Share], Share]] = [
    lambda p, x: p.mul(x, x, 18),
    lambda p, x: p.matmul(x, x, 18),
    lambda p, x: p.poly(x, [0, 0, 1], 18),
    lambda p, x: p.conv2d(_image(x), _image(x), Conv2d(padding=(1, 1)), 18).map(lambda part: part[0, 0, :2, :2]),
    lambda p, x: p.bilinear_public(Matmul(), x, x.parts[0], 18),
    lambda p, x: p.bilinear_public(Matmul(), x, x.parts[0], 18, left=True),
]


@pytest.mark.parametrize("product", PRODUCTS)
def test_overflow_names_the_module(product: Callable[[Protocol, Share], Share]) -> None:
    config = PrivateConfig(protocol="plain", insecure=True, debug_ranges=True)

    def program(p: Protocol, x: Share) -> Share:
        p.module = "model.layers.3.fc1"
        return product(p, x)

    small = torch.full((2, 2), 1 << 20)
    run_ring(config, [small], program, (2, 2))
    with pytest.raises(DomainError, match=r"module 'model.layers.3.fc1' reaches 2\^6[234]"):
        run_ring(config, [torch.full((2, 2), 1 << 31)], program, (2, 2))


def test_a_small_ring_overflows_earlier() -> None:
    config = PrivateConfig(protocol="plain", insecure=True, debug_ranges=True, ring=32, frac_bits=12)

    def program(p: Protocol, x: Share) -> Share:
        p.module = "features.3"
        return p.conv2d(x, x, Conv2d(), 12)

    for value, fits in ((16383, True), (16384, False)):  # four products of 2^28 reach 2^30
        image = torch.full((1, 1, 2, 2), value, dtype=torch.int32)
        if fits:
            assert run_ring(config, [image], program, (1, 1, 1, 1)).result.item() == (4 * value**2) >> 12
            continue
        with pytest.raises(DomainError, match=r"a conv2d in module 'features.3' reaches 2\^30.0; a 32-bit ring holds"):
            run_ring(config, [image], program, (1, 1, 1, 1))


def test_a_broken_promise_of_range_names_the_module() -> None:
    config = PrivateConfig(protocol="plain", insecure=True, debug_ranges=True)
    compare = lambda p, x: p.inject(p.msb(x, [0, 1], bits=20), None, [0, 0], [1, 1])  # noqa: E731
    run_ring(config, [torch.tensor([(1 << 19) - 2, -(1 << 19) + 1])], compare, (2,))
    for beyond in (1 << 19, -(1 << 19) - 1):
        with pytest.raises(DomainError, match=r"beyond its promised range of 2\^19"):
            run_ring(config, [torch.tensor([beyond, 0])], compare, (2,))


LOCAL: list[Callable[[Protocol, Share], Share]] = [
    lambda p, x: x.map(lambda part: part.sum(0, dtype=part.dtype).expand(4)),
    lambda p, x: p.mul_public(x, 3),
    lambda p, x: p.mul_public(x, torch.full((4,), 1 << 40)),
    lambda p, x: p.add(p.add(x, x), p.add(x, x)),
    lambda p, x: p.sub(p.neg(x), p.add(x, x)),
    lambda p, x: p.add_public(x, 1 << 62),
    lambda p, x: x.map(lambda part: torch.stack([part[::2] + part[1::2], part[:2] + part[2:]]).reshape(4)),
]


@pytest.mark.parametrize("then", ["product", "comparison", "bits", "choice", "output"])
@pytest.mark.parametrize("local", LOCAL)
def test_a_local_step_that_wraps_is_found_at_the_next_step(
    local: Callable[[Protocol, Share], Share], then: str
) -> None:
    config = PrivateConfig(protocol="plain", insecure=True, debug_ranges=True)

    def program(p: Protocol, x: Share) -> Share:
        made = local(p, x)
        p.module = "model.layers.3.mlp"
        if then == "product":
            return p.mul(made, p.public(torch.ones(4, dtype=torch.int64)), 18)
        if then == "comparison":
            return p.inject(p.msb(made), None, [0], [1])
        if then == "bits":
            return p.inject(p.a2b(made).row(63), None, [0], [1])
        if then == "choice":
            return p.inject(p.msb(x), made, [1], [0])
        p.reveal_to_client(made)
        return made

    run_ring(config, [torch.full((4,), 1 << 20)], lambda p, x: x, (4,))
    wraps = torch.full((4,), (1 << 62) + 12345)
    with pytest.raises(DomainError, match=r"in module 'model.layers.3.mlp' reaches 2\^\d+.*a 64-bit ring holds"):
        run_ring(config, [wraps], program, (4,))


def test_values_that_come_back_into_the_ring_are_right() -> None:
    """Only what an operation receives counts: elements are numbers modulo 2^64, so a detour is no error."""
    config = PrivateConfig(protocol="plain", insecure=True, debug_ranges=True)
    x = torch.full((4,), (1 << 62) + 12345)
    run = run_ring(config, [x], lambda p, v: p.sub(p.mul_public(v, 4), p.mul_public(v, 3)), (4,))
    assert torch.equal(run.result, x)


def test_the_check_is_off_unless_asked_for() -> None:
    config = PrivateConfig(protocol="plain", insecure=True)
    run = run_ring(config, [torch.full((2,), 1 << 31)], lambda p, x: p.mul(x, x), (2,))
    assert run.result.tolist() == [1 << 62] * 2


def test_reading_values_needs_the_plain_protocol() -> None:
    with pytest.raises(ConfigError, match="needs protocol='plain'"):
        PrivateConfig(debug_ranges=True)
