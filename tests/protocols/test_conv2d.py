"""Convolutions of shares against PyTorch's on integers: every protocol, both rings, odd sizes; cost of the output."""

from __future__ import annotations

import math

import pytest
import torch

from private_llm.kernels.forms import Conv2d
from private_llm.ring.ring import Ring
from tests.kernels import reference
from tests.protocols.parties import ring_values, run_ring
from tests.protocols.test_suite import check, config, every, prices

LAYERS = [
    ((2, 3, 7, 5), (5, 3, 3, 2), Conv2d((2, 1), (1, 0), (1, 2))),
    ((3, 4, 5, 6), (4, 1, 3, 3), Conv2d(padding=(1, 1), groups=4)),
]


@every
@pytest.mark.parametrize("shift", [0, 9])
@pytest.mark.parametrize(("left", "right", "form"), LAYERS)
def test_convolution(
    protocol: str, ring: int, shift: int, left: tuple[int, ...], right: tuple[int, ...], form: Conv2d
) -> None:
    x, w = ring_values(ring, left, 12, 1), ring_values(ring, right, 12, 2)
    exact = reference.ring_conv2d(x, w, form.stride, form.padding, form.dilation, form.groups)
    run = run_ring(config(protocol, ring), [x, w], lambda p, a, b: p.conv2d(a, b, form, shift), exact.shape)
    price = prices(protocol).product(Ring(ring), exact.numel(), shift)
    check(run, exact >> shift, price, protocol, slack=1 if shift else 0)


@pytest.mark.parametrize(("left", "right", "form"), LAYERS)
def test_multiply_adds_are_counted_by_shape(left: tuple[int, ...], right: tuple[int, ...], form: Conv2d) -> None:
    x, w = (torch.empty(shape, dtype=torch.int32, device="meta") for shape in (left, right))
    made = form.product(x, w)
    assert form.macs(left, right) == made.numel() * math.prod(right[1:])
