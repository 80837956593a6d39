"""The interface of oblivious access: rows of a table at indices that no party learns."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from private_llm.protocols.party_end import PartyEnd
from private_llm.protocols.share import Index, Share


class Oblivious(PartyEnd):
    """The client shares indices (`Index`); which rows are read shows in no message. Bytes: in the 64-bit ring."""

    @abstractmethod
    def receive_index(self, count: int, domain: int) -> Index:
        """This party's hold on `count` indices in 0 .. domain-1 that the client shares right now.

        From the client, bytes an index (L = ceil(log2 domain), domain > 1): trio 2 keys of 24 + 16 L to each of three
        parties, quad 4 to each of four; as one-hot rows (dealer, preprocessed calls) 8 domain to each party that
        receives inputs.
        """

    @abstractmethod
    def lookup(self, index: Index, table: Share | Tensor) -> Share:
        """Rows of `table` [domain, D] at the secret indices: [count, D]. A plain table holds public ring elements.

        1 round, whatever the domain; bytes an output in trio 24 for a shared table and 16 for a public one, in quad 40
        and 24. From one-hot rows a shared table costs the same, a public one nothing. Nothing is truncated.
        """
