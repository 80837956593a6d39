"""Divisions of which only the lowest bits are right, against integer arithmetic and their price."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.registry import trio_prices as trio_cost
from private_llm.protocols.share import BitWidths, Share
from private_llm.ring.ring import Ring
from tests.protocols.parties import ring_values, run_ring
from tests.protocols.test_suite import check, config, prices

NARROW_SIZES = [
    (18, 64, 46), (18, 64, 50), (18, 64, 32), (18, 50, 32), (18, 50, 50), (20, 47, 64), (9, 40, 30), (1, 64, 64),
    (18, 33, 3), (61, 64, 1), (1, 4, 64),
]  # fmt: skip
"""Bits that are dropped, that are right of what is divided, and that are wanted of the quotient."""


def _lowest(x: Tensor, bits: int) -> Tensor:
    """The signed number in the lowest bits of ring elements."""
    return (x << (64 - bits)) >> (64 - bits)


NARROW_STEPS: dict[str, Callable[[Protocol, Share, Share, int, BitWidths], Share]] = {
    "mul": lambda p, x, y, shift, widths: p.mul(x, y, shift, widths),
    "matmul": lambda p, x, y, shift, widths: p.matmul(
        x.map(lambda part: part.view(-1, 1, 1)), y.map(lambda part: part.view(-1, 1, 1)), shift, widths=widths
    ).map(lambda part: part.view(-1)),
    "truncate": lambda p, x, y, shift, widths: p.truncate(x, shift, widths),
}  # fmt: skip


@pytest.mark.parametrize("step", NARROW_STEPS)
@pytest.mark.parametrize(("shift", "given", "wanted"), NARROW_SIZES)
@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_narrow_divisions_are_right_in_the_bits_that_are_wanted(
    protocol: str, shift: int, given: int, wanted: int, step: str
) -> None:
    """Values fill the bits that are given, above which anything may be; where no field is sent, they may fill all."""
    widths, count = BitWidths(given, wanted), 700
    fills = given if widths.fields(shift) == 0 else given - 2
    x = _lowest(ring_values(64, (count,), 64, 1), fills)
    y = torch.ones_like(x) if step == "truncate" else 1 + 2 * ring_values(64, (count,), 64, 2)
    if widths.fields(shift) and step != "truncate":  # 1 / y modulo 2^64 times what the product shall be
        inverse = y.clone()
        for _ in range(6):
            inverse = inverse * (2 - y * inverse)
        factor = x * inverse
    else:
        factor = x
    want = _lowest(factor * y, given) >> shift
    above = ring_values(64, (count,), 64, 3) * (1 << given) if given < 64 else torch.zeros_like(x)

    def run(p: Protocol, a: Share, b: Share) -> Share:
        return NARROW_STEPS[step](p, p.add_public(a, above), b, shift, widths)

    made = run_ring(config(protocol, 64), [factor, y], run, want.shape)
    assert set(_lowest(made.result - want, wanted).unique().tolist()) <= {0, 1, -1 if wanted == 1 else 0}
    price = trio_cost.truncate if step == "truncate" else trio_cost.product
    stated = price(Ring(64), count, shift, widths)
    assert made.cost.total == stated.total
    assert made.cost.sent.items() <= stated.sent.items()
    assert made.cost.rounds == stated.rounds == (step != "truncate") + (widths.fields(shift) > 0)


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_a_narrow_truncation_by_nothing_makes_more_bits_right(protocol: str) -> None:
    x, above = _lowest(ring_values(64, (20_000,), 64, 1), 38), ring_values(64, (20_000,), 64, 2) * (1 << 40)
    made = run_ring(
        config(protocol, 64), [x], lambda p, a: p.truncate(p.add_public(a, above), 0, BitWidths(40, 64)), x.shape
    )
    assert set((made.result - x).unique().tolist()) <= {0, 1}
    assert made.cost == trio_cost.truncate(Ring(64), 20_000, 0, BitWidths(40, 64))


@pytest.mark.parametrize(
    ("protocol", "ring"), [("plain", 64), ("quad", 64), ("plain", 32), ("quad", 32), ("trio", 32), ("dealer", 32)]
)
def test_protocols_without_narrow_divisions_divide_in_the_ring(protocol: str, ring: int) -> None:
    x, y = ring_values(ring, (70,), 11, 1), ring_values(ring, (70,), 11, 2)
    run = run_ring(
        config(protocol, ring), [x, y], lambda p, a, b: p.mul(a, b, 9, BitWidths(ring - 4, ring - 9)), x.shape
    )
    check(run, (x * y) >> 9, prices(protocol).product(Ring(ring), 70, 9), protocol, slack=1)


def test_a_narrow_product_saves_a_round_and_nine_bytes_or_a_fourth() -> None:
    def price(widths: BitWidths | None) -> tuple[float, int]:
        found = trio_cost.product(Ring(64), 64, 18, widths)
        return found.total / 64, found.rounds

    assert price(None) == (30.75, 2)
    assert price(BitWidths(64, 46)) == (21.75, 1)
    assert price(BitWidths(64, 50)) == (23.75, 2)
    assert price(BitWidths(54, 36)) == (18.0, 1)


@pytest.mark.parametrize("widths", [BitWidths(20, 64), BitWidths(65, 40), BitWidths(64, 65), BitWidths(64, 0)])
def test_a_narrow_division_beyond_the_ring_is_refused(widths: BitWidths) -> None:
    x = ring_values(64, (2, 3), 10)
    with pytest.raises(DomainError, match="bit widths"):
        run_ring(config("trio", 64), [x], lambda p, a: p.matmul(a, a.map(Tensor.t), 18, widths=widths), (2, 2))
