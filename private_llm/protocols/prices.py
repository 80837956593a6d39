"""What a protocol says of its prices: what each primitive sends and waits for, as formulas of public shapes.

A module of functions fits it (trio/cost.py); the common test suite compares it with the ledger, byte for byte.
"""

from __future__ import annotations

from typing import Protocol

from private_llm.net.ledger import Cost
from private_llm.ring.ring import Ring


class Prices(Protocol):
    """Counts are numbers of elements, widths numbers of columns, shifts and ranges numbers of bits."""

    def product(self, ring: Ring, count: int, shift: int) -> Cost:
        """`mul` and `bilinear` with `count` outputs."""

    def truncate(self, ring: Ring, count: int, shift: int) -> Cost:
        """`truncate`."""

    def poly(self, ring: Ring, count: int, degree: int, shift: int) -> Cost:
        """`poly`."""

    def msb(self, count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
        """`msb` with the prefix adder."""

    def msb_ripple(self, count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
        """`msb` with the ripple adder."""

    def a2b(self, ring: Ring, count: int) -> Cost:
        """`a2b`."""

    def gate(self, count: int, rows: int = 1) -> Cost:
        """`and_`."""

    def inject(self, ring: Ring, count: int, rows: int, weighted: int, shift: int) -> Cost:
        """`inject` of `rows` bits, `weighted` of them times x."""

    def lookup(self, ring: Ring, count: int, width: int, public: bool = False) -> Cost:
        """`lookup` in a shared or public table."""

    def input_from_client(self, ring: Ring, count: int) -> Cost:
        """`receive_input`."""

    def reveal_to_client(self, ring: Ring, count: int) -> Cost:
        """`reveal_to_client`."""
