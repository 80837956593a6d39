"""The links of Quad as Trio's code sees them: role 0 is played by parties 0 and 3, roles 1 and 2 by parties 1 and 2.

What role 0 sends to role 2 is sent by party 3; party 0 computes the same bytes and absorbs them into its transcript
with party 2, who absorbs what it received. A `Member` addresses a party itself. Plain numbers from 4 on are endpoints
that have no role: nodes after a split, and the client.
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.errors import TransportError
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.quad.transcript_mac import TranscriptMac

_ROLES = (0, 1, 2)
_PARTIES = 4


class Member(int):
    """The address of a party itself, where its bare number would mean a role.

    A type of its own and no range of numbers: every number from 4 on may be a node's, who must never get what is
    meant for a party, nor a party what is meant for a node.
    """

    def __new__(cls, party: int) -> Member:
        """Raises TransportError for a number that is no party's."""
        if not 0 <= party < _PARTIES:
            raise TransportError(f"member: got {party}; want a party of quad, 0 to {_PARTIES - 1}")
        return super().__new__(cls, party)


class RoleTransport(Transport):
    """`inner`, whose ledger it shares, addressed by role. `transcripts`: this party's ends, by the other party.

    Every method raises TransportError for a number that is neither a role nor an endpoint without one.
    """

    def __init__(self, inner: Transport, party: int, transcripts: dict[int, TranscriptMac]) -> None:
        super().__init__(inner.me)
        self.ledger = inner.ledger
        self._inner, self._party, self._transcripts = inner, party, transcripts

    def send(self, to: int, tag: str, payload: Tensor) -> None:
        """Send and book under the number of the receiving party; party 0 only absorbs what role 0 sends."""
        if self._party == 0 and to == 2 and not isinstance(to, Member):
            self._transcripts[2].absorb(payload)
        else:
            self._inner.send(self._at(to), tag, payload)

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        self._inner._send(self._at(to), tag, payload)

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        payload = self._inner._recv(self._at(frm), tag, shape, dtype)
        if frm == 0 and not isinstance(frm, Member):
            self._transcripts[0].absorb(payload)
        return payload

    def _at(self, address: int) -> int:
        """The endpoint behind an address: of role 0 it is party 3, the helper that speaks."""
        if isinstance(address, Member):
            return int(address)
        if address in _ROLES:
            return address or 3
        if not _PARTIES <= address <= CLIENT:
            raise TransportError(
                f"address: got {address}; want a role (0 to 2), a member, or an endpoint from {_PARTIES} to {CLIENT}"
            )
        return address

    def accept_device_tensors(self) -> None:
        """As the inner transport; what is sent comes from main memory, because tags are computed there."""
        self._inner.accept_device_tensors()

    def wait(self, frm: int) -> None:
        """As the inner transport."""
        self._inner.wait(self._at(frm))

    def name_of(self, endpoint: int) -> str:
        """As the inner transport."""
        return self._inner.name_of(self._at(endpoint))

    def abort(self, reason: str) -> None:
        """As the inner transport."""
        self._inner.abort(reason)

    def close(self) -> None:
        """As the inner transport."""
        self._inner.close()
