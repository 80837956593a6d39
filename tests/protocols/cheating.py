"""One party of a session cheats: what every endpoint ends with, and what the parties sent in an honest run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ProtocolAbort, TransportError
from private_llm.net.local import LocalMesh
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.session import join, join_as_client
from private_llm.protocols.share import Share
from tests.recording import Alter, Message, RecordingTransport

Program = Callable[..., Share]


class Liar(RecordingTransport):
    """The cheater's end: it lies as `alter` says, and never tells the others that something is wrong."""

    def abort(self, reason: str) -> None:
        """A cheater keeps quiet."""


class Mislabels(Liar):
    """Sends what it should under another name, from message `start` on."""

    start = 0

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        super()._send(to, tag if self._sent < self.start else "other", payload)


class Swaps(Liar):
    """Sends message `number` after the next one to the same receiver, under that one's name and its own name then."""

    number = 0
    _held: tuple[int, str, Tensor] | None = None

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        if self._sent == self.number and self._held is None:
            self._held = (to, tag, payload)
            self._sent += 1
            return
        if self._held is None or self._held[0] != to:
            super()._send(to, tag, payload)
            return
        (_, first, held), self._held, self.number = self._held, None, -1
        super()._send(to, first, payload)
        super()._send(to, tag, held)


@dataclass
class Outcome:
    """How a session ended: the client's result (None if it got none), and who raised what."""

    result: Tensor | None = None
    errors: dict[int, BaseException] = field(default_factory=dict)
    recorders: dict[int, RecordingTransport] = field(default_factory=dict)
    started: dict[int, int] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)

    def sent(self, party: int) -> list[Message]:
        """Messages of one party in order, as `flip` numbers them."""
        return [message for message in self.recorders[party].messages if message.direction == "sent"]

    def steps(self, party: int, tags: Sequence[str] = ()) -> list[int]:
        """Numbers of the messages that the party sent during the program (with one of `tags`, if given)."""
        sent = self.sent(party)
        return [n for n in range(self.started[party], self.ended[party]) if not tags or sent[n].tag in tags]

    def stopped(self, cheater: int) -> bool:
        """Whether nobody opened a result and an honest endpoint said why it stopped."""
        honest = [error for endpoint, error in self.errors.items() if endpoint != cheater]
        return self.result is None and any(isinstance(error, ProtocolAbort | TransportError) for error in honest)

    def caught(self, cheater: int) -> bool:
        """Stopped by an honest party, before any of them sent the client anything."""
        honest = [party for party in self.recorders if party != cheater]
        silent = not any(message.tag.startswith("reveal") for party in honest for message in self.sent(party))
        return silent and self.stopped(cheater) and any(party in self.errors for party in honest)


def play(
    config: PrivateConfig, inputs: Sequence[Tensor], program: Program, shape: Sequence[int], cheater: int = -1,
    alter: Alter | None = None, timeout: float = 20.0, patch: Callable[[Protocol], None] | None = None,
    liar: type[Liar] = Liar, payloads: bool = False, secret_index: tuple[Tensor, int] | None = None,
) -> Outcome:  # fmt: skip
    """Run program(protocol, *shares) with one cheater; `patch` may change the cheater's own protocol object."""
    mesh = LocalMesh(config.parties, timeout=timeout)
    outcome = Outcome()

    def transport(number: int) -> Transport:
        inner = mesh.transport(number)
        cheats = number == cheater
        recorder = liar(inner, alter=alter) if cheats else RecordingTransport(inner, payloads=payloads)
        outcome.recorders[number] = recorder
        return recorder

    def party(number: int) -> None:
        try:
            mine = transport(number)
            protocol = join(config, number, mine).protocol
            if patch is not None and number == cheater:
                patch(protocol)
            shares: list[object] = [protocol.receive_input(tuple(x.shape)) for x in inputs]
            if secret_index is not None:
                shares.append(protocol.receive_index(secret_index[0].numel(), secret_index[1]))
            outcome.started[number] = len(outcome.sent(number))
            out = program(protocol, *shares)
            outcome.ended[number] = len(outcome.sent(number))
            protocol.reveal_to_client(out)
        except BaseException as error:
            outcome.errors[number] = error
            if number != cheater:
                mesh.abort(f"party {number}: {type(error).__name__}")

    threads = [threading.Thread(target=party, args=(number,), daemon=True) for number in range(config.parties)]
    for thread in threads:
        thread.start()
    try:
        client = join_as_client(config, mesh.transport(CLIENT))
        for x in inputs:
            client.share(x)
        if secret_index is not None:
            client.share_index(*secret_index)
        outcome.result = client.open(tuple(shape))
    except Exception as error:
        outcome.errors[CLIENT] = error
        mesh.abort(f"the client: {type(error).__name__}")
    for thread in threads:
        thread.join(timeout)
    return outcome


def replaced(number: int, lie: Callable[[Tensor], Tensor]) -> Alter:
    """Send lie(payload) as message `number`."""

    def alter(index: int, tag: str, payload: Tensor) -> Tensor:
        return lie(payload) if index == number else payload

    return alter


def replayed(number: int) -> Alter:
    """Send as message `number` what was sent as the latest message of its type and size before."""
    earlier: dict[tuple[torch.dtype, int], Tensor] = {}

    def alter(index: int, tag: str, payload: Tensor) -> Tensor:
        kind = payload.dtype, payload.numel()
        kept, earlier[kind] = earlier.get(kind, payload), payload.clone()
        return kept if index == number else payload

    return alter


def added(number: int, error: int) -> Alter:
    """Add `error` to every element of sent message `number`: a lie that keeps linear relations."""
    return replaced(number, lambda payload: payload + torch.tensor(error, dtype=payload.dtype))
