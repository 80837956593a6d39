"""The client's link to the nodes of a sharding plan; it stands where `Parties` stands for secret sharing.

Tokens go in the clear to the CompNode of their position, and to no other. Commands carry public facts: shapes,
positions, padding. Nodes that have nothing to do in a step hear nothing of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, PatchMismatch, UnsupportedOp
from private_llm.net.transport import Transport
from private_llm.protocols.session import PlainClient
from private_llm.ring.ring import Ring
from private_llm.sharded.audit import refuse_weak
from private_llm.sharded.wire import recv_floats
from private_llm.sharding import ShardingPlan
from private_llm_hf.architectures import architecture, positions_by_mask
from private_llm_hf.cascade_attention import attention_calls
from private_llm_hf.cascade_node import agree, call_facts, plan_of
from private_llm_hf.client import Parties, Secret
from private_llm_hf.layout import model_class
from private_llm_hf.weights import Sink
from private_llm_hf.wire import Message, recv_message, send_message

MOST_NODES = 250
"""Endpoints have one-byte numbers, and the client has one."""


def join_nodes(config: PrivateConfig, transport: Transport, shutdown: Callable[[], None]) -> Nodes:
    """The client's end, after agreeing with every node."""
    agree(config, transport, list(range(config.parties)))
    return Nodes(config, transport, PlainClient(transport, Ring(config.ring)), shutdown)


def check_sharding(cls: type[PreTrainedModel], config: PretrainedConfig, plan: ShardingPlan) -> None:
    """Raises ConfigError for plans that are weak or too large, PatchMismatch for models that cannot be sharded."""
    if plan.nodes > MOST_NODES:
        raise ConfigError(f"plan: {plan.nodes} nodes; want at most {MOST_NODES} (lower alpha or m)")
    refuse_weak(plan)
    kind = architecture(config).kind
    if kind in ("vision", "encoder-decoder"):
        raise PatchMismatch(f"{cls.__name__}: token sharding serves text decoders and encoders; this is {kind}")
    if kind == "decoder" and cls.__name__.endswith("ForSequenceClassification"):
        raise PatchMismatch(f"{cls.__name__}: token sharding has no rule for classifying by the last token")
    if "position_ids" not in inspect.signature(cls.forward).parameters:
        raise PatchMismatch(f"{cls.__name__} takes no position_ids, so rows cannot keep their places")
    attention_calls(cls, config)


_BY_ROW = ("last_hidden_state", "start_logits", "end_logits")
"""Outputs with an entry for each position; logits have one if they are three-dimensional."""


