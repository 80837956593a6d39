"""The interface of oblivious access: rows of a table at indices that no party learns."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from private_llm.protocols.party_end import PartyEnd
from private_llm.protocols.share import Index, Share


class Oblivious(PartyEnd):
    """The client shares indices (`Index`); which rows are read shows in no message."""

    @abstractmethod
    def receive_index(self, count: int, domain: int) -> Index:
        """This party's hold on `count` indices in 0 .. domain-1 that the client shares right now."""

    @abstractmethod
    def lookup(self, index: Index, table: Share | Tensor) -> Share:
        """Rows of `table` [domain, D] at the secret indices: [count, D]. A plain table holds public ring elements."""
