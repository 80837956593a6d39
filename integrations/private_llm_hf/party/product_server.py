"""A server of protocol "assisted": it holds public weights and multiplies them by masks, or by masked rows.

Server 0 knows the key of the masks and gets labels only; server 1 gets masked rows. Neither holds a secret of its own.
"""

from __future__ import annotations

from typing import assert_never, get_args

import torch
from torch import Tensor

from private_llm.assisted.fixed_point import BYTES, packed, unpacked
from private_llm.assisted.masks import mask
from private_llm.config import PrivateConfig
from private_llm.errors import TransportError
from private_llm.kernels import ops
from private_llm.kernels.address import memory_bytes
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.weight_sharing import KEY_BYTES, unpacked_key
from private_llm.ring.prg import Seed
from private_llm_hf.party.command_loop import Heartbeat, serve_commands, tell_costs
from private_llm_hf.party.node import agree
from private_llm_hf.wire.assisted import MOST_ELEMENTS, LoadLines, Multiply, ServerCommand
from private_llm_hf.wire.commands import TellCosts

_COMMANDS: tuple[type[ServerCommand], ...] = get_args(ServerCommand)


class ProductServer:
    """One server's end of a session."""

    def __init__(self, config: PrivateConfig, number: int, transport: Transport) -> None:
        """Raises ConfigError if the client runs other settings."""
        agree(config, transport, [CLIENT])
        self.transport = transport
        self._weights: list[Tensor] = []
        self._names: list[str] = []
        self._seed: Seed | None = None
        if number == 0:
            self._seed = unpacked_key(transport.recv(CLIENT, "mask key", (KEY_BYTES,), torch.uint8))
        self._heartbeat = Heartbeat(transport, config.timeout_s / 4)

    def serve(self) -> None:
        """Answer commands until the client stops. Raises what ended the session otherwise."""
        serve_commands(self.transport, _COMMANDS, self._obey, self._heartbeat)

    def _obey(self, command: ServerCommand) -> None:
        match command:
            case LoadLines():
                self._check_memory(2 * command.outputs * command.inputs)
                shape = (command.outputs, command.inputs)
                raw = self.transport.recv(CLIENT, "weight", (2 * command.outputs * command.inputs,), torch.uint8)
                self._weights.append(raw.view(torch.int16).view(shape))
                self._names.append(command.name)
            case Multiply():
                operand, ledger = self._operand(command), self.transport.ledger
                with ledger.scope(self._names[command.weight]):
                    product = self.product(operand, self._weights[command.weight])
                    ledger.add_round("product")
                    self.transport.send(CLIENT, "product", packed(product))
            case TellCosts():
                tell_costs(self.transport, self.transport.ledger, command)
            case _:
                assert_never(command)

    def _operand(self, command: Multiply) -> Tensor:
        """Raises TransportError for unknown weights, too many rows, and where the client mixes up the servers."""
        if command.weight >= len(self._weights):
            raise TransportError(f"weight {command.weight} was not loaded; there are {len(self._weights)}")
        rows, (outputs, inputs) = command.rows, self._weights[command.weight].shape
        if rows * max(inputs, outputs) > MOST_ELEMENTS:
            raise TransportError(f"rows: got {rows} for a weight of {outputs} x {inputs}; want fewer at a time")
        if (command.label is None) != (self._seed is None):
            raise TransportError("server 0 multiplies masks and server 1 masked rows; the client asked otherwise")
        if self._seed is not None:
            return mask(self._seed, str(command.label), rows, inputs)
        return unpacked(
            self.transport.recv(CLIENT, "masked rows", (rows * inputs * BYTES,), torch.uint8), (rows, inputs)
        )

    def _check_memory(self, more: int) -> None:
        """Raises TransportError for weights that this machine has no memory for."""
        held = sum(weight.nbytes for weight in self._weights)
        if held + more > memory_bytes():
            raise TransportError(f"weights: got {held + more} bytes in all; this server has {memory_bytes()}")

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        """rows weight^T modulo 2^64, int64 [M, outputs]."""
        self.transport.ledger.add_macs(rows.numel() * len(weight))
        return ops.narrow_matmul(rows, weight)
