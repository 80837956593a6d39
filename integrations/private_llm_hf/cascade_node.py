"""A node of token-sharded inference: serves one client's commands as a CompNode (a model on some rows) or AttnNode.

A CompNode receives the tokens of its rows in the clear and returns what the model makes of them; this is what token
sharding promises and no more (docs/cascade.md). Positions are the true ones, so the model's own forward is right.
"""

from __future__ import annotations

import dataclasses
import hmac
from typing import Any

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TransportError
from private_llm.net.lanes import node_links
from private_llm.net.transport import CLIENT, Transport, endpoint_name
from private_llm.sharded.attn_node import AttnNode
from private_llm.sharded.exchange import Exchange
from private_llm.sharded.facts import AttentionCall, Step
from private_llm.sharded.wire import send_floats
from private_llm.sharding import ShardingPlan
from private_llm_hf.cascade_comp import CompNode
from private_llm_hf.costs import rows_of
from private_llm_hf.wire import Message, recv_message, send_message


def agree(config: PrivateConfig, transport: Transport, others: list[int]) -> None:
    """Exchange digests of the settings. Raises ConfigError if another endpoint runs others."""
    digest = config.agreement()
    for other in others:
        transport.send(other, "hello", torch.frombuffer(bytearray(digest), dtype=torch.uint8))
    for other in others:
        theirs = transport.recv(other, "hello", (len(digest),), torch.uint8).numpy().tobytes()
        if not hmac.compare_digest(theirs, digest):
            raise ConfigError(
                f"{endpoint_name(other)} runs other settings or another version; protocol, plan and the library "
                "version must be equal at all endpoints"
            )


def plan_of(config: PrivateConfig) -> ShardingPlan:
    """The plan of a configuration."""
    return config.plan or ShardingPlan()


class Node:
    """One endpoint of a plan."""

    def __init__(self, config: PrivateConfig, number: int, transport: Transport) -> None:
        self.plan = plan_of(config)
        before = config.endpoints - self.plan.nodes  # parties of a split
        self.config, self.number, self._links = config, number - before, transport
        self.transport = node_links(transport, before, self.plan.nodes)
        agree(config, transport, [CLIENT])
        self._attn: AttnNode | None = None
        self._comp: CompNode | None = None

    def serve(self) -> None:
        """Answer commands until the client stops. Raises what ended the session otherwise."""
        commands = {"load": self._load, "forward": self._forward, "cache": self._cache, "costs": self._costs}
        while True:
            self.transport.wait(CLIENT)
            message = recv_message(self.transport, CLIENT)
            name = message.get("do")
            if name == "stop":
                return
            if name not in commands:
                raise TransportError(f"unknown command {name!r}: client and node run different versions")
            with torch.no_grad():
                commands[name](message)

    def _load(self, message: Message) -> None:
        calls = [AttentionCall(**facts) for facts in message["calls"]]
        if self.number < self.plan.alpha:
            exchange = Exchange(self.plan, self.transport, calls)
            self._comp = CompNode(self.config, self._links, message, exchange, self._weights())
        else:
            self._attn = AttnNode(self.plan, self.transport, calls)
        self.transport.ledger.reset()
        send_message(self.transport, CLIENT, {"loaded": True})

    def _weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        while True:
            header = recv_message(self.transport, CLIENT)
            if header["weight"] is None:
                return weights
            raw = self.transport.recv(CLIENT, "weight", tuple(header["shape"]), torch.int32)
            weights[header["weight"]] = raw.view(torch.float32)

    def _forward(self, message: Message) -> None:
        batch, past, new = message["step"]
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


def call_facts(calls: list[AttentionCall]) -> list[dict[str, Any]]:
    """Attention calls as JSON."""
    return [dataclasses.asdict(call) for call in calls]
