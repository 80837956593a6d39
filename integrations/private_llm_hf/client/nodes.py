"""The client's link to the nodes of a sharding plan; it stands where `Parties` stands for secret sharing.

Tokens go in the clear to the CompNode of their position, and to no other. Commands carry public facts: shapes,
positions, padding. Nodes that have nothing to do in a step receive nothing.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, PatchMismatch, TransportError, UnsupportedOp
from private_llm.net.roles import called
from private_llm.net.transport import Transport
from private_llm.protocols.plain import PlainClient
from private_llm.ring.ring import Ring
from private_llm.token_sharding import (
    ForwardStep,
    Setting,
    ShardingPlan,
    recv_floats,
    refuse_weak,
    send_floats,
    warn_weak,
)
from private_llm_hf.checkpoint.model_spec import model_class
from private_llm_hf.checkpoint.weights import Sink
from private_llm_hf.client.parties import Parties
from private_llm_hf.client.session_client import Secret
from private_llm_hf.models.architectures import architecture, table
from private_llm_hf.party.node import agree, agreed, check_stored, plan_of, reads_last_token
from private_llm_hf.token_sharding.attention_calls import attention_calls
from private_llm_hf.token_sharding.commands import AttnForward, CompForward, CropTo, LoadNode, NodeEdit
from private_llm_hf.token_sharding.cut import Cut
from private_llm_hf.wire import commands
from private_llm_hf.wire.answers import NodeLoaded, NodeModel, NodeOutputs
from private_llm_hf.wire.commands import OPENED, Call, send_message

MOST_NODES = 250  # endpoints have one-byte numbers, and the client has one


def join_nodes(config: PrivateConfig, transport: Transport, shutdown: Callable[[], None]) -> "Nodes":
    """The client's end, after agreeing with every node."""
    agree(config, transport, list(range(plan_of(config).nodes)))
    return Nodes(config, transport, shutdown)


