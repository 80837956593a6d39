"""The client's end of protocol "assisted": it masks its rows, asks servers for products, and checks these.

Two servers, or one and corrections that a preparation stored: products of the masks.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NoReturn, cast

import torch
from torch import Tensor

from private_llm.assisted.corrections import Corrections, TakenRows, mask_label
from private_llm.assisted.fixed_point import BYTES, IntegerWeight, lines_digest
from private_llm.assisted.masks import fresh_label, mask
from private_llm.assisted.projection import Projection
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, PlaintextLeak, ProtocolAbort
from private_llm.kernels import ops
from private_llm.net.ledger import CONTROL
from private_llm.net.transport import Transport
from private_llm.protocols.plain import PlainClient
from private_llm.protocols.weight_sharing import packed_key
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring
from private_llm_hf.client.parties import Parties
from private_llm_hf.party.node import agree
from private_llm_hf.wire.assisted import (
    COMMAND,
    HEADER,
    REQUEST,
    BeginBlock,
    BlockBegun,
    LoadLines,
    MaskKey,
    TellWeights,
    UseLines,
    WeightsHeld,
    elements,
)
from private_llm_hf.wire.codec import Message

KEY = 0  # the server that knows the key of the masks; the last one gets masked rows, which is the same if it is alone

_MACS_AT_ONCE, _ELEMENTS_AT_ONCE = 1 << 33, 1 << 24  # of an exchange, so that a server answers within seconds


def rows_at_once(inputs: int, outputs: int, most: int = _ELEMENTS_AT_ONCE) -> int:
    """Rows of an exchange. most: elements that servers take."""
    return max(1, min(_MACS_AT_ONCE // (inputs * outputs), most // elements(1, inputs, outputs)))


class _NoShares(PlainClient):
    """An end through which no value leaves: rows leave masked, by `ProductServers.product`."""

    def share(self, elements: Tensor) -> None:
        """Raises PlaintextLeak."""
        raise PlaintextLeak("protocol='assisted' shares no inputs; rows of linear layers leave masked")

    def share_index(self, indices: Tensor, domain: int) -> None:
        """Raises PlaintextLeak."""
        self.share(indices)


class ProductServers(Parties):
    """The servers of one session, as the client sees them; errors and the end of a session are those of `Parties`."""

    def __init__(self, config: PrivateConfig, transport: Transport, shutdown: Callable[[], None]) -> None:
        """Raises ConfigError if a server runs other settings."""
        super().__init__(config, transport, _NoShares(transport, Ring(64)), shutdown)
        agree(config, transport, list(self.members))
        self.weight_bits, self._size = config.weight_bits, BYTES[config.weight_bits]
        self._online, self._checks = config.endpoints - 1, Seed.fresh()
        self._masks: Seed | None = None
        self.corrections: Corrections | None = None  # what stands in for the server of masks
        if config.corrections is not None:
            self.corrections = Corrections(config.corrections, self._begins, config.hosts, config.weight_bits)
        else:
            self._give_key(Seed.fresh())
        self._weights: list[tuple[IntegerWeight, Projection]] = []
        self._names: list[str] = []
        self.digests: list[str] = []
        """Of all weights that were loaded, in the order of their numbers."""
        self.errors: dict[str, float] = {}
        """Of 8-bit weights that were loaded here: of each its `IntegerWeight.error`, by its layers."""
        self.most_elements = _ELEMENTS_AT_ONCE
        self._weights_held: dict[int, WeightsHeld] = {}
        self.exchanges, self.uses = 0, 1  # `uses_a_token` of the model
        self.stored = True  # whether the servers had all weights that were loaded

    def _give_key(self, masks: Seed) -> None:
        self.tell(MaskKey(), [KEY])
        self.transport.send(KEY, "mask key", packed_key(masks))
        self._masks = masks

    def _begins(self, block: str) -> bool:
        """Tell the server whose masks come next; whether it hears of them for the first time."""
        with self._call():
            self.tell(BeginBlock(block))
            return self._answer(self._online, BlockBegun).first

    @property
    def tokens_left(self) -> int | None:
        """Tokens (of rows, of beams) for which there are corrections here and in the folder; None with two servers."""
        return None if self.corrections is None else self.corrections.left() // self.uses

    def tell(self, message: Message, parties: Iterable[int] | None = None) -> None:
        """Send a command to all servers, or to these, after a frame that says so."""
        for server in self.members if parties is None else parties:
            with self.transport.ledger.op(CONTROL):
                self.transport.send_bytes(server, REQUEST, COMMAND)
            super().tell(message, [server])

    def expect(self, names: dict[tuple[int, int], str]) -> None:
        """Compare the shapes of weights to come with those that servers read: names of layers by outputs and inputs.

        Unlike weights of one shape show in `load`. Raises ConfigError naming a server that read none of a shape.
        """
        with self._call():
            for server, held in self._held().items():
                missing = names.keys() - {*held.shapes}
                if held.source is not None and missing:
                    outputs, inputs = shape = min(missing)
                    what = f"none of them {outputs} x {inputs} as this model's of {names[shape]!r}"
                    self._refuse_checkpoint(server, held, what)

    def _refuse_checkpoint(self, server: int, held: WeightsHeld, what: str) -> NoReturn:
        self._stop(f"party {server} holds another checkpoint, of {held.source!r}, than this client wants")
        raise ConfigError(
            f"party {server} holds the weights of {held.source!r}, {what}; want the same checkpoint and revision here "
            "and there, or a server that was started without --model, which takes weights from its client"
        )

    def load(self, weight: IntegerWeight, name: str) -> int:
        """Give the servers a weight; the number to ask for it by. name: of its layers.

        `weight_bits` an element to each server that does not hold it. Raises ConfigError naming a server that holds
        another checkpoint.
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
                    self._refuse_checkpoint(server, held, f"and other ones than this model's for {name!r}")
                self.tell(LoadLines(name, *lines.shape), [server])
                self.transport.send(server, "weight", lines.view(torch.uint8).view(-1))
            none = lines.new_empty(0, lines.shape[1])  # a view would keep all of them in memory
            self._keep(replace(weight, lines=none), projection, name, digest)
            if self.weight_bits == 8:
                self.errors[name] = weight.error
            return number

    def _keep(self, weight: IntegerWeight, projection: Projection, name: str, digest: str) -> None:
        if self.corrections is not None:
            self.corrections.expect(name, digest, weight.lines.shape[1])
        self._weights.append((weight, projection))
        self._names.append(name)
        self.digests.append(digest)

    def use_weights_of(self, other: "ProductServers") -> bool:
        """Ask for the weights of another session, whose checks do for both. False, nothing done: a server that takes
        weights lacks one. Raises ConfigError naming a server that holds another checkpoint.
        """
        with self._call():
            complete, names = True, dict(zip(other.digests, other._names, strict=True))
            for server, held in self._held().items():
                missing = next((name for digest, name in names.items() if digest not in held.digests), None)
                if missing is not None and held.source is not None:
                    what = f"and other ones than this model was loaded with for {missing!r}"
                    self._refuse_checkpoint(server, held, what)
                complete = complete and missing is None
            if not complete:
                return False
            for kept in zip(other._weights, other._names, other.digests, strict=True):
                self.tell(UseLines(*kept[1:]))
                self._keep(*kept[0], *kept[1:])
            return True

    def _held(self) -> dict[int, WeightsHeld]:
        """What each server holds, asked once."""
        if not self._weights_held:
            self.tell(TellWeights())
            self._weights_held = {server: self._answer(server, WeightsHeld) for server in self.members}
            self.most_elements = min(_ELEMENTS_AT_ONCE, *(held.elements for held in self._weights_held.values()))
        return self._weights_held

    def mask_products(self, rows: int, masks: Seed) -> Iterator[tuple[str, Tensor]]:
        """For a preparation: of each weight the products of so many rows of masks, packed, as uint8
        [rows, 5 outputs], or 4 outputs for 8-bit weights.

        The server gets the key of these masks and so no masked rows in this session. Raises ProtocolAbort naming it
        for a wrong product (one in 256 passes at most, and is found when it is used), and in a session that computes.
        """
        with self._call():
            if self.exchanges:
                raise ProtocolAbort("this server saw masked rows, so it must not learn keys of masks; ask another one")
            self._give_key(masks)
        for number, (weight, projection) in enumerate(self._weights):
            name, label, inputs = self._names[number], mask_label(self._names[number]), weight.lines.shape[1]
            with self._call(), self.transport.ledger.scope(name):
                self.transport.send_bytes(KEY, REQUEST, HEADER.pack(number, rows) + label.encode())
                product = self._part(KEY, rows, weight)
                wide = ops.unpacked(product, (rows, -1), self._size)
                if not projection.holds_modulo(mask(masks, label, rows, inputs), wide):
                    raise ProtocolAbort(
                        f"party {KEY} gave a wrong product of masks for {name!r}; nothing of this block is stored: "
                        "prepare at another server"
                    )
            yield name, product.view(rows, -1)

    def product(self, number: int, x: Tensor, where: str) -> Tensor:
        """x W^T for real rows [M, inputs], float32 [M, outputs], in one exchange with all servers (large M: several).

        Bytes: 5 M inputs to the last server, 5 M outputs from each; 4 in place of 5 for 8-bit weights. Error:
        docs/assisted.md. where: the module, for messages. Raises DomainError for values that are not finite,
        ProtocolAbort naming a server or a preparation that computed wrongly, CorrectionsUsedUp before anything is sent;
        the session then goes on.
        """
        count, inputs = x.shape
        rows = rows_at_once(inputs, self._weights[number][0].factors.shape[0], self.most_elements)
        with self.alone():
            stored = self._stored(number, count)
            if count <= rows:
                return self._exchange(number, x, where, stored)
            parts = [
                self._exchange(number, some, where, stored and stored.part(rows * place, rows))
                for place, some in enumerate(x.split(rows))
            ]
        return torch.cat(parts)

    def _stored(self, number: int, rows: int) -> TakenRows | None:
        if self.corrections is None:
            return None
        if self._masks is not None:
            raise ProtocolAbort("the server of this session knows keys of masks, so it must not see masked rows")
        return self.corrections.take(self._names[number], rows)

    def _exchange(self, number: int, x: Tensor, where: str, stored: TakenRows | None) -> Tensor:
        """stored: in place of the server of masks."""
        (rows, inputs), (weight, projection) = x.shape, self._weights[number]
        hidden = None if stored is None else stored.masks
        request, ledger = bytearray(HEADER.size + self._size * rows * inputs), self.transport.ledger
        HEADER.pack_into(request, 0, number, rows)
        with self._guarded(), ledger.scope(where):
            if hidden is None:  # the server multiplies while rows are masked here
                label = fresh_label()
                self.transport.send_bytes(KEY, REQUEST, request[: HEADER.size] + label.encode())
                hidden = mask(cast(Seed, self._masks), label, rows, inputs)
            packed = torch.frombuffer(request, dtype=torch.uint8, offset=HEADER.size)
            whole, scales = weight.hidden(x, hidden, packed)
            finite = all(scales.tolist())
            if finite:
                self.transport.send_bytes(self._online, REQUEST, request)
                ledger.add_round("product")
                self.exchanges += 1
            first = self._part(KEY, rows, weight) if stored is None else stored.products
            if finite:
                parts = first, self._part(self._online, rows, weight)
                product, right = ops.open_rows(parts, whole, *projection.checked, scales, weight.factors, self._size)
                if not all(right.tolist()):
                    first, last = (ops.unpacked(part, (rows, -1), self._size) for part in parts)
                    self._refuse(projection, [(hidden, first), (whole - hidden, last)], where, stored)
                return product
        raise DomainError("got an input with NaN or infinite values; want finite ones")  # the session goes on

    def _part(self, server: int, rows: int, weight: IntegerWeight) -> Tensor:
        return self.transport.recv(server, "product", (self._size * rows * weight.factors.shape[0],), torch.uint8)

    def _refuse(
        self, projection: Projection, answers: list[tuple[Tensor, Tensor]], where: str, stored: TakenRows | None
    ) -> NoReturn:
        """Raises ProtocolAbort naming whose answer was wrong."""
        names = [f"party {KEY}" if stored is None else stored.source, f"party {self._online}"]
        wrong = [name for name, answer in zip(names, answers, strict=True) if not projection.holds_modulo(*answer)]
        again = "ask other servers" if stored is None or names[0] not in wrong else "delete the corrections"
        raise ProtocolAbort(
            f"{' and '.join(wrong) or 'a server'} gave a wrong product for {where!r}; this answer is withheld and the "
            f"session is over: {again}"
        )
