"""The interface of the client's end of a protocol, in ring elements: how values enter and leave the sharing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.net.transport import Transport
from private_llm.protocol_facts import names_where
from private_llm.ring.ring import Ring


class ClientEnd(ABC):
    """The client's end, over links to all parties. Calls come in the parties' order. Values are ring elements."""

    cipher: str | None = None
    """Of the parties' streams, as they said when they met; None: they were not asked."""

    def __init__(self, transport: Transport, ring: Ring) -> None:
        self.transport, self.ring = transport, ring

    @abstractmethod
    def share(self, elements: Tensor) -> None:
        """Share ring elements of any shape with the parties, who call `receive_input` with the same shape.

        8 bytes each (4 in the 32-bit ring) to two parties (trio, dealer), three (quad) or one (plain). No round is
        booked.
        """

    @abstractmethod
    def share_index(self, indices: Tensor, domain: int) -> None:
        """Share int64 indices [T] below `domain`; the parties call `receive_index(T, domain)`.

        Bytes: as `receive_index`. No round is booked. Raises DomainError for an index outside the domain; the message
        does not name the index.
        """

    @abstractmethod
    def open(self, shape: tuple[int, ...]) -> Tensor:
        """Ring elements of `shape` that the parties reveal right now. Raises ProtocolAbort if a lie is noticed (quad).

        8 bytes an element (4 in the 32-bit ring) from two parties; quad adds 32 bytes from each of the other two; under
        plain from the one party. No round is booked.
        """

    def section(self, label: str) -> AbstractContextManager[None]:
        """Around a call that was preprocessed: masks are drawn apart, once for each `label`, as at the parties. Local.

        Raises UnsupportedOp for a protocol without separate preprocessing.
        """
        wanted = names_where(lambda facts: facts.helper is not None)
        raise UnsupportedOp(f"this protocol has no separate preprocessing; want {wanted}")

    def take_digests(self, digests: Sequence[str]) -> None:  # noqa: B027 - semi-honest protocols need none
        """What the party that ran ahead gave to check openings with (hexadecimal, in order).

        From `PartyEnd.take_digests`. Local; replaces older ones. Quad raises ProtocolAbort for what is no digest.
        """
