"""The edges of `plain`: values enter and leave in the clear."""

from __future__ import annotations

from torch import Tensor

from private_llm.errors import DomainError
from private_llm.net.transport import Transport
from private_llm.protocols.client_end import ClientEnd
from private_llm.ring.ring import Ring


class PlainClient(ClientEnd):
    """Client end of `plain`."""

    def share(self, elements: Tensor) -> None:
        """Hand ring elements of any shape to the party: 8 bytes each (4 in the 32-bit ring)."""
        self.transport.send(0, "input", elements.contiguous())

    def share_index(self, indices: Tensor, domain: int) -> None:
        """Hand indices below `domain` to the party, 8 bytes each.

        Raises DomainError for an index outside the domain.
        """
        if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= domain):
            raise DomainError(f"an index lies outside 0 .. {domain - 1}")
        self.transport.send(0, "index", indices.reshape(-1).contiguous())

    def open(self, shape: tuple[int, ...]) -> Tensor:
        """Ring elements of `shape` that the party reveals: 8 bytes each (4 in the 32-bit ring)."""
        return open_plain(self.transport, self.ring, shape)


def open_plain(transport: Transport, ring: Ring, shape: tuple[int, ...]) -> Tensor:
    """Ring elements of `shape` that the party reveals to this endpoint right now."""
    return transport.recv(0, "reveal", shape, ring.dtype)