class Nodes(Parties):
    """All nodes of one session, as the client sees them."""

    plan: ShardingPlan

    def __init__(
        self, config: PrivateConfig, transport: Transport, end: PlainClient, shutdown: Callable[[], None]
    ) -> None:
        super().__init__(config, transport, end, shutdown)
        self.plan = plan_of(config)
        self._by_mask = False
        self._lengths: dict[int, int] = {}
        self._gone: dict[int, list[int]] = {node: [] for node in range(self.plan.alpha, self.plan.nodes)}

    # -- weights ------------------------------------------------------------------------------------------------
    def held_model(self) -> str | None:
        """Nodes get the model from the client."""
        return None

    @contextmanager
    def loading(self, description: Message) -> Iterator[Sink]:
        """Tell the nodes the model: its public weights go to every CompNode."""
        cls = model_class(description["class"])
        config = cls.config_class.from_dict(dict(description["config"]))
        calls = call_facts(attention_calls(cls, config))
        self._by_mask = config.model_type in positions_by_mask()
        accepts = sorted(set(inspect.signature(cls.forward).parameters))
        with self._call():
            self._tell({"do": "load", "calls": calls, "accepts": accepts, **description})
            yield self._send_weight
            self._tell({"weight": None}, range(self.plan.alpha))
            for node in range(self.plan.nodes):
                recv_message(self._transport, node)
            self._transport.ledger.reset()

    def _send_weight(self, name: str, tensor: Tensor) -> None:
        raw = tensor.detach().to(torch.float32).contiguous().clone().view(torch.int32)
        for node in range(self.plan.alpha):
            send_message(self._transport, node, {"weight": name, "shape": list(tensor.shape)})
            self._transport.send(node, "weight", raw)

    # -- calls ----------------------------------------------------------------------------------------------------
    def forward(self, call: Message, secrets: list[Secret]) -> tuple[str, dict[str, Tensor]]:
        """As `Parties.forward`: tokens out to their nodes, the wanted rows of the outputs back."""
        ((secret, item),) = zip(secrets, call["secret"], strict=True)
        if isinstance(secret, Tensor) or item["name"] != "input_ids":
            raise UnsupportedOp(f"{item['name']}: token sharding takes token ids (input_ids)")
        batch, new = item["shape"]
        ids = secret[0].view(batch, new)
        handle = call["cache"]
        past = self._lengths.get(handle, 0)
        total = past + new
        self._check_length(total)
        public = call["public"]
        padding = public.get("attention_mask")
        positions = public.get("position_ids")
        if positions is None:
            positions = self._positions(past, total, batch, padding)
        keep = public.get("logits_to_keep", 0)
        wanted = range(max(past, total - keep) if keep else past, total)
        awake = sorted({self.plan.comp_of(p) for p in range(past, total)})
        with self._call():
            step = {
                "do": "forward", "cache": handle, "step": [batch, past, new],
                "padding": None if padding is None else padding.bool(),
            }  # fmt: skip
            self._wake_attention(step, past, total)
            for node in awake:
                mine = self.plan.rows_of_comp(node, past, total)
                local = [p - past for p in mine]
                types = public.get("token_type_ids")
                facts = {
                    "shape": [batch, len(mine)], "positions": positions[:, local],
                    "wanted": [p for p in mine if p in wanted],
                    "token_type_ids": None if types is None else types[:, local],
                }  # fmt: skip
                send_message(self._transport, node, {**step, **facts})
                self._transport.send(node, "tokens", ids[:, local].contiguous())
            answers = {node: self._outputs(node) for node in awake}
        if handle is not None:
            self._lengths[handle] = total
        kinds = {kind for kind, _ in answers.values()}
        return kinds.pop(), self._merge({n: found for n, (_, found) in answers.items()}, past, total, list(wanted))

    def _positions(self, past: int, total: int, batch: int, padding: Tensor | None) -> Tensor:
        """Position numbers as the model itself would make them: by place, or for some families by unmasked place."""
        if padding is None or not self._by_mask:
            return torch.arange(past, total).expand(batch, total - past)
        counted = padding.to(torch.int64)
        return (counted.cumsum(1) * counted - 1)[:, past:]

    def _check_length(self, total: int) -> None:
        plan = self.plan
        if total < max(plan.alpha, plan.c + 1) and not plan.accept_weak_plan:
            raise DomainError(
                f"a text of {total} tokens is too short for {plan.alpha} CompNodes with clusters of {plan.c}; want "
                f"{max(plan.alpha, plan.c + 1)} or more (use a smaller plan, or accept_weak_plan)"
            )

    def _wake_attention(self, step: Message, past: int, total: int) -> None:
        """Tell the AttnNodes of every shard with new rows; each hears of caches that are gone when it next wakes."""
        for handle in self._take_unused():
            self._lengths.pop(handle, None)
            for gone in self._gone.values():
                gone.append(handle)
        shards = {self.plan.shard_of(p) for p in range(past, total)}
        nodes = {self.plan.attn_endpoint(shard, other) for shard in shards for other in range(self.plan.beta)}
        for node in sorted(nodes):
            send_message(self._transport, node, {**step, "free": self._gone[node]})
            self._gone[node] = []

    def _outputs(self, node: int) -> tuple[str, dict[str, Tensor]]:
        answer = recv_message(self._transport, node)
        names = answer["outputs"]
        found = recv_floats(self._transport, node, "outputs", [(tuple(shape), torch.float32) for _, shape in names])
        return str(answer["class"]), {name: tensor for (name, _), tensor in zip(names, found, strict=True)}

    def _merge(
        self, outputs: dict[int, dict[str, Tensor]], past: int, total: int, wanted: list[int]
    ) -> dict[str, Tensor]:
        """Rows of all nodes in order; what has no rows (a pooled state) comes from the node of the first position."""
        merged: dict[str, Tensor] = {}
        first = self.plan.comp_of(0)
        for name, example in next(iter(outputs.values())).items():
            if name not in _BY_ROW and not (name == "logits" and example.dim() == 3):
                merged[name] = outputs[first][name]
                continue
            rows: dict[int, Tensor] = {}
            for node, found in outputs.items():
                mine = self.plan.rows_of_comp(node, past, total)
                kept = [p for p in mine if p in wanted] if name == "logits" else mine
                rows.update(zip(kept, found[name].unbind(1), strict=True))
            merged[name] = torch.stack([rows[position] for position in sorted(rows)], 1)
        return merged

    def command(self, message: Message) -> None:
        """Cache management at the AttnNodes."""
        handle, how = message["handle"], message["how"]
        if how == "crop":
            self._lengths[handle] -= message["count"]
            message = {**message, "length": self._lengths[handle]}
        elif how == "reset":
            self._lengths.pop(handle, None)
        elif how == "copy":
            self._lengths[message["to"]] = self._lengths.get(handle, 0)
        with self._call():
            self._tell(message, range(self.plan.alpha, self.plan.nodes))
