"""Polynomials as short chains of products: each step multiplies two affine forms of all earlier values.

A polynomial of degree 8 takes three protocol products, one of degree 16 four, each with its truncation, instead of
one product per degree (Paterson and Stockmeyer 1973; Knuth, TAOCP 4.6.4 "adaptation of coefficients"). The forms
have public integer weights, so they are local; `scripts/fitting/fit_tables.py` finds weights for which the
whole chain is close to a function, and rounds them one form after the other, refitting the rest.

    v0 = z,  v_i = (a + sum_j<i a_j v_j)(b + sum_j<i b_j v_j),  result v_k

Cost: a product with its shift per step, so 24 + 3 shift / 8 bytes an element and 2 rounds each (64-bit ring).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.net.ledger import Cost
from private_llm.protocols.prices import Prices
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.share import Share
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed


@dataclass(frozen=True)
class Form:
    """(constant + sum_j weights[j] * raw_j) / 2^frac, where raw_j are the ring elements of v_j. Local."""

    frac: int
    constant: int
    weights: tuple[int, ...]

    @cached_property
    def terms(self) -> tuple[tuple[int, int], ...]:
        """(j, weight) of the v_j that count."""
        return tuple((index, weight) for index, weight in enumerate(self.weights) if weight)


@dataclass(frozen=True)
class Step:
    """left * right, held with `frac` fractional bits."""

    left: Form
    right: Form
    frac: int


@dataclass(frozen=True, eq=False)
class Chain:
    """A fitted chain.

    The argument z has `argument` fractional bits. `error` bounds |chain - function| (absolute), rounding of the weights
    included. |left * right| * 2^(left.frac + right.frac) stays below 2^61 over the domain (checked by the fit).
    """

    argument: int
    error: float
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Cubic:
    """sum_k coefficients[k] (y - centre)^k ~ y^power, for y in [1, top] and `slack` beyond, with relative `error`."""

    power: float
    centre: float
    slack: float
    error: float
    coefficients: tuple[float, float, float, float]


def evaluate(chain: Chain, z: Fixed, frac: int | None = None) -> Fixed:
    """The chain at z (any shape), with `frac` fractional bits (default: those of its table).

    2 rounds a step; 105 to 185 bytes an element for the tables here. Raises DomainError in a ring of fewer than 64 bits
    (the products would not fit) and for a z of other fractional bits than the chain's.
    """
    need_wide_ring(z, "this approximation")
    if z.frac != chain.argument:
        raise DomainError(f"chain: got an argument with {z.frac} fractional bits; want {chain.argument}")
    proto = z.proto
    values = [z.share]
    for index, step in enumerate(chain.steps):
        last = index == len(chain.steps) - 1
        out = step.frac if frac is None or not last else frac
        left, right = _form(proto, values, step.left), _form(proto, values, step.right)
        values.append(proto.mul(left, right, step.left.frac + step.right.frac - out))
    return z.with_share(values[-1], out)


def price(chain: Chain, ring: Ring, count: int, prices: Prices) -> Cost:
    """What `evaluate` costs for `count` elements. Local and public."""
    total = Cost()
    for step in chain.steps:
        total += prices.product(ring, count, step.left.frac + step.right.frac - step.frac)
    return total


def need_wide_ring(x: Fixed, what: str) -> None:
    """Raise DomainError, which names `what`, unless the ring has 64 bits."""
    if x.session.ring.bits < 64:
        raise DomainError(
            f"{what}: its products need a 64-bit ring; got {x.session.ring.bits} bits (set ring=64, or use ReLU models)"
        )


def _form(proto: Protocol, values: list[Share], form: Form) -> Share:
    (first, weight), *more = form.terms
    if weight == 1 and not more:
        total = values[first]
    else:
        total = Share(tuple([_weighted(values, form, part) for part in range(len(values[first].parts))]))
    return proto.add_public(total, form.constant) if form.constant else total


def _weighted(values: list[Share], form: Form, part: int) -> Tensor:
    (first, weight), *more = form.terms
    out = values[first].parts[part] * weight
    for index, weight in more:
        torch.add(out, values[index].parts[part], alpha=weight, out=out)
    return out
