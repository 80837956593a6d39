"""A node of token-sharded inference: serves one client's commands as a CompNode (a model on some rows) or AttnNode.

A CompNode receives the tokens of its rows in the clear and returns what the model makes of them; this is what token
sharding promises and no more (docs/cascade.md). Positions are the true ones, so the model's own forward is right.
"""

from __future__ import annotations

import dataclasses
import hmac
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TransportError
from private_llm.kernels.devices import device_for
from private_llm.net.parallel_sessions import node_links
from private_llm.net.placed import PlacedTransport
from private_llm.net.transport import CLIENT, Transport
from private_llm.token_sharding import AttentionCall, AttnNode, Exchange, ShardingPlan, Step, send_floats
from private_llm_hf.checkpoint.node_checkpoint import NodeCheckpoint, claim
from private_llm_hf.client.costs import rows_of
from private_llm_hf.party.announced import announced_shapes, take_announced
from private_llm_hf.party.command_loop import Heartbeat, serve_commands
from private_llm_hf.party.model import release
from private_llm_hf.token_sharding.comp_node import CompNode
from private_llm_hf.wire import Message, recv_message, send_message

MOST_POSITIONS = 1 << 20
"""Positions that a text may have."""


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
    """One endpoint of a plan."""

    def __init__(
        self, config: PrivateConfig, number: int, transport: Transport, held: NodeCheckpoint | None = None
    ) -> None:
        """held: the model that this CompNode read itself."""
        if config.device_map is not None and config.protocol == "cascade":  # before a split the parties may have one
            raise ConfigError("device_map: a node keeps its model, or its cache, on one device; set device instead")
        self.plan = plan_of(config)
        before = config.endpoints - self.plan.nodes  # parties of a split
        self.config, self.number, self._links = config, number - before, transport
        self.transport = node_links(transport, before, self.plan.nodes)
        self._device, self._held = device_for(config.device, number), held
        self._heartbeat = Heartbeat(self.transport, config.timeout_s / 4)
        agree(config, transport, [CLIENT])
        self._attn: AttnNode | None = None
        self._comp: CompNode | None = None

    def serve(self) -> None:
        """Answer commands until the client stops. Raises what ended the session otherwise."""
        commands = {
            "hello": self._hello,
            "load": self._load,
            "forward": self._forward,
            "cache": self._cache,
            "costs": self._costs,
        }
        try:
            serve_commands(self.transport, commands, self._heartbeat)
        finally:
            self._forget()

    def _forget(self) -> None:
        """Free model and caches now: a model refers to its node, so Python would do it much later."""
        comp, self._comp, self._attn = self._comp, None, None
        if comp is not None:
            release(comp.model)

    def _hello(self, _: Message) -> None:
        """Which model this CompNode holds, if it holds one."""
        send_message(self.transport, CLIENT, claim(self._held))

    def _load(self, message: Message) -> None:
        calls = [AttentionCall(**facts) for facts in message["calls"]]
        links = PlacedTransport(self.transport, lambda: self._device)
        if self.number < self.plan.alpha:
            if message["held"] or self._held is not None:
                message, weights = self._own_model(message)
            else:
                weights = self._weights(message)
            exchange = Exchange(self.plan, links, calls)
            self._comp = CompNode(self.config, self._links, message, exchange, weights, self._device)
            self._heartbeat.watch(self._comp.model)
        else:
            self._attn = AttnNode(self.plan, links, calls)
            self._attn.join()
        self.transport.ledger.reset()
        send_message(self.transport, CLIENT, {"loaded": True})

    def _own_model(self, message: Message) -> tuple[Message, dict[str, Tensor]]:
        """The model that this CompNode read itself: a node that was started with one serves no other."""
        if self._held is None:
            raise ConfigError("the client sends no weights, and this CompNode holds none (--model)")
        if not message["held"]:
            raise ConfigError("this CompNode was started with a model (--model) and serves that model only")
        return {**message, **self._held.description}, self._held.weights

    def _weights(self, message: Message) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        wanted = announced_shapes(message, torch.float32.itemsize)
        while True:
            header = recv_message(self.transport, CLIENT)
            if header["weight"] is None:
                return weights
            raw = self.transport.recv(CLIENT, "weight", take_announced(wanted, header), torch.int32)
            weights[header["weight"]] = raw.view(torch.float32)

    def _forward(self, message: Message) -> None:
        batch, past, new = _sizes(message["step"])
        step = Step(message["cache"], batch, past, new, message["padding"])
        if self._attn is not None:
            for handle in message["free"]:
                self._attn.free(handle)
            self._attn.run(step)
        elif self._comp is not None:
            kind, outputs = self._comp.run(step, message)
            shapes = [[name, list(value.shape)] for name, value in outputs.items()]
            send_message(self.transport, CLIENT, {"class": kind, "outputs": shapes})
            send_floats(self.transport, CLIENT, "outputs", list(outputs.values()))
        else:
            raise TransportError("a call arrived before a model was loaded")

    def _cache(self, message: Message) -> None:
        if self._attn is None:
            return  # CompNodes keep nothing
        handle, how = message["handle"], message["how"]
        if how == "select":
            self._attn.select(handle, message["index"])
        elif how == "crop":
            self._attn.crop(handle, message["length"])
        elif how == "reset":
            self._attn.free(handle)
        elif how == "copy":
            self._attn.copy(handle, message["to"])
        else:
            raise TransportError(f"unknown cache command {how!r}")

    def _costs(self, message: Message) -> None:
        send_message(self.transport, CLIENT, rows_of(self.transport.ledger))
        if message["reset"]:
            self.transport.ledger.reset()


def _sizes(step: Sequence[object]) -> tuple[int, int, int]:
    """Batch, positions before and new positions. Raises TransportError for what no text has, before lists are made."""
    sizes = [size for size in step if isinstance(size, int)]
    batch, past, new = sizes if len(sizes) == len(step) == 3 else (0, 0, 0)
    if batch < 1 or past < 0 or not 1 <= new <= MOST_POSITIONS - past:
        raise TransportError(f"step: got {step}; want a batch and up to {MOST_POSITIONS} positions, some of them new")
    return batch, past, new


def call_facts(calls: list[AttentionCall]) -> list[dict[str, Any]]:
    """Attention calls as JSON."""
    return [dataclasses.asdict(call) for call in calls]
