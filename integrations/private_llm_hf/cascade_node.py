"""A node of token-sharded inference: serves one client's commands as a CompNode (a model on some rows) or AttnNode.

A CompNode receives the tokens of its rows in the clear and returns what the model makes of them; this is what token
sharding promises and no more (docs/cascade.md). Positions are the true ones, so the model's own forward is right.
"""

from __future__ import annotations

import dataclasses
import hmac
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PatchMismatch, TransportError
from private_llm.net.transport import CLIENT, Transport, endpoint_name
from private_llm.sharded.attn_node import AttnNode
from private_llm.sharded.exchange import Exchange
from private_llm.sharded.facts import AttentionCall, Step
from private_llm.sharded.wire import send_floats
from private_llm.sharding import ShardingPlan
from private_llm_hf.cascade_attention import cascade_config, listen, register
from private_llm_hf.costs import rows_of
from private_llm_hf.layout import model_class
from private_llm_hf.wire import OPENED, Message, recv_message, send_message


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
        self.config, self.number, self.transport = config, number, transport
        self.plan = plan_of(config)
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
            self._comp = CompNode(message, Exchange(self.plan, self.transport, calls), self._weights())
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
            shape = tuple(message["shape"])
            ids = self.transport.recv(CLIENT, "tokens", shape, torch.int64)
            kind, outputs = self._comp.run(step, ids, message)
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


class CompNode:
    """The model's own forward on this node's rows."""

    def __init__(self, description: Message, exchange: Exchange, weights: dict[str, Tensor]) -> None:
        self._exchange = exchange
        register()
        values = dict(description["config"])
        config = cascade_config(AutoConfig.for_model(values.pop("model_type"), **values))
        self._model = _with_weights(model_class(description["class"])(config), weights)
        self._keeps = "logits_to_keep" in description["accepts"]
        listen(self._model, self)

    def attend(
        self, module: nn.Module, rows: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, facts: dict[str, Any]
    ) -> Tensor:
        """An attention call of the model."""
        return self._exchange.attend(*rows)

    def run(self, step: Step, ids: Tensor, message: Message) -> tuple[str, dict[str, Tensor]]:
        """One forward: name of its output class, and its outputs for the wanted rows, float32."""
        rows = self._exchange.begin(step)
        extra = {name: message[name] for name in ("token_type_ids",) if message.get(name) is not None}
        if self._keeps:
            extra["logits_to_keep"] = torch.tensor([rows.index(p) for p in message["wanted"]], dtype=torch.int64)
        result = self._model(
            input_ids=ids,
            position_ids=message["positions"],
            attention_mask=torch.ones_like(ids),  # the AttnNodes mask; without this, gaps would look like packed texts
            use_cache=False,
            return_dict=True,
            **extra,
        )
        self._exchange.end()
        found = {name: result.get(name) for name in OPENED}
        outputs = {n: value.to(torch.float32).contiguous() for n, value in found.items() if value is not None}
        return type(result).__name__, outputs


def _with_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> PreTrainedModel:
    missing, surplus = model.load_state_dict(weights, strict=False, assign=True)
    tied = set(model.get_expanded_tied_weights_keys(all_submodels=True))
    buffers = {name for name, _ in model.named_buffers()}
    lost = sorted(set(missing) - tied - buffers)
    if lost or surplus:
        raise PatchMismatch(f"weights: missing {lost[:5] or 'none'}, surplus {sorted(surplus)[:5] or 'none'}")
    model.tie_weights()
    return model.eval()


def call_facts(calls: list[AttentionCall]) -> list[dict[str, Any]]:
    """Attention calls as JSON."""
    return [dataclasses.asdict(call) for call in calls]
