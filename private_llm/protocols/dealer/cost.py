"""What `dealer` sends and waits for: as Trio (links from 0 are the dealer's), except what is here."""

from __future__ import annotations

from private_llm.net.ledger import Cost
from private_llm.protocols.share import words_for
from private_llm.protocols.trio.cost import (
    a2b,
    exponential,
    finish,
    gate,
    inject,
    input_from_client,
    msb,
    msb_ripple,
    open_shuffled,
    piecewise,
    poly,
    product,
    relu_minus_waves,
    reveal_to_client,
    truncate,
)
from private_llm.ring.ring import Ring

__all__ = [
    "a2b", "exponential", "finish", "gate", "index_from_client", "inject", "input_from_client", "lookup", "msb",
    "msb_ripple", "open_shuffled", "permutation",
    "piecewise", "poly", "product", "relu_minus_waves", "remask", "reveal_to_client", "shuffle",
    "shuffle_bits", "truncate",
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


def permutation(size: int) -> Cost:
    """One of the sub-permutations, 4 bytes an element, to party 2."""
    return Cost({(0, 2): 4 * size})


def shuffle(ring: Ring, count: int, hidden: bool = True, undo: bool = False, left: int | None = None) -> Cost:
    """Moving `count` elements: two before, one each way, 1 round; hidden: one each way more (undone: in a round).

    left: of a hidden order, so many are wanted: that one more is of these alone.
    """
    return _moved(count * ring.bytes, hidden, undo, None if left is None else left * ring.bytes)


def shuffle_bits(count: int, rows: int = 1, hidden: bool = True, undo: bool = False) -> Cost:
    """Moving bit vectors of `count` bits, in words, or back with `undo`."""
    return _moved(8 * words_for(count) * rows, hidden, undo)


def _moved(size: int, hidden: bool, undo: bool, left: int | None = None) -> Cost:
    online = size + (size if left is None else left) if hidden else size
    return Cost({(0, 2): 2 * size, (1, 2): online, (2, 1): online}, 2 if hidden and undo else 1)
