"""One party's end of a session: who it is, its links, and when and where it draws masks."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Self

import torch

from private_llm.errors import UnsupportedOp
from private_llm.net.ledger import Ledger
from private_llm.net.transport import Transport
from private_llm.protocol_facts import names_where
from private_llm.ring.prg import Prg, Seed
from private_llm.ring.ring import Ring

Links = Callable[[Transport], Transport]
"""What puts something between a protocol and its links."""


class PartyEnd(ABC):
    """What all interfaces of a protocol share. `party` is its number from 0, `ring` that of arithmetic shares.

    Whatever waits for a message raises TransportError if it does not come, or has another tag, size or dtype.
    """

    name: str
    same_inputs = False
    """Whether a client sends the same tensor to all parties that receive one of an input."""
    can_repeat = False
    """Whether parties of this protocol may repeat steps as recorded programs, at some time (`mask_streams`)."""
    compares = False
    """Whether parties notice what one of them alters. Then they must compare what they were told to run, too: records
    of different runs differ, but one party alone may be the judge of records."""

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

    @property
    def runs_ahead(self) -> bool:
        """Whether this is inside a `section`."""
        return False

    def section(self, label: str, links: Links = lambda transport: transport) -> AbstractContextManager[None]:
        """Inside, masks are drawn apart (once for each `label`), over `links`: the helper may run ahead. Local.

        Raises UnsupportedOp for a protocol without separate preprocessing, ProtocolAbort for a label that was used
        before.
        """
        wanted = names_where(lambda facts: facts.helper is not None)
        raise UnsupportedOp(f"protocol '{self.name}' has no separate preprocessing; want {wanted}")

    def input_masks(self, keys: Sequence[Seed], label: str = "") -> list[Prg]:
        """Streams of the masks of one client's inputs, from its keys that this party holds, in order. Local.

        label: of the `section` that the client makes these inputs in, "" for none. Empty for a protocol that does not
        mask inputs.
        """
        return []

    def inputs_of(self, masks: list[Prg]) -> AbstractContextManager[None]:
        """Inside, what is received from the client is masked by these streams (`input_masks`), which go on. Local."""
        return nullcontext()

    def take_digests(self) -> list[str]:
        """What the client needs of a party that ran ahead to check what others will open (hexadecimal, in order).

        Empty but at party 3 of quad, where each is the 32-byte digest of one opening's masks; what was taken is
        forgotten.
        """
        return []

    def take_inputs(self) -> str:
        """A digest of what clients sent for values since the last call, "" at a party that receives none or does not
        compare (`compares`): all who state one must state the same. Local.
        """
        return ""

    @property
    def mask_streams(self) -> Sequence[Prg]:
        """The streams of all masks that this end draws now, if it computes as it always does and keeps no other record.

        Then a step of it may be recorded and repeated (`private_llm.replay`). Empty: it may not.
        """
        return ()

    @property
    def ledger(self) -> Ledger:
        """Counts of what this party sent (bytes), waited for (rounds) and multiplied (products in the ring)."""
        return self.transport.ledger
