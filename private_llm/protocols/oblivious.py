"""The interface of oblivious access: rows of a table at indices that no party learns, and secret orders."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

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
