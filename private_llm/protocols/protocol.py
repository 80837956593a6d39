"""The interface of every protocol, in ring elements; fixed-point meaning lives above, in `tensor`.

All parties run the same calls in the same order (SPMD). Shapes, shifts, thresholds and coefficients are
public; only `Share`, `BitShare` and `Index` contents are secret. Every protocol states the price of each primitive
(prices.py), which the common test suite compares with the ledger.

The interface of oblivious access: rows of a table at indices that no party learns, and secret orders.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from private_llm.net.transport import CLIENT
from private_llm.protocols.arithmetic import Arithmetic
from private_llm.protocols.boolean import Boolean
from private_llm.protocols.party_end import PartyEnd
from private_llm.protocols.permutation import Permutation, ShuffledBits
from private_llm.protocols.share import BitShare, Index, Share


class Oblivious(PartyEnd):
    """The client shares indices (`Index`); which rows are read shows in no message.

    Bytes: over all links, in the 64-bit ring, dealer's as trio's where nothing else is said. Formulas: `prices.py`.
    """

    @abstractmethod
    def receive_index(self, count: int, domain: int) -> Index:
        """This party's hold on `count` indices in 0 .. domain-1 that the client shares right now.

        From the client, bytes an index (L = ceil(log2 domain), domain > 1): trio 2 keys of 24 + 16 L to each of three
        parties, quad 4 to each of four; as one-hot rows (dealer, preprocessed calls) 8 domain to each party that
        receives inputs; plain 8. No round is booked.
        """

    @abstractmethod
    def lookup(self, index: Index, table: Share | Tensor) -> Share:
        """Rows of `table` [domain, D] at the secret indices: [count, D]. A plain table holds public ring elements.

        1 round, whatever the domain; bytes an output in trio 24 for a shared table and 16 for a public one, in quad 40
        and 24. From one-hot rows a shared table costs the same, a public one nothing. Nothing is truncated. Raises
        DomainError for a table of another number of rows than the index's domain (not under plain).
        """

    @abstractmethod
    def permutation(self, size: int, *, hidden: bool = True, reuse: bool = False, blocks: int = 1) -> Permutation:
        """A fresh, uniform, secret permutation of `size` elements. Local (dealer: 4 bytes an element to party 2).

        hidden: no party knows it, so what is shuffled may be opened to all. Otherwise the helping party of trio and
        dealer knows it (quad: nobody, ever), shuffles cost less, and nothing in this order is opened to that party.
        reuse: several bit vectors may be opened in this order, which links them (`Permutation`). blocks: that many
        equal runs of elements, each in an order of its own. Raises DomainError for a size below 1, or unequal runs.
        """

    @abstractmethod
    def random_bits(self, rows: int, count: int) -> BitShare:
        """Uniform secret bits that no party knows (plain: in the clear): [rows, count]. Local."""

    @abstractmethod
    def shuffle(self, x: Share, order: Permutation, undo: bool = False, places: Tensor | None = None) -> Share:
        """Rows of x [n, ...] in the secret order, under fresh masks; `undo` puts shuffled rows back. Comet, Protocol 1.

        places: int64 [m], public: the only rows of the result that are wanted, of a hidden order and without `undo`.
        The shape of x, or [m, ...]. Bytes a moved element: trio 24, dealer 32, with hidden=True 40 and 48, quad 96 (and
        64 in all); hidden with places 16 and 32, and 24 and 16 for each that is wanted.
        Rounds: trio 2 (3 to undo a hidden one), dealer 1 (2), quad 3. Raises DomainError unless n is the permutation's
        size, and for other places; in quad UnsupportedOp in preprocessed calls, and ProtocolAbort for a lie.
        """

    @abstractmethod
    def shuffle_bits(self, x: BitShare, order: Permutation) -> ShuffledBits:
        """All bit vectors in the same secret order. Rounds as `shuffle`, the bytes of a word as those of an element.

        Raises DomainError unless the vectors have the permutation's size; otherwise as `shuffle`.
        """

    @abstractmethod
    def unshuffle_bits(self, x: ShuffledBits) -> BitShare:
        """The vectors as they were ordered before `shuffle_bits`, rows and count alike.

        Rounds as `shuffle` with `undo`, bytes as there.
        """

    @abstractmethod
    def open_shuffled(self, x: ShuffledBits) -> Tensor | None:
        """The bits in their secret order, to the parties: bool [rows, count]; None at a party that knows the order.

        What is learned: how many bits are set, and which of two vectors' set bits coincide if they share an order.
        1 round; bits sent for each opened one: trio and dealer 2, 3 if hidden; quad 4 and 129 bytes, after a `verify`
        (3 rounds in all). Raises ProtocolAbort for a second vector in an order that is not declared for reuse, and for
        a lie (quad); UnsupportedOp in preprocessed calls, under quad or if the order is hidden.
        """


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
