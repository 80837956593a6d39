"""The client's end of protocol "assisted": it masks its rows, asks two servers for products, and checks these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from private_llm.assisted.fixed_point import BYTES, IntegerWeight, lines_digest, unpacked
from private_llm.assisted.masks import fresh_label, mask
from private_llm.assisted.projection import Projection
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PlaintextLeak, ProtocolAbort
from private_llm.kernels import ops
from private_llm.net.ledger import CONTROL
from private_llm.net.transport import Transport
from private_llm.protocols.plain import PlainClient
from private_llm.protocols.weight_sharing import packed_key
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring
from private_llm_hf.client.parties import Parties
from private_llm_hf.party.node import agree
from private_llm_hf.wire.assisted import COMMAND, HEADER, REQUEST, LoadLines, TellWeights, UseLines, WeightsHeld
from private_llm_hf.wire.codec import Message

KEY, MASKED = 0, 1
"""The server that knows the key of the masks, and the one that gets masked rows."""

_MACS_AT_ONCE, _ELEMENTS_AT_ONCE = 1 << 33, 1 << 24
"""Multiply-adds and elements of an exchange, so that a server answers within seconds: more rows take several."""


def rows_at_once(inputs: int, outputs: int) -> int:
    """Rows of an exchange."""
    return max(1, min(_MACS_AT_ONCE // (inputs * outputs), _ELEMENTS_AT_ONCE // max(inputs, outputs)))


class _NoShares(PlainClient):
    """An end through which no value leaves: rows leave masked, by `ProductServers.product`."""

    def share(self, elements: Tensor) -> None:
        """Raises PlaintextLeak."""
        raise PlaintextLeak("protocol='assisted' shares no inputs; rows of linear layers leave masked")

    def share_index(self, indices: Tensor, domain: int) -> None:
        """Raises PlaintextLeak."""
        self.share(indices)


class ProductServers(Parties):
    """Both servers of one session, as the client sees them; errors and the end of a session are those of `Parties`."""

    def __init__(self, config: PrivateConfig, transport: Transport, shutdown: Callable[[], None]) -> None:
        """Raises ConfigError if a server runs other settings."""
        super().__init__(config, transport, _NoShares(transport, Ring(64)), shutdown)
        agree(config, transport, list(self.members))
        self._masks, self._checks = Seed.fresh(), Seed.fresh()
        transport.send(KEY, "mask key", packed_key(self._masks))
        self._weights: list[tuple[IntegerWeight, Projection]] = []
        self._weights_held: dict[int, WeightsHeld] = {}
        self.exchanges = 0
        self.stored = True
        """Whether the servers had all weights that were loaded."""

    def tell(self, message: Message, parties: Iterable[int] | None = None) -> None:
        """Send a command to both servers, or to these, after a frame that says so."""
        for server in self.members if parties is None else parties:
            with self.transport.ledger.op(CONTROL):
                self.transport.send_bytes(server, REQUEST, COMMAND)
            super().tell(message, [server])

    def load(self, weight: IntegerWeight, name: str) -> int:
        """Give the servers a weight; the number to ask for it by. name: of its layers.

        Two bytes an element to each server that does not hold it. Raises ConfigError naming a server that holds another
        checkpoint.
        """
        with self._call():
            number, lines = len(self._weights), weight.lines.contiguous()
            projection = Projection(lines, self._checks.derive(f"weight {number}"))
            digest = lines_digest(lines)
            for server, held in self._held().items():
                if digest in held.digests:
                    self.tell(UseLines(name, digest), [server])
                    continue
                self.stored = False
                if held.source is not None:
                    raise ConfigError(
                        f"party {server} holds the weights of {held.source!r}, and other ones than this model's for "
                        f"{name!r}; want the same checkpoint and revision here and there, or a server that was started "
                        "without --model, which takes weights from its client"
                    )
                self.tell(LoadLines(name, *lines.shape), [server])
                self.transport.send(server, "weight", lines.view(torch.uint8).view(-1))
            self._weights.append((replace(weight, lines=lines[:0]), projection))
            return number

    def _held(self) -> dict[int, WeightsHeld]:
        """What each server holds, asked once."""
        if not self._weights_held:
            self.tell(TellWeights())
            self._weights_held = {server: self._answer(server, WeightsHeld) for server in self.members}
        return self._weights_held

    def product(self, number: int, x: Tensor, where: str) -> Tensor:
        """x W^T for real rows [M, inputs], float32 [M, outputs], in one exchange with both servers (large M: several).

        Bytes: 5 M inputs to server 1, 5 M outputs from each. Error: docs/assisted.md. where: the module, for messages.
        Raises DomainError for values that are not finite, ProtocolAbort naming a server that computed wrongly.
        """
        weight, projection = self._weights[number]
        inputs, outputs = x.shape[1], len(weight.factors)
        rows = rows_at_once(inputs, outputs)
        with self._call(), self.transport.ledger.scope(where):
            parts = [self._exchange(number, some, weight, projection, where) for some in x.split(rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _exchange(self, number: int, x: Tensor, weight: IntegerWeight, projection: Projection, where: str) -> Tensor:
        (rows, inputs), label = x.shape, fresh_label()
        hidden = mask(self._masks, label, rows, inputs)
        whole, masked, scales = weight.hidden(x, hidden)
        header = HEADER.pack(number, rows)
        self.transport.send_bytes(KEY, REQUEST, header + label.encode())
        self.transport.send_bytes(MASKED, REQUEST, header + masked.numpy().tobytes())
        self.transport.ledger.add_round("product")
        self.exchanges += 1
        size = BYTES * rows * len(weight.factors)
        parts = [self.transport.recv(server, "product", (size,), torch.uint8) for server in (KEY, MASKED)]
        product, right = ops.open_rows((parts[KEY], parts[MASKED]), whole, *projection.checked, scales, weight.factors)
        if not bool(right.all()):
            given = {KEY: hidden, MASKED: whole - hidden}
            self._refuse(projection, [(given[n], unpacked(parts[n], (rows, -1))) for n in self.members], where)
        return product

    def _refuse(self, projection: Projection, answers: list[tuple[Tensor, Tensor]], where: str) -> NoReturn:
        """Raises ProtocolAbort naming whose answer was wrong."""
        wrong = [f"party {n}" for n, answer in enumerate(answers) if not projection.holds_modulo(*answer)]
        raise ProtocolAbort(
            f"{' and '.join(wrong) or 'a server'} gave a wrong product for {where!r}; this answer is withheld and the "
            "session is over: ask other servers"
        )