def check_sharding(
    cls: type[PreTrainedModel], config: PretrainedConfig, plan: ShardingPlan, split: int | None = None
) -> None:
    """Raises ConfigError for weak or large plans, PatchMismatch for unfit models. Warns (WeakProtection) always."""
    if plan.nodes > MOST_NODES:
        raise ConfigError(f"plan: {plan.nodes} nodes; want at most {MOST_NODES} (lower alpha or m)")
    kind = architecture(config).kind
    if kind in ("vision", "encoder-decoder"):
        raise PatchMismatch(f"{cls.__name__}: token sharding serves text decoders and encoders; this is {kind}")
    if cls.__name__.endswith("ForSequenceClassification") and getattr(config, "classifier_pooling", "") == "mean":
        raise PatchMismatch(f"{cls.__name__}: it averages all positions (classifier_pooling='mean'), no node has them")
    calls = attention_calls(cls, config)
    queries = max(call.heads // call.groups for call in calls)
    setting = Setting(split=split is not None, causal=kind == "decoder", queries=queries)
    refuse_weak(plan, setting)
    warn_weak(plan, setting)
    if "position_ids" not in inspect.signature(cls.forward).parameters and not all(call.slopes for call in calls):
        raise PatchMismatch(f"{cls.__name__} takes no position_ids, so rows cannot keep their places")
    if split is not None:
        Cut.of(cls, config, split)
        if len(calls) != config.num_hidden_layers:
            raise PatchMismatch(f"{cls.__name__}: {len(calls)} attention calls in a forward; a split needs one a layer")


@dataclass(frozen=True)
class NodeStep:
    """One forward as the client plans it. rows: for each CompNode its places among the new positions. positions: the
    model's numbers, [batch, new]. wanted: positions whose logits come back.
    """

    at: ForwardStep
    rows: dict[int, list[int]]
    positions: Tensor
    token_types: Tensor | None
    wanted: range

    def due(self, rows: Sequence[int]) -> "Due":
        """What the CompNode of these rows owes."""
        positions = tuple(self.at.past + row for row in rows)
        return Due(self.at.batch, positions, tuple(p for p in positions if p in self.wanted))


class Nodes(Parties):
    """All nodes of one session, as the client sees them."""

    def __init__(self, config: PrivateConfig, transport: Transport, shutdown: Callable[[], None]) -> None:
        super().__init__(config, transport, PlainClient(transport, Ring(config.ring)), shutdown)
        self.plan = plan_of(config)
        self.members = range(self.plan.nodes)
        self._by_mask = self._last_only = False
        self._lengths: dict[int, int] = {}
        self._gone: dict[int, list[int]] = {node: [] for node in range(self.plan.alpha, self.plan.nodes)}

    # -- weights ------------------------------------------------------------------------------------------------
    def use_stored(self, description: commands.Description, mine: Callable[[], str | None]) -> bool:
        """Let the CompNodes use the model that they hold; False without one. Raises as `agreed`, `check_stored`."""
        comps = range(self.plan.alpha)
        with self._call():
            self.tell(commands.Hello(), comps)
            stored = agreed({called(self.config, node): self._answer(node, NodeModel) for node in comps})
            if stored.model is None:
                return False
            check_stored(stored, description, mine)
            self._load(description, disk=True)
            self._loaded()
            return True

    @contextmanager
    def loading(
        self, description: commands.Description, stop_after: str | None = None, cut: Cut | None = None
    ) -> Iterator[Sink]:
        """Send the model to the nodes, its public weights to every CompNode. cut: where a split cuts it, if it does."""
        with self._call():
            self._load(description, disk=False, cut=cut)
            yield self._send_weight
            self.tell(commands.EndOfWeights(), range(self.plan.alpha))
            self._loaded()

    def _load(self, description: commands.Description, disk: bool, cut: Cut | None = None) -> None:
        cls = model_class(description.class_)
        config = cls.config_class.from_dict(dict(description.config))
        calls = attention_calls(cls, config)[cut.count if cut else 0 :]
        self._by_mask = config.model_type in table("positions_by_mask")
        self._last_only = reads_last_token(cls, config)
        accepts = sorted(set(inspect.signature(cls.forward).parameters))
        self.tell(LoadNode(description, disk, cut, tuple(calls), tuple(accepts)))

    def _loaded(self) -> None:
        for node in self.members:
            self._answer(node, NodeLoaded)
        self.transport.ledger.reset()

    def _send_weight(self, name: str, tensor: Tensor) -> None:
        raw = tensor.detach().to(torch.float32).contiguous().clone().view(torch.int32)
        for node in range(self.plan.alpha):
            send_message(self.transport, node, commands.Weight(name, tuple(tensor.shape)))
            self.transport.send(node, "weight", raw)

    # -- calls ----------------------------------------------------------------------------------------------------
    def forward(self, call: Call, secrets: list[Secret]) -> tuple[str, dict[str, Tensor]]:
        """As `Parties.forward`: inputs out to their nodes, the wanted rows of the outputs back."""
        with self.alone():
            step = self.step(call)
            ((secret, item),) = zip(secrets, call.secret, strict=True)
            if isinstance(secret, Tensor):
                values = self.ring.decode(secret, self.config.frac_bits).to(torch.float32).view(item.shape)

                def feed(node: int, rows: list[int]) -> None:
                    send_floats(self.transport, node, "values", [values[:, rows]])

                return self.run(step, "values", feed)
            ids = secret[0].view(step.at.batch, step.at.new)
            return self.run(
                step, "tokens", lambda node, rows: self.transport.send(node, "tokens", ids[:, rows].contiguous())
            )

    def step(self, call: Call) -> NodeStep:
        """What a call means for the nodes. Raises UnsupportedOp and DomainError before anything is sent."""
        (item,) = call.secret
        if item.name not in ("input_ids", "inputs_embeds"):
            raise UnsupportedOp(f"{item.name}: token sharding takes text (input_ids or inputs_embeds)")
        batch, new = item.shape[:2]
        handle, public = call.cache, call.public
        past = 0 if handle is None else self._lengths.get(handle, 0)
        total = past + new
        self._check_length(total)
        padding, positions = _tensor(public, "attention_mask"), _tensor(public, "position_ids")
        if positions is None:
            positions = self._positions(past, total, batch, padding)
        keep = 1 if self._last_only else int(public.get("logits_to_keep", 0))
        mine = {node: self.plan.rows_of_comp(node, past, total) for node in range(self.plan.alpha)}
        return NodeStep(
            ForwardStep(handle, batch, past, new, None if padding is None else padding.bool()),
            {node: [p - past for p in held] for node, held in mine.items() if held}, positions,
            _tensor(public, "token_type_ids"), range(max(past, total - keep) if keep else past, total),
        )  # fmt: skip

    def run(self, step: NodeStep, source: str, feed: Callable[[int, list[int]], None]) -> tuple[str, dict[str, Tensor]]:
        """One forward; `feed` sends each CompNode its rows of the inputs, unless they come from elsewhere. source: what
        the rows are, "tokens", "values" (embeddings) or "states" (from the parties of a split).
        """
        at, types = step.at, step.token_types
        with self._call():
            self._wake_attention(at)
            for node, rows in step.rows.items():
                command = CompForward(
                    at, source, len(rows), step.positions[:, rows], step.due(rows).wanted,
                    None if types is None else types[:, rows],
                )  # fmt: skip
                send_message(self.transport, node, command)
                feed(node, rows)
            kind, found = self._outputs(step)
        if at.handle is not None:
            self._lengths[at.handle] = at.total
        merged = in_order(found)
        if self._last_only:
            merged["logits"] = merged["logits"][:, 0]
        return kind, merged

    def _positions(self, past: int, total: int, batch: int, padding: Tensor | None) -> Tensor:
        """Position numbers as the model itself would make them: by place, or for some families by unmasked place."""
        if padding is None or not self._by_mask:
            return torch.arange(past, total).expand(batch, total - past)
        counted = padding.to(torch.int64)
        return (counted.cumsum(1) * counted - 1)[:, past:]

    def _check_length(self, total: int) -> None:
        plan = self.plan
        least = max(plan.alpha, plan.c + 1) + (plan.front or 0)
        if total < least and not plan.accept_weak_plan:
            raise DomainError(
                f"a text of {total} tokens is too short for {plan.alpha} CompNodes with clusters of {plan.c} and a "
                f"front of {plan.front}; want {least} or more (use a smaller plan, or accept_weak_plan)"
            )

    def _wake_attention(self, step: ForwardStep) -> None:
        """Tell the AttnNodes of every shard with new rows; each is told of caches that are gone when it next wakes."""
        for handle in self._take_unused():
            self._lengths.pop(handle, None)
            for gone in self._gone.values():
                gone.append(handle)
        shards = {self.plan.shard_of(p) for p in range(step.past, step.total)}
        nodes = {self.plan.attn_endpoint(shard, other) for shard in shards for other in range(self.plan.beta)}
        for node in sorted(nodes):
            send_message(self.transport, node, AttnForward(step, tuple(self._gone[node])))
            self._gone[node] = []

    def _outputs(self, step: NodeStep) -> "tuple[str, list[tuple[Due, dict[str, Tensor]]]]":
        """Class and outputs of the awake nodes. Raises TransportError, with its name, for one whose answer is odd."""
        answers: dict[str, Answer] = {}
        found = []
        for node, rows in step.rows.items():
            due = step.due(rows)
            who = self.transport.name_of(node)
            answer = answers[who] = read_answer(self._answer(node, NodeOutputs), due, who)
            expected = [(shape, torch.float32) for shape in answer.shapes.values()]
            tensors = recv_floats(self.transport, node, "outputs", expected)
            found.append((due, dict(zip(answer.shapes, tensors, strict=True))))
        return check_equal(answers), found

    def command(self, edit: commands.CacheEdit) -> None:
        """Cache management at the AttnNodes."""
        asked: NodeEdit
        if isinstance(edit, commands.CropCache):
            self._lengths[edit.handle] -= edit.count
            asked = CropTo(edit.handle, self._lengths[edit.handle])
        else:
            asked = edit
        if isinstance(edit, commands.ResetCache):
            self._lengths.pop(edit.handle, None)
        elif isinstance(edit, commands.CopyCache):
            self._lengths[edit.to] = self._lengths.get(edit.handle, 0)
        with self._call():
            self.tell(asked, range(self.plan.alpha, self.plan.nodes))


def _tensor(public: Mapping[str, commands.Fact], name: str) -> Tensor | None:
    """A public argument that can be nothing else."""
    value = public.get(name)
    if value is not None and not isinstance(value, Tensor):
        raise DomainError(f"{name}: got {type(value).__name__}; want a tensor")
    return value


# -- what CompNodes answer to a forward, checked before the client allocates or believes anything ---------------------
# A node may lie about numbers, which nobody can see. About everything else (which outputs there are, of which shapes,
# for how many rows) it can only be caught: TransportError, with its name.
_BY_ROW = ("last_hidden_state", "start_logits", "end_logits")
"""Outputs with an entry for each position; logits have one if they are three-dimensional."""

_WIDEST = 1 << 20  # numbers that an entry of an output may have: larger than vocabularies and hidden sizes


@dataclass(frozen=True)
class Due:
    """What one node owes: `batch` texts, entries for its `rows` (positions), logits only for the `wanted` ones."""

    batch: int
    rows: tuple[int, ...]
    wanted: tuple[int, ...]

    def positions(self, name: str, dimensions: int) -> tuple[int, ...] | None:
        """The positions that an output has entries for; None if it has one for each text."""
        if name == "logits":
            return self.wanted if dimensions == 3 else None
        return self.rows if name in _BY_ROW else None


@dataclass(frozen=True)
class Answer:
    """One node's answer: the class of its model's output, the outputs' shapes, and what of them all nodes share."""

    kind: str
    shapes: Mapping[str, tuple[int, ...]]
    common: Mapping[str, tuple[int, ...]]


def read_answer(message: NodeOutputs, due: Due, who: str) -> Answer:
    """Check one node's announcement. Raises TransportError that names `who`."""
    if not message.outputs:
        raise TransportError(f"{who} answered without outputs; client and node run different versions, or it lies")
    shapes: dict[str, tuple[int, ...]] = {}
    common: dict[str, tuple[int, ...]] = {}
    for output in message.outputs:
        name, shape = output.name, output.shape
        if name not in OPENED or name in shapes:
            raise TransportError(f"{who} answered with output {name!r}; want each of {', '.join(OPENED)} at most once")
        if not all(0 <= size <= _WIDEST for size in shape):
            raise TransportError(f"{who}: '{name}' has shape {list(shape)}; want sizes from 0 to {_WIDEST}")
        positions = due.positions(name, len(shape))
        start = (due.batch,) if positions is None else (due.batch, len(positions))
        if shape[: len(start)] != start or len(shape) > 3:
            raise TransportError(f"{who}: '{name}' has shape {list(shape)}; want one that starts with {list(start)}")
        shapes[name] = shape
        common[name] = (len(shape), *shape[len(start) :])
    return Answer(message.class_, shapes, common)


def check_equal(answers: Mapping[str, Answer]) -> str:
    """The output class that all nodes (by name) gave. Raises TransportError if they do not run the same model."""
    first, *others = answers
    for other in others:
        if (answers[first].kind, answers[first].common) != (answers[other].kind, answers[other].common):
            raise TransportError(f"{first} and {other} gave different kinds of answers: they do not run the same model")
    return answers[first].kind


def in_order(found: Sequence[tuple[Due, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Rows of all nodes by position; what has no rows (a pooled state) comes from the first of them."""
    merged: dict[str, Tensor] = {}
    due, first = found[0]
    for name, own in first.items():
        if due.positions(name, own.dim()) is None:
            merged[name] = own
            continue
        rows: dict[int, Tensor] = {}
        for due, outputs in found:
            rows.update(zip(due.positions(name, own.dim()) or (), outputs[name].unbind(1), strict=True))
        merged[name] = torch.stack([rows[position] for position in sorted(rows)], 1)
    return merged
