"""What `dealer` sends and waits for: as Trio (links from 0 are the dealer's), except what is here."""

from __future__ import annotations

from private_llm.net.ledger import Cost
from private_llm.protocols.trio.cost import (
    a2b,
    finish,
    gate,
    inject,
    input_from_client,
    msb,
    msb_ripple,
    poly,
    product,
    reveal_to_client,
    truncate,
)
from private_llm.ring.ring import Ring

__all__ = [
    "a2b", "finish", "gate", "index_from_client", "inject", "input_from_client", "lookup", "msb", "msb_ripple", "poly",
    "product", "remask", "reveal_to_client", "truncate",
]  # fmt: skip


def remask(ring: Ring, *operands: int) -> Cost:
    """Fresh masks for operands of these many elements: all of them each way, 1 round; nothing from the dealer."""
    count = sum(operands) * ring.bytes
    return Cost({(1, 2): count, (2, 1): count}, 1)


def index_from_client(ring: Ring, count: int, domain: int) -> Cost:
    """One-hot rows: `domain` elements an index (8 domain bytes in a 64-bit ring) to each computing party."""
    return input_from_client(ring, count * domain)


def lookup(ring: Ring, count: int, width: int, public: bool = False) -> Cost:
    """One-hot rows times a table: one finish; local for a public table."""
    return Cost() if public else finish(ring, count * width, 0, helped=True)
