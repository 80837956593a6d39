"""A node of token-sharded inference: serves one client's commands as a CompNode (a model on some rows) or AttnNode.

A CompNode receives the tokens of its rows in the clear and returns what the model makes of them; this is what token
sharding promises and no more (docs/cascade.md). Positions are the true ones, so the model's own forward is right.
"""

from __future__ import annotations

import dataclasses
import hmac
from typing import assert_never, get_args

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TransportError
from private_llm.kernels.devices import device_for
from private_llm.net.parallel_sessions import node_links
from private_llm.net.transport import CLIENT, PlacedTransport, Transport
from private_llm.token_sharding import AttnNode, Exchange, ShardingPlan, send_floats
from private_llm_hf.checkpoint.node_checkpoint import NodeCheckpoint, claim
from private_llm_hf.client.costs import rows_of
from private_llm_hf.party.command_loop import Heartbeat, serve_commands
from private_llm_hf.party.model import release
from private_llm_hf.party.model_description import take_described, validate_model_description
from private_llm_hf.token_sharding.commands import AttnForward, CompForward, CropTo, LoadNode, NodeCommand, NodeEdit
from private_llm_hf.token_sharding.comp_node import CompNode
from private_llm_hf.wire.answers import NodeLoaded, NodeOutput, NodeOutputs
from private_llm_hf.wire.commands import (
    CopyCache,
    Description,
    Hello,
    ResetCache,
    SelectRows,
    TellCosts,
    recv_weight,
    send_message,
)

_COMMANDS: tuple[type[NodeCommand], ...] = get_args(NodeCommand)


def agree(config: PrivateConfig, transport: Transport, others: list[int]) -> None:
    """Exchange digests of the settings. Raises ConfigError if another endpoint runs others."""
    digest = config.agreement()
    for other in others:
        transport.send(other, "hello", torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    for other in others:
        theirs = transport.recv(other, "hello", (len(digest),), torch.uint8).numpy().tobytes()
        if not hmac.compare_digest(theirs, digest):
            raise ConfigError(
                f"{transport.name_of(other)} runs other settings or another version; protocol, plan and the library "
                "version must be equal at all endpoints"
            )


def plan_of(config: PrivateConfig) -> ShardingPlan:
    """The plan of a configuration."""
    return config.plan or ShardingPlan()


class Node:
    """One endpoint of a plan. Raises ConfigError for a device_map, which nodes do not follow."""

    def __init__(
        self, config: PrivateConfig, number: int, transport: Transport, checkpoint: NodeCheckpoint | None = None
    ) -> None:
        """checkpoint: the model that this CompNode read itself."""
        if config.device_map is not None and config.protocol == "cascade":  # before a split the parties may have one
            raise ConfigError("device_map: a node keeps its model, or its cache, on one device; set device instead")
        self.plan = plan_of(config)
        before = config.endpoints - self.plan.nodes  # parties of a split
        self.config, self.number, self._links = config, number - before, transport
        self.transport = node_links(transport, before, self.plan.nodes)
        self._device, self._checkpoint = device_for(config.device, number), checkpoint
        self._heartbeat = Heartbeat(self.transport, config.timeout_s / 4)
        agree(config, transport, [CLIENT])
        self._attn: AttnNode | None = None
        self._comp: CompNode | None = None

    def serve(self) -> None:
        """Answer commands until the client stops. Raises what ended the session otherwise."""
        try:
            serve_commands(self.transport, _COMMANDS, self._obey, self._heartbeat)
        finally:
            self._forget()

    def _obey(self, command: NodeCommand) -> None:
        match command:
            case Hello():  # which model this CompNode holds, if it holds one
                send_message(self.transport, CLIENT, claim(self._checkpoint))
            case LoadNode():
                self._load(command)
            case AttnForward():
                self._attend(command)
            case CompForward():
                self._compute(command)
            case TellCosts():
                send_message(self.transport, CLIENT, rows_of(self.transport.ledger))
                if command.reset:
                    self.transport.ledger.reset()
            case SelectRows() | CropTo() | ResetCache() | CopyCache():
                self._edit(command)
            case _:
                assert_never(command)

    def _forget(self) -> None:
        """Free model and caches now: a model refers to its node, so Python would do it much later."""
        comp, self._comp, self._attn = self._comp, None, None
        if comp is not None:
            release(comp.model)

    def _load(self, command: LoadNode) -> None:
        links = PlacedTransport(self.transport, lambda: self._device)
        if self.number < self.plan.alpha:
            if command.disk or self._checkpoint is not None:
                command, weights = self._own_model(command)
            else:
                weights = self._weights(command.description)
            exchange = Exchange(self.plan, links, command.calls)
            self._comp = CompNode(self.config, self._links, command, exchange, weights, self._device)
            self._heartbeat.watch(self._comp.model)
        else:
            self._attn = AttnNode(self.plan, links, command.calls)
            self._attn.join()
        self.transport.ledger.reset()
        send_message(self.transport, CLIENT, NodeLoaded())

    def _own_model(self, command: LoadNode) -> tuple[LoadNode, dict[str, Tensor]]:
        """The model that this CompNode read itself: a node that was started with one serves no other."""
        if self._checkpoint is None:
            raise ConfigError("the client sends no weights, and this CompNode holds none (--model)")
        if not command.disk:
            raise ConfigError("this CompNode was started with a model (--model) and serves that model only")
        return dataclasses.replace(command, description=self._checkpoint.description), self._checkpoint.weights

    def _weights(self, description: Description) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        wanted = validate_model_description(description, torch.float32.itemsize)
        while True:
            header = recv_weight(self.transport)
            if header is None:
                return weights
            raw = self.transport.recv(CLIENT, "weight", take_described(wanted, header), torch.int32)
            weights[header.name] = raw.view(torch.float32)

    def _attend(self, command: AttnForward) -> None:
        if self._attn is None:
            raise TransportError("a call for an AttnNode arrived, and none was loaded here")
        for handle in command.free:
            self._attn.free(handle)
        self._attn.run(command.step)

    def _compute(self, command: CompForward) -> None:
        if self._comp is None:
            raise TransportError("a call for a CompNode arrived, and no model was loaded here")
        kind, outputs = self._comp.run(command)
        described = tuple(NodeOutput(name, tuple(value.shape)) for name, value in outputs.items())
        send_message(self.transport, CLIENT, NodeOutputs(kind, described))
        send_floats(self.transport, CLIENT, "outputs", list(outputs.values()))

    def _edit(self, edit: NodeEdit) -> None:
        if self._attn is None:
            return  # CompNodes keep nothing
        match edit:
            case SelectRows():
                self._attn.select(edit.handle, edit.index)
            case CropTo():
                self._attn.crop(edit.handle, edit.length)
            case ResetCache():
                self._attn.free(edit.handle)
            case CopyCache():
                self._attn.copy(edit.handle, edit.to)
