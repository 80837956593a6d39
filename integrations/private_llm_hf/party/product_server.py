"""A server of protocol "assisted": it holds public weights and multiplies them by masks, or by masked rows.

A server with the key of masks gets labels only, another one masked rows; where the products of masks were prepared,
the latter is the only one. Neither holds a secret of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import assert_never, get_args

import torch
from torch import Tensor

from private_llm.assisted.fixed_point import BYTES, IntegerWeight, lines_digest
from private_llm.assisted.masks import mask
from private_llm.config import PrivateConfig
from private_llm.errors import TransportError
from private_llm.kernels import ops
from private_llm.kernels.address import memory_bytes
from private_llm.kernels.devices import device_for
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.weight_sharing import KEY_BYTES, unpacked_key
from private_llm.ring.prg import Seed
from private_llm_hf.party.command_loop import tell_costs
from private_llm_hf.party.node import agree
from private_llm_hf.party.used_blocks import UsedBlocks
from private_llm_hf.wire.assisted import (
    COMMAND,
    HEADER,
    LONGEST_LABEL,
    MOST_ELEMENTS,
    REQUEST,
    BeginBlock,
    BlockBegun,
    LoadLines,
    MaskKey,
    ServerCommand,
    TellWeights,
    UseLines,
    WeightsHeld,
    elements,
)
from private_llm_hf.wire.commands import Stop, TellCosts, recv_message, send_message

_COMMANDS: tuple[type[ServerCommand | Stop], ...] = (*get_args(ServerCommand), Stop)
_MOST_WEIGHTS = 1 << 16
"""Of a session; each takes some memory beside its elements."""


@dataclass(frozen=True)
class _Held:
    """A weight, int16 [outputs, inputs and zeros]. name: of its layers."""

    name: str
    inputs: int
    lines: Tensor


class OpenWeights:
    """The weights of a checkpoint that a server multiplies by, each by its digest; sessions share them.

    source: folder or hub id, for messages. device: where they lie.
    """

    def __init__(self, source: str, device: torch.device) -> None:
        self.source, self._device = source, device
        self.weights: dict[str, tuple[int, Tensor]] = {}

    def load(self, weight: IntegerWeight, name: str) -> int:
        """Keep one weight; how many there were before. name: of its layers, as `ProductServers.load`."""
        number, inputs = len(self.weights), weight.lines.shape[1]
        self.weights.setdefault(lines_digest(weight.lines), (inputs, ops.narrow_lines(weight.lines).to(self._device)))
        return number

    def held(self) -> WeightsHeld:
        """What a client is told."""
        return WeightsHeld(Path(self.source).name.encode("ascii", "replace").decode()[:100], tuple(self.weights))


class ProductServer:
    """One server's end of a session."""

    def __init__(self, config: PrivateConfig, transport: Transport, weights: OpenWeights | None = None) -> None:
        """weights: of a checkpoint that this server read (None: it takes those of its client).

        Raises ConfigError if the client runs other settings.
        """
        self._open, self._device = weights, device_for(config.device, transport.me)
        agree(config, transport, [CLIENT])
        self.transport = transport
        self._weights: list[_Held] = []
        self._seed: Seed | None = None
        self._blocks = UsedBlocks(config.offline_folder)

    def serve(self) -> None:
        """Multiply, and answer commands, until the client stops. Raises what ended the session otherwise, and
        TransportError for a request that this server does not answer.
        """
        while True:
            self.transport.wait(CLIENT)
            asked = self.transport.recv_bytes(CLIENT, REQUEST, HEADER.size + BYTES * MOST_ELEMENTS)
            if asked != COMMAND:
                self._multiply(asked)
                continue
            command: ServerCommand | Stop = recv_message(self.transport, CLIENT, _COMMANDS)
            if isinstance(command, Stop):
                return
            self._obey(command)

    def _obey(self, command: ServerCommand) -> None:
        match command:
            case MaskKey():
                self._seed = unpacked_key(self.transport.recv(CLIENT, "mask key", (KEY_BYTES,), torch.uint8))
            case BeginBlock():
                if not self._weights:
                    raise TransportError("a block began before a weight was loaded")
                send_message(self.transport, CLIENT, BlockBegun(self._blocks.add(command.block)))
            case TellWeights():
                held = WeightsHeld(None, ()) if self._open is None else self._open.held()
                send_message(self.transport, CLIENT, held)
            case UseLines():
                self._weights.append(self._own(command))
            case LoadLines():
                if self._open is not None:
                    raise TransportError(f"this server multiplies by weights of {self._open.source!r} only")
                self._check_memory(2 * elements(command.outputs, command.inputs, 1))
                shape = (command.outputs, command.inputs)
                raw = self.transport.recv(CLIENT, "weight", (2 * command.outputs * command.inputs,), torch.uint8)
                lines = ops.narrow_lines(raw.view(torch.int16).view(shape)).to(self._device)
                self._weights.append(_Held(command.name, command.inputs, lines))
            case TellCosts():
                tell_costs(self.transport, self.transport.ledger, command)
            case _:
                assert_never(command)

    def _multiply(self, asked: bytes) -> None:
        """Answer a frame that asks for a product, by that product, packed."""
        weight, rows = self._asked(asked)
        operand = self._operand(memoryview(asked)[HEADER.size :], rows, weight.inputs)
        with self.transport.ledger.scope(weight.name):
            product = self.product(operand, weight, rows)
            self.transport.ledger.add_round("product")
            self.transport.send(CLIENT, "product", product)

    def _asked(self, asked: bytes) -> tuple[_Held, int]:
        """Raises TransportError for unknown weights, and for no rows or too many."""
        if len(asked) < HEADER.size:
            raise TransportError(f"request: got {len(asked)} bytes; want {HEADER.size} and what is multiplied")
        number, rows = HEADER.unpack_from(asked)
        if number >= len(self._weights):
            raise TransportError(f"weight {number} was not loaded; there are {len(self._weights)}")
        weight = self._weights[number]
        outputs = len(weight.lines)
        if not 0 < elements(rows, weight.inputs, outputs) <= MOST_ELEMENTS:
            raise TransportError(
                f"rows: got {rows} for a weight of {outputs} x {weight.inputs}; want one at least, and fewer at a time"
            )
        return weight, rows

    def _operand(self, given: memoryview, rows: int, inputs: int) -> Tensor:
        """The mask of a label, or masked rows, packed. Raises TransportError where the client mixes up the servers."""
        if self._seed is not None and len(given) <= LONGEST_LABEL:
            return mask(self._seed, bytes(given).decode("ascii", "replace"), rows, inputs)
        if self._seed is not None or len(given) != BYTES * rows * inputs:
            raise TransportError(
                f"request: got {len(given)} bytes for {rows} rows of {inputs}; a server with the key of masks takes "
                f"a label, another one masked rows of {BYTES} bytes an element"
            )
        return torch.frombuffer(bytearray(given), dtype=torch.uint8)

    def _own(self, command: UseLines) -> _Held:
        """A weight of this server's own. Raises TransportError for another digest."""
        found = None if self._open is None else self._open.weights.get(command.digest)
        if found is None:
            raise TransportError(f"weight '{command.name}': this server holds none with the digest that was asked for")
        inputs, lines = found
        return _Held(command.name, inputs, lines)

    def _check_memory(self, more: int) -> None:
        """Raises TransportError for a weight of so many bytes, which is there twice for a moment, where this machine,
        or its GPU, would keep less than a quarter of its memory, and for a model of more weights than any has.
        """
        held, whole = sum(weight.lines.nbytes for weight in self._weights), memory_bytes()
        if self._device.type == "cuda":
            whole = min(whole, torch.cuda.mem_get_info(self._device)[1])
        if held + 2 * more > whole * 3 // 4 or len(self._weights) >= _MOST_WEIGHTS:
            raise TransportError(
                f"weights: got {held + more} bytes in all; this server takes three quarters of its {whole} bytes, and "
                f"{_MOST_WEIGHTS} weights"
            )

    def product(self, x: Tensor, weight: _Held, rows: int) -> Tensor:
        """x weight^T modulo 2^40, packed, for so many rows of elements or of their bytes."""
        self.transport.ledger.add_macs(rows * weight.inputs * len(weight.lines))
        return ops.narrow_matmul(x.to(weight.lines.device), weight.lines, rows)
