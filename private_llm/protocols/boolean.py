"""The interface of comparisons and bits: sign bits of ring elements, gates, and the way between bits and numbers.

Bytes are over all links, preprocessing included, of a count that fills whole words (64 elements); 64-bit ring. Exact
formulas: `prices.py`. Dealer's figures are trio's; plain sends nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence

from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.net.ledger import Cost
from private_llm.protocols.exponential import Exponential
from private_llm.protocols.party_end import PartyEnd
from private_llm.protocols.piecewise import Pieces, PiecesShape
from private_llm.protocols.share import BitShare, Share
from private_llm.protocols.waves import Waves

Weights = Sequence[int | Tensor]
"""Public ring constants: one per bit row, each an int or a tensor of 1 or `count` elements (flattened)."""


def check_injected(bits: BitShare, x: Share | None, weights: Weights, constants: Weights) -> None:
    """Raise DomainError unless x has bits.count elements, and weights and constants are one for each row. Local."""
    for given in (weights, constants):
        if len(given) != bits.rows:
            raise DomainError(f"inject: got {len(given)} constants for {bits.rows} bit rows; want one each")
        sizes = {each.numel() for each in given if isinstance(each, Tensor)} - {1, bits.count}
        if sizes:
            raise DomainError(
                f"inject: got constants of {min(sizes)} elements for {bits.count} bits; want as many, or 1"
            )
    if x is not None and x.numel() != bits.count:
        raise DomainError(f"inject: got x of {x.numel()} elements for {bits.count} bits; want as many")


def check_low(low: int | None, shift: int) -> None:
    """Raise DomainError for a number of low bits that `inject` does not take. Local."""
    if low is not None and (shift or not 1 <= low <= 63):
        raise DomainError(f"inject: got low={low} with a shift of {shift}; want 1 to 63 low bits, and no shift")


class Boolean(PartyEnd):
    """Bits are shared bitwise, 64 elements a word (`BitShare`); a row of n bits is sent as ceil(n / 64) words."""

    has_keys = False
    """Whether `takes_keys` may say yes: a quick look before anything is priced."""

    has_exponentials = False
    """Whether `exponential` is there."""

    has_waves = False
    """Whether `relu_minus_waves` is there."""

    @abstractmethod
    def msb(self, x: Share, offsets: Sequence[int] = (0,), bits: int | None = None, low: int = 0) -> BitShare:
        """Rows of sign bits: row k is [x + offsets[k] < 0], for x flattened; [len(offsets) rows, x.numel()].

        `bits=b` promises -2^(b-1) <= x + offset < 2^(b-1) and uses a shorter adder; default: full ring. `low=d` leaves
        the d lowest positions out of the adder: where 0 <= x + offset < 2^d the bit may be 1 (and the range starts at
        -2^(b-1) + 2^d). All 64 bits with the prefix adder: 4 rounds, 40.75 bytes an element in trio and 74 in quad; 39
        bits: 4 rounds, 24.1 and 43.5. Trio's ripple adder: 63 rounds, 31.6 bytes. Raises DomainError unless 2 <= b <=
        ring bits and 0 <= d <= b - 2 (trio, quad, dealer).
        """

    @abstractmethod
    def inject(
        self, bits: BitShare, x: Share | None, weights: Weights, constants: Weights, shift: int = 0,
        low: int | None = None,
    ) -> Share:  # fmt: skip
        """sum over rows k of bit_k * (weights[k] * x + constants[k]), divided by 2^shift.

        `x` is flattened to [count]; with `x=None` the weights are ignored (bit to arithmetic). Result is 1-D [count]. 1
        round (2 with a shift). One row without shift, bytes an element: 32 with a weight and 24 without in trio, 56 and
        40 in quad. With `low`, which goes without shift, only the lowest `low` bits of the result are right, and trio
        and dealer send as many of each number (64-bit ring). Raises DomainError unless x has bits.count elements and
        weights and constants are one for each row, and for an impossible `low`.
        """

    def takes_keys(
        self, count: int, shape: PiecesShape, other: Callable[..., Cost], *facts: Hashable
    ) -> bool:  # fmt: skip
        """Whether `piecewise` on `count` elements is the way to go, where another way costs other(prices, *facts).

        Local and public. By `PrivateConfig.adder` and the stated network, once for each `other`, which is a function
        of a module, and facts; False where the protocol has no such keys.
        """
        return False

    def key_seconds(self, count: int, shape: PiecesShape) -> float | None:
        """How long `piecewise` on `count` elements takes on the stated network, the cipher's work included.

        Local and public. None where no network is stated, or the protocol has no such keys.
        """
        return None

    def piecewise(self, x: Share, pieces: Pieces) -> list[Share]:
        """Piecewise polynomials of x with common thresholds, in one round: a share of x's shape for each output.

        1 round, or 2 for each different shift above 0. 64-bit ring, degree 1, b bits without the d lowest: 64 (b - 1 -
        d) bytes of keys an element, and some 60 bytes. Errors: only the rounding of a shift. Raises DomainError for
        bits and low as `msb`, and UnsupportedOp under a protocol without comparison keys (only trio and dealer have
        them).
        """
        raise UnsupportedOp("comparison keys: this protocol has none; want trio or dealer, or another adder")

    def exponential(self, x: Share, keep: BitShare, plan: Exponential) -> Share:
        """bit_n * e^(x_n / 2^plan.frac), with TOTAL_BITS - plan.shift fractional bits, in the shape of x; 64-bit ring.

        Where the bit is 1, x / 2^plan.frac lies in [TOP - SPAN, TOP), -15 to 1; elsewhere x may be anything. Relative
        error 2^-15, absolute 2^-18 and one unit. 2 rounds; 65.75 bytes an element in trio with 24 fractional bits of
        the result. Raises DomainError in a 32-bit ring and unless keep is one row of as many bits, and UnsupportedOp
        under a protocol without it (`has_exponentials`).
        """
        raise UnsupportedOp("exponentials in one step: this protocol has none; want trio or dealer")

    def relu_minus_waves(self, x: Share, negative: BitShare, angle: Share, plan: Waves) -> Share:
        """(1 - bit_n) x_n less the sum of waves of angle_n, with `plan.frac` fractional bits, in the shape of x.

        Of angles the lowest plan.angle_bits bits count, of x plan.bits, and as many are right. 64-bit ring. Error of
        the sum: 2 units, and what its tables lose (`protocols.waves`). 2 rounds; bytes an element in trio: 4 bits / 8,
        2 wide / 8, and those of the waves' shares and of 2 (bits - narrow) bits. Raises DomainError in a 32-bit ring
        and unless there are one row of bits and as many angles, and UnsupportedOp under a protocol without it
        (`has_waves`).
        """
        raise UnsupportedOp("sums of waves: this protocol has none; want trio or dealer, without exact divisions")

    @abstractmethod
    def xor(self, x: BitShare, y: BitShare) -> BitShare:
        """Bitwise exclusive or x ^ y, of equal rows and count, which nobody checks; as many rows. Local."""

    @abstractmethod
    def invert(self, x: BitShare) -> BitShare:
        """Bitwise not, of the rows and count of x. Local."""

    @abstractmethod
    def and_(self, x: BitShare, y: BitShare) -> BitShare:
        """Bitwise and x & y, row by row, of equal rows and count: 1 round; 3 bits a gate in trio, 5 in quad.

        Raises TransportError if parties were given different sizes.
        """

    @abstractmethod
    def a2b(self, x: Share, bits: int | None = None) -> BitShare:
        """The `bits` lowest bits of x (flattened), default all: [bits rows, x.numel()], row i holds bit i of x.

        A ripple adder, whatever `PrivateConfig.adder` says: bits - 1 rounds (63); 31.6 bytes an element in trio, 55.4
        in quad, for 64 bits. Raises DomainError unless 2 <= bits <= ring bits (trio, quad, dealer).
        """
