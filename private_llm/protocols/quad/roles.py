"""The links of Quad as Trio's code sees them: role 0 is played by parties 0 and 3, roles 1 and 2 by parties 1 and 2.

What role 0 sends to role 2 is sent by party 3; party 0 computes the same bytes and absorbs them into its view with
party 2, who absorbs what it received. `member(p)` addresses party p itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.quad.views import View

_MEMBERS = 16


def member(party: int) -> int:
    """The address of a party itself, where its bare number would mean a role."""
    return _MEMBERS + party


class RoleTransport(Transport):
    """`inner`, whose ledger it shares, addressed by role. `views`: this party's ends, by the other party."""

    def __init__(self, inner: Transport, party: int, views: dict[int, View]) -> None:
        super().__init__(inner.me)
        self.ledger = inner.ledger
        self._inner, self._party, self._views = inner, party, views

    def send(self, to: int, tag: str, payload: Tensor) -> None:
        """Send and book under the number of the receiving party; party 0 only absorbs what role 0 sends."""
        if self._party == 0 and to == 2:
            self._views[2].absorb(payload)
        else:
            self._inner.send(self._at(to), tag, payload)

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        self._inner._send(self._at(to), tag, payload)

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        payload = self._inner._recv(self._at(frm), tag, shape, dtype)
        if frm == 0:
            self._views[0].absorb(payload)
        return payload

    def _at(self, endpoint: int) -> int:
        """The party behind an address: the helper that speaks is party 3."""
        if endpoint == CLIENT:
            return CLIENT
        if endpoint >= _MEMBERS:
            return endpoint - _MEMBERS
        return endpoint or 3

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
