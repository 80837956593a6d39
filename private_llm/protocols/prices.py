"""What a protocol says of its prices: what each primitive sends and waits for, as formulas of public shapes.

A module of functions fits it (trio/cost.py); the common test suite compares it with the ledger, byte for byte.
"""

from __future__ import annotations

from typing import Protocol

from private_llm.net.ledger import Cost
from private_llm.protocols.arithmetic import BitWidths
from private_llm.ring.ring import Ring


class Prices(Protocol):
    """Each returns bytes by link and online rounds.

    Counts are numbers of elements, widths numbers of columns, shifts and ranges numbers of bits; bits are packed into
    words of 8 bytes.
    """

    def product(self, ring: Ring, count: int, shift: int, widths: BitWidths | None = None) -> Cost:
        """`mul` and `bilinear` with `count` outputs, whatever the sums are over, divided by 2^shift."""

    def truncate(self, ring: Ring, count: int, shift: int) -> Cost:
        """`truncate` of `count` elements by `shift` bits; nothing for a shift of 0."""

    def poly(self, ring: Ring, count: int, degree: int, shift: int) -> Cost:
        """`poly` of `degree` 2 or 3 at `count` elements, divided by 2^shift."""

    def msb(self, count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
        """`msb` with the prefix adder: values of `bits` bits without the `low` lowest, against `thresholds` offsets."""

    def msb_ripple(self, count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
        """The same with the ripple adder: fewer bytes for one threshold, bits - 1 - low rounds."""

    def a2b(self, ring: Ring, count: int, bits: int | None = None) -> Cost:
        """`a2b` of `count` elements, `bits` of each (None: all): always the ripple adder."""

    def gate(self, count: int, rows: int = 1) -> Cost:
        """`and_` of `rows` bit vectors of `count` elements."""

    def inject(self, ring: Ring, count: int, rows: int, weighted: int, shift: int, low: int | None = None) -> Cost:
        """`inject` of `rows` bits for `count` elements, `weighted` of them times x, divided by 2^shift, or narrow."""

    def lookup(self, ring: Ring, count: int, width: int, public: bool = False) -> Cost:
        """`lookup` of `count` indices in a table of `width` columns, shared or public; what the client sends apart."""

    def index_from_client(self, ring: Ring, count: int, domain: int) -> Cost:
        """`receive_index` of `count` indices below `domain`; no round is booked for waiting for the client."""

    def input_from_client(self, ring: Ring, count: int) -> Cost:
        """`receive_input` of `count` elements; no round is booked for waiting for the client."""

    def reveal_to_client(self, ring: Ring, count: int) -> Cost:
        """`reveal_to_client` of `count` elements, with the verification before it (quad: 2 rounds)."""

    def permutation(self, size: int) -> Cost:
        """`permutation` of `size` elements."""

    def shuffle(
        self, ring: Ring, count: int, hidden: bool = True, undo: bool = False, left: int | None = None
    ) -> Cost:  # fmt: skip
        """`shuffle` of `count` elements in all (rows times columns), of which `left` are wanted (None: all)."""

    def shuffle_bits(self, count: int, rows: int = 1, hidden: bool = True, undo: bool = False) -> Cost:
        """`shuffle_bits` of `rows` vectors of `count` bits, or with `undo` `unshuffle_bits`."""

    def open_shuffled(self, count: int, rows: int = 1, hidden: bool = True) -> Cost:
        """`open_shuffled` of `rows` vectors of `count` bits, with the verification before it (quad: 2 rounds)."""
