"""Both ends of a session: a party's (who it is, its links, when and where it draws masks) and the client's."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NoReturn, Self

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import UnsupportedOp
from private_llm.net.ledger import Ledger
from private_llm.net.transport import Transport
from private_llm.protocol_facts import names_where
from private_llm.ring.prg import Prg, Seed
from private_llm.ring.ring import Ring

WrapLinks = Callable[[Transport], Transport]  # what puts something between a protocol and its links


@dataclass(frozen=True)
class PartySetup:
    """What a party has when it joins a session.

    pair_seeds: a fresh seed with each other endpoint. input_keys: of the masks of inputs that it holds, in order.
    counting: costs are only counted; nothing may be sent, and all seeds and keys are zero.
    """

    config: PrivateConfig
    party: int
    transport: Transport
    pair_seeds: dict[int, Seed]
    input_keys: list[Seed]
    counting: bool = False

    @property
    def ring(self) -> Ring:
        """The ring of arithmetic shares, Z/2^64 or Z/2^32."""
        return Ring(self.config.ring)

    @property
    def exact(self) -> bool:
        """Whether every division must be the floor (`exact.exact`)."""
        return self.config.truncation == "exact"


class PartyEnd:
    """What all protocols share. `party` is its number from 0, `ring` that of arithmetic shares.

    Whatever waits for a message raises TransportError if it does not come, or has another tag, size or dtype.
    """

    name: str
    same_inputs = False  # whether a client sends the same tensor to all parties that receive one of an input
    can_repeat = False  # whether its parties may repeat steps as recorded programs, at some time (`mask_streams`)
    compares = False
    """Whether parties notice what one of them alters. Then they must compare what they were told to run, too: records
    of different runs differ, but one party alone may be the judge of records."""

    module = ""  # the one that is being computed (`Session.module`), whose ranges hold; "" outside
    runs_ahead = False  # whether this is inside a `section`: the helping party may be ahead

    def __init__(self, party: int, transport: Transport, ring: Ring) -> None:
        self.party = party
        self.transport = transport
        self.ring = ring
        self.device: torch.device | str = "cpu"
        self.placed = False

    def lacks(self, primitive: str, wanted: str = "another protocol") -> NoReturn:
        """Raises UnsupportedOp for a primitive that this end does not have, with who needs it and what has it."""
        needed = " in module ".join(filter(None, (self.ledger.op_name, self.module)))
        by = f", which {needed} needs" if needed else ""
        raise UnsupportedOp(f"{primitive}: protocol '{self.name}' lacks it here{by}; want {wanted}")

    def on(self, device: torch.device | str) -> Self:
        """This end, drawing and receiving on `device` from now on: where the operands of the next operation lie."""
        self.device = device
        return self

    def section(self, label: str, links: WrapLinks = lambda transport: transport) -> AbstractContextManager[None]:
        """Inside, masks are drawn apart (once for each `label`), over `links`: the helper may run ahead. Local.

        Raises UnsupportedOp for a protocol without separate preprocessing, ProtocolAbort for a used label.
        """
        raise _not_ahead(f"protocol '{self.name}'")

    def input_masks(self, keys: Sequence[Seed], label: str = "") -> list[Prg]:
        """Streams of the masks of one client's inputs, from its keys that this party holds, in order. Local.

        label: of the `section` that the client makes these inputs in, "" for none. Empty if inputs are not masked.
        """
        return []

    def inputs_of(self, masks: list[Prg]) -> AbstractContextManager[None]:
        """Inside, what is received from the client is masked by these streams (`input_masks`), which go on. Local."""
        return nullcontext()

    def take_digests(self) -> list[str]:
        """What the client needs of a party that ran ahead to check what others will open (hexadecimal, in order).

        Empty but at party 3 of quad: 32 bytes of one opening's masks each; what was taken is forgotten.
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


class ClientEnd(ABC):
    """The client's end over links to all parties: how elements enter and leave. Calls come in the parties' order."""

    cipher: str | None = None  # of the parties' streams, as they said when they met; None: they were not asked

    def __init__(self, transport: Transport, ring: Ring) -> None:
        self.transport, self.ring = transport, ring

    @abstractmethod
    def share(self, elements: Tensor) -> None:
        """Share ring elements of any shape with the parties, who call `receive_input` with the same shape.

        8 bytes each (4 in the 32-bit ring) to two parties (trio, dealer), three (quad) or one. No round is booked.
        """

    @abstractmethod
    def share_index(self, indices: Tensor, domain: int) -> None:
        """Share int64 indices [T] below `domain`; the parties call `receive_index(T, domain)`.

        Bytes: as `receive_index`. No round is booked. Raises DomainError for an index outside the domain, unnamed.
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
        raise _not_ahead("this protocol")

    def take_digests(self, digests: Sequence[str]) -> None:  # noqa: B027 - semi-honest protocols need none
        """What the party that ran ahead gave to check openings with (hexadecimal, in order).

        From `PartyEnd.take_digests`. Local; replaces older ones. Quad raises ProtocolAbort for what is no digest.
        """


def _not_ahead(what: str) -> UnsupportedOp:
    wanted = names_where(lambda facts: facts.helper is not None)
    return UnsupportedOp(f"{what} has no separate preprocessing; want {wanted}")
