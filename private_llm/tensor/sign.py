"""Signs as numbers: 1 for what is negative, by a comparison and an injection or by comparison keys."""

from __future__ import annotations

from private_llm.net.ledger import Cost
from private_llm.protocols.one_step import Pieces, PiecesShape
from private_llm.protocols.prices import Prices
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed, arithmetic


def negative(x: Fixed, bits: int | None = None) -> Fixed:
    """1 where x < 0, else 0: x of any shape to [x.numel()], no fractional bits. Exact.

    bits: -2^(bits-1) <= ring element < 2^(bits-1), default the whole ring, in which nothing is out of range. 65 bytes
    an element and 5 rounds for 64 bits (trio); by comparison keys, where those are the way to go, 4 kB and 1 round.
    Raises DomainError unless 2 <= bits <= ring bits.
    """
    ring, x = x.session.ring, x.restore_high_bits()
    bits, count = ring.bits if bits is None else bits, x.numel()
    if not x.proto.takes_keys(count, PiecesShape(1, 1, bits), _price, ring, count, bits):
        return arithmetic(x.session, x.less_than([0.0], bits=bits), [1.0], 0)
    (made,) = x.proto.piecewise(x.share.map(lambda part: part.reshape(-1)), Pieces((0,), (((1, 0),),), ((0, 0),), bits))
    return x.with_share(made, 0)


def _price(prices: Prices, ring: Ring, count: int, bits: int) -> Cost:
    """Of a comparison and an injection."""
    return prices.msb(count, bits) + prices.inject(ring, count, 1, 0, 0)
