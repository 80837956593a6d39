"""The interface of every protocol, in ring elements; fixed-point meaning lives above, in `tensor`.

All parties run the same calls in the same order (SPMD). Shapes, shifts, thresholds and coefficients are
public; only `Share` and `BitShare` contents are secret. `shift=s` divides the exact result by 2^s
(floor, plus at most one unit) and requires |result before division| < 2^(ring bits - 2).
Every method states its price through `cost`, which the common test suite compares with the ledger.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.kernels.forms import Conv2d, Form, Matmul
from private_llm.net.ledger import Ledger
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocol_facts import names_where
from private_llm.protocols.share import BitShare, Index, Share
from private_llm.ring.ring import Ring

Weights = Sequence[int | Tensor]
"""Public ring constants: one per bit row, an int or a tensor broadcastable to the shape."""


Links = Callable[[Transport], Transport]
"""What puts something between a protocol and its links."""


class Protocol(ABC):
    """One party's end of a protocol."""

    name: str
    divides_exactly = False
    """Whether every division is the floor, never one unit more."""

    def __init__(self, party: int, transport: Transport, ring: Ring) -> None:
        self.party = party
        self.transport = transport
        self.ring = ring
        self.device: torch.device | str = "cpu"
        self.placed = False

    def on(self, device: torch.device | str) -> Self:
        """This end, drawing and receiving on `device` from now on: where the operands of the next operation lie."""
        self.device = device
        return self

    def stretch(self, label: str, links: Links = lambda transport: transport) -> AbstractContextManager[None]:
        """Inside, masks are drawn apart (once for each `label`), over `links`: the helper may run ahead.

        Raises UnsupportedOp for a protocol without separate preprocessing.
        """
        wanted = names_where(lambda facts: facts.helper is not None)
        raise UnsupportedOp(f"protocol '{self.name}' has no separate preprocessing; want {wanted}")

    def may_wrap(self) -> AbstractContextManager[None]:
        """Around steps whose values may leave the ring, because what wrapped is multiplied by zero later on.

        Only debug sessions, which refuse every other wrap, do anything here.
        """
        return nullcontext()

    def expect_rows(self, what: str, x: Share, square: float) -> None:  # noqa: B027 - debug sessions alone look
        """State that the sums of squares of rows, in squared ring elements, are below `square`."""

    def take_witnesses(self) -> list[str]:
        """What the client needs of a party that ran ahead to check what others will open (hexadecimal, in order)."""
        return []

    @property
    def ledger(self) -> Ledger:
        """Counts of what this party sent and waited for."""
        return self.transport.ledger

    # -- local (no communication) ---------------------------------------------------------------------
    def add(self, x: Share, y: Share) -> Share:
        """x + y, broadcasting. Local."""
        return Share(tuple(a + b for a, b in zip(x.parts, y.parts, strict=True)))

    def sub(self, x: Share, y: Share) -> Share:
        """x - y, broadcasting. Local."""
        return Share(tuple(a - b for a, b in zip(x.parts, y.parts, strict=True)))

    def neg(self, x: Share) -> Share:
        """-x. Local."""
        return x.map(lambda part: -part)

    def mul_public(self, x: Share, c: int | Tensor) -> Share:
        """x times public ring constants, broadcasting, no truncation. Local."""
        return x.map(lambda part: part * c)

    @abstractmethod
    def add_public(self, x: Share, c: int | Tensor) -> Share:
        """x plus public ring constants, broadcasting. Local."""

    @abstractmethod
    def public(self, c: Tensor) -> Share:
        """A share of public ring elements (known to everybody). Local."""

    # -- products ---------------------------------------------------------------------------------------
    @abstractmethod
    def truncate(self, x: Share, shift: int) -> Share:
        """floor(x / 2^shift), plus at most one unit."""

    @abstractmethod
    def mul(self, x: Share, y: Share, shift: int = 0) -> Share:
        """Elementwise product with broadcasting, divided by 2^shift."""

    @abstractmethod
    def bilinear(self, form: Form, x: Share, y: Share, shift: int = 0, select: Tensor | None = None) -> Share:
        """B(x, y) of a bilinear form, divided by 2^shift; traffic of one finish of the output's size.

        With `select` (int64, flat positions in the output) only those outputs are made, as a 1-D share;
        nothing is sent for the others.
        """

    def matmul(self, x: Share, y: Share, shift: int = 0, select: Tensor | None = None) -> Share:
        """torch.matmul of x [..., M, K] and y [..., K, N], divided by 2^shift; `select` as in `bilinear`."""
        return self.bilinear(Matmul(), x, y, shift, select)

    def conv2d(self, x: Share, w: Share, conv: Conv2d, shift: int = 0) -> Share:
        """Convolution of x [B, C, H, W] with w [O, C / groups, kh, kw], divided by 2^shift."""
        return self.bilinear(conv, x, w, shift)

    def bilinear_public(self, form: Form, x: Share, c: Tensor, shift: int = 0, left: bool = False) -> Share:
        """B(x, c), or B(c, x) if `left`, for public ring elements c, divided by 2^shift: local but for a truncation."""
        made = x.map(lambda part: form.product(c, part) if left else form.product(part, c))
        macs = form.macs(c.shape, x.shape) if left else form.macs(x.shape, c.shape)
        self.ledger.add_macs(macs * len(x.parts))
        return self.truncate(made, shift)

    @abstractmethod
    def poly(self, x: Share, coefficients: Sequence[int], shift: int = 0) -> Share:
        """c0 + c1 x + c2 x^2 (+ c3 x^3) with public ring coefficients (degree 2 or 3), in one step, divided by 2^shift.

        The exact value before division must stay below 2^(ring bits - 2).
        """

    # -- comparisons and bits -------------------------------------------------------------------------
    @abstractmethod
    def msb(self, x: Share, offsets: Sequence[int] = (0,), bits: int | None = None, low: int = 0) -> BitShare:
        """Rows of sign bits: row k is [x + offsets[k] < 0], for x flattened.

        `bits=b` promises -2^(b-1) <= x + offset < 2^(b-1) and uses a shorter adder; default: full ring.
        `low=d` leaves the d lowest positions out of the adder: where 0 <= x + offset < 2^d the bit may be 1
        (and the range starts at -2^(b-1) + 2^d).
        """

    @abstractmethod
    def inject(self, bits: BitShare, x: Share | None, weights: Weights, constants: Weights, shift: int = 0) -> Share:
        """sum over rows k of bit_k * (weights[k] * x + constants[k]), divided by 2^shift.

        `x` is flattened to [count]; with `x=None` the weights are ignored (bit to arithmetic). Result is 1-D [count].
        """

    @abstractmethod
    def xor(self, x: BitShare, y: BitShare) -> BitShare:
        """Bitwise exclusive or. Local."""

    @abstractmethod
    def invert(self, x: BitShare) -> BitShare:
        """Bitwise not. Local."""

    @abstractmethod
    def and_(self, x: BitShare, y: BitShare) -> BitShare:
        """Bitwise and, rows by rows."""

    @abstractmethod
    def a2b(self, x: Share) -> BitShare:
        """All bits of x (flattened): row i holds bit i, least significant first."""

    # -- leaving and entering the sharing ----------------------------------------------------------------
    @abstractmethod
    def receive_input(self, shape: tuple[int, ...]) -> Share:
        """This party's part of ring elements that the client shares right now."""

    @abstractmethod
    def receive_index(self, count: int, domain: int) -> Index:
        """This party's hold on `count` indices in 0 .. domain-1 that the client shares right now."""

    @abstractmethod
    def lookup(self, index: Index, table: Share | Tensor) -> Share:
        """Rows of `table` [domain, D] at the secret indices: [count, D]. A plain table holds public ring elements."""

    def verify(self) -> None:  # noqa: B027 - semi-honest protocols trust that nobody deviates
        """Make sure that no party has deviated so far; openings do it first. Raises ProtocolAbort."""

    @abstractmethod
    def reveal(self, pieces: Sequence[tuple[int, Share]]) -> None:
        """Send each endpoint outside the parties what it needs to open its piece; the parties learn nothing.

        It opens them with `protocols.session.opened`.
        """

    def reveal_to_client(self, x: Share) -> None:
        """`reveal` of one value to the client."""
        self.reveal([(CLIENT, x)])
