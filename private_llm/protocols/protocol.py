"""The interface of every protocol, in ring elements; fixed-point meaning lives above, in `tensor`.

All parties run the same calls in the same order (SPMD). Shapes, shifts, thresholds and coefficients are
public; only `Share`, `BitShare` and `Index` contents are secret. Every protocol states the price of each primitive
(prices.py), which the common test suite compares with the ledger.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from private_llm.net.transport import CLIENT
from private_llm.protocols.arithmetic import Arithmetic
from private_llm.protocols.boolean import Boolean
from private_llm.protocols.oblivious import Oblivious
from private_llm.protocols.share import Share


class Protocol(Arithmetic, Boolean, Oblivious):
    """One party's end of a protocol: arithmetic, bits, oblivious access, and the edges of the sharing."""

    @abstractmethod
    def receive_input(self, shape: tuple[int, ...]) -> Share:
        """This party's part of ring elements of `shape` that the client shares right now.

        From the client 8 bytes an element (4 in the 32-bit ring) to each of two parties (trio, dealer), three (quad) or
        one (plain). No round is booked. Raises TransportError if the client sends another shape.
        """

    def verify(self) -> None:
        """Make sure that no party has deviated so far; openings do it first. Raises ProtocolAbort.

        Semi-honest protocols trust that nobody has, and do nothing. Quad: 35 bytes in all and 2 rounds, whatever was
        computed.
        """

    @abstractmethod
    def reveal(self, pieces: Sequence[tuple[int, Share]]) -> None:
        """Send each endpoint outside the parties what it needs to open its piece; the parties learn nothing.

        pieces: (number of the endpoint, a share of any shape). It opens them with `protocols.session.opened`. 16 bytes
        an element (8 in the 32-bit ring; plain: half), no round; in quad 64 bytes a piece more, after one `verify` with
        its 2 rounds, which raises ProtocolAbort and sends nothing if a party deviated.
        """

    def reveal_to_client(self, x: Share) -> None:
        """`reveal` of one value to the client: cost and errors as `reveal`."""
        self.reveal([(CLIENT, x)])
