"""A node of token-sharded inference: serves one client's commands as a CompNode (a model on some rows) or AttnNode.

A CompNode receives the tokens of its rows in the clear and returns what the model makes of them; this is what token
sharding promises and no more (docs/cascade.md). Positions are the true ones, so the model's own forward is right.
"""

import dataclasses
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, assert_never, get_args

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PatchMismatch, PrivateLLMError, TransportError
from private_llm.kernels.devices import device_for
from private_llm.net.parallel_sessions import node_links
from private_llm.net.transport import CLIENT, PlacedTransport, Transport
from private_llm.protocols.session import opened
from private_llm.protocols.settings_table import other_settings, settings_table
from private_llm.ring.ring import Ring
from private_llm.token_sharding import AttnNode, Exchange, ShardingPlan, recv_floats, send_floats
from private_llm_hf.checkpoint.checkpoint import Checkpoint
from private_llm_hf.checkpoint.model_spec import ModelSpec, accepted_class, describe, named_class
from private_llm_hf.checkpoint.weights import WeightsDigest, WithoutWeights
from private_llm_hf.models.architectures import architecture
from private_llm_hf.party.command_loop import Heartbeat, serve_commands, tell_costs
from private_llm_hf.party.model import release
from private_llm_hf.party.model_description import take_described, validate_model_description
from private_llm_hf.token_sharding.attention_calls import cascade_config, listen, register
from private_llm_hf.token_sharding.commands import AttnForward, CompForward, CropTo, LoadNode, NodeCommand, NodeEdit
from private_llm_hf.token_sharding.cut import StandIn
from private_llm_hf.wire import commands
from private_llm_hf.wire.answers import NodeLoaded, NodeModel, NodeOutput, NodeOutputs
from private_llm_hf.wire.commands import recv_weight, send_message

_COMMANDS: tuple[type[NodeCommand], ...] = get_args(NodeCommand)


def agree(config: PrivateConfig, transport: Transport, others: list[int]) -> None:
    """Exchange digests of the settings. Raises ConfigError if another endpoint runs others."""
    digest = config.agreement()
    mine = digest + settings_table(config)
    for other in others:
        transport.send(other, "hello", torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    for other in others:
        theirs = transport.recv(other, "hello", (len(mine),), torch.uint8).numpy().tobytes()
        if not hmac.compare_digest(theirs[: len(digest)], digest):
            raise other_settings(config, transport.name_of(other), theirs[len(digest) :])


def plan_of(config: PrivateConfig) -> ShardingPlan:
    """The plan of a configuration."""
    return config.plan or ShardingPlan()


class Node:
    """One endpoint of a plan. Raises ConfigError for a device_map, which nodes do not follow."""

    def __init__(
        self, config: PrivateConfig, number: int, transport: Transport, checkpoint: "NodeCheckpoint | None" = None
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
        finally:  # free model and caches now: a model refers to its node, so Python would do it much later
            comp, self._comp, self._attn = self._comp, None, None
            if comp is not None:
                release(comp.model)

    def _obey(self, command: NodeCommand) -> None:
        match command:
            case commands.Hello():  # which model this CompNode holds, if it holds one
                held = self._checkpoint
                facts = (None,) * 3 if held is None else (held.description.model, held.description.class_, held.digest)
                send_message(self.transport, CLIENT, NodeModel(*facts))
            case LoadNode():
                self._load(command)
            case AttnForward():
                self._attend(command)
            case CompForward():
                self._compute(command)
            case commands.TellCosts():
                tell_costs(self.transport, self.transport.ledger, command)
            case commands.SelectRows() | CropTo() | commands.ResetCache() | commands.CopyCache():
                self._edit(command)
            case _:
                assert_never(command)

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

    def _weights(self, description: commands.Description) -> dict[str, Tensor]:
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
            case commands.SelectRows():
                self._attn.select(edit.handle, edit.index)
            case CropTo():
                self._attn.crop(edit.handle, edit.length)
            case commands.ResetCache():
                self._attn.free(edit.handle)
            case commands.CopyCache():
                self._attn.copy(edit.handle, edit.to)


# -- a CompNode: the model's own forward on some rows, attention by way of the AttnNodes ------------------------------
class CompNode:
    """The model on this node's rows, on `device`; what comes and goes lies in main memory. links: to all endpoints by
    their own numbers, the parties of a split among them. Raises PatchMismatch for weights that are missing or surplus.
    """

    def __init__(
        self, config: PrivateConfig, links: Transport, loaded: LoadNode, exchange: Exchange,
        weights: dict[str, Tensor], device: torch.device,
    ) -> None:  # fmt: skip
        self._config, self._links, self._exchange, self._device = config, links, exchange, device
        register()
        values = dict(loaded.description.config)
        kind = accepted_class(loaded.description.class_, values)
        settings = cascade_config(AutoConfig.for_model(values.pop("model_type"), **values))
        with WithoutWeights():
            model = kind(settings)
        self._stand_in = None if loaded.cut is None else StandIn(model, loaded.cut)
        self.model = _with_weights(model, weights).to(device)
        self._accepts = frozenset(loaded.accepts)
        self._last_only = reads_last_token(kind, settings)
        self._width = settings.get_text_config().hidden_size
        listen(self.model, self._attend)

    def _attend(self, module: nn.Module, rows: tuple[Tensor, Tensor, Tensor], *_: object) -> Tensor:
        return self._exchange.attend(*rows)

    def run(self, command: CompForward) -> tuple[str, dict[str, Tensor]]:
        """One forward: output class, outputs of the wanted rows, float32. Raises TransportError for other inputs."""
        batch = command.step.batch
        rows = self._exchange.begin(command.step)
        given = self._inputs(command.source, batch, command.rows)
        # The AttnNodes mask; without this, gaps would look like packed texts.
        given["attention_mask"] = torch.ones(batch, command.rows, dtype=torch.int64)
        if command.token_types is not None:
            given["token_type_ids"] = command.token_types
        if "position_ids" in self._accepts:
            given["position_ids"] = command.positions
        given = {name: value.to(self._device) for name, value in given.items()}
        wanted = torch.tensor([rows.index(p) for p in command.wanted], dtype=torch.int64, device=self._device)
        kind, outputs = self._forward(given, wanted)
        self._exchange.end()
        return kind, {n: value.to("cpu", torch.float32).contiguous() for n, value in outputs.items()}

    def _forward(self, given: dict[str, Any], wanted: Tensor) -> tuple[str, dict[str, Tensor]]:
        if self._last_only:
            states = self.model.base_model(**given, use_cache=False, return_dict=True).last_hidden_state
            return "SequenceClassifierOutputWithPast", {"logits": self.model.score(states[:, wanted])}
        if "logits_to_keep" in self._accepts:
            given["logits_to_keep"] = wanted
        result = self.model(**given, use_cache=False, return_dict=True)
        found = {name: result.get(name) for name in commands.OPENED}
        return type(result).__name__, {name: value for name, value in found.items() if value is not None}

    def _inputs(self, source: str, batch: int, rows: int) -> dict[str, Tensor]:
        """What the model's forward is called with, as it comes from the client or from the parties of a split."""
        if self._stand_in is not None and source == "states":
            shape = (batch, rows, self._stand_in.width)
            elements = opened(self._config, self._links, shape)
            states = Ring(self._config.ring).decode(elements, self._config.frac_bits)
            self._stand_in.rows = states.to(self._device, torch.float32)
            return {"input_ids": torch.zeros(batch, rows, dtype=torch.int64)}  # embedded, and then replaced
        if self._stand_in is None and source == "tokens":
            return {"input_ids": self._links.recv(CLIENT, "tokens", (batch, rows), torch.int64)}
        if self._stand_in is None and source == "values":
            expected = [((batch, rows, self._width), torch.float32)]
            return {"inputs_embeds": recv_floats(self._links, CLIENT, "values", expected)[0]}
        raise TransportError(f"a forward on {source!r} does not fit the model that was loaded here")


def reads_last_token(kind: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """Whether a model classifies a text by the state of its last token."""
    return architecture(config).kind == "decoder" and kind.__name__.endswith("ForSequenceClassification")


def _with_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> PreTrainedModel:
    missing, surplus = model.load_state_dict(weights, strict=False, assign=True)
    tied = set(model.get_expanded_tied_weights_keys(all_submodels=True))
    buffers = {name for name, _ in model.named_buffers()}
    lost = sorted(set(missing) - tied - buffers)
    if lost or surplus:
        raise PatchMismatch(f"weights: missing {lost[:5] or 'none'}, surplus {sorted(surplus)[:5] or 'none'}")
    model.tie_weights()
    return model.eval()


# -- a public model that a CompNode reads from its own disk, and digests by which all endpoints agree -----------------
@dataclass(frozen=True)
class NodeCheckpoint:
    """A checkpoint in a node's memory. weights: float32. digest: `WeightsDigest` of them."""

    description: commands.Description
    weights: dict[str, Tensor]
    digest: str

    @classmethod
    def open(cls, source: str) -> "NodeCheckpoint":
        """Read a model folder or hub id. Raises ConfigError without one, PatchMismatch where weights do not fit."""
        try:
            checkpoint = Checkpoint(source)
            config = checkpoint.config()
            found = named_class(source, config)
            weights: dict[str, Tensor] = {}
            digest = WeightsDigest()

            def sink(name: str, tensor: Tensor) -> None:
                digest(name, tensor)
                weights[name] = tensor.to("cpu", torch.float32, copy=True)  # what is streamed may be a mapped file

            spec = ModelSpec.of(found, config)
            checkpoint.stream(found, config, spec.source, spec.folding(sink))
        except PrivateLLMError:
            raise
        except (OSError, ValueError, SafetensorError) as error:  # transformers' and safetensors' own
            raise ConfigError(f"model {source!r}: {str(error).splitlines()[0]}") from None
        return cls(describe(found, config), weights, digest.text())


def agreed(answers: Mapping[str, NodeModel]) -> NodeModel:
    """What all CompNodes hold, from the answer of each. Raises ConfigError that names one with something else."""
    (first, want), *others = answers.items()
    for name, found in others:
        if None in (found.model, want.model) and found != want:
            empty, full = (name, first) if found.model is None else (first, name)
            raise ConfigError(f"{empty} holds no model, and {full} does; start all CompNodes with --model, or none")
        if found.model != want.model:
            raise ConfigError(
                f"{name} holds another model than {first}: a {found.class_}, not this {want.class_} or not of this "
                "configuration; start all CompNodes with one checkpoint"
            )
        if found.weights != want.weights:
            raise ConfigError(f"{name} holds other weights than {first}; start all CompNodes with one checkpoint")
    return want


def check_stored(stored: NodeModel, description: commands.Description, mine: Callable[[], str | None]) -> None:
    """Raises ConfigError unless nodes hold the model of the client, and the weights if it has some (their digest)."""
    if stored.model != description.model:
        raise ConfigError(
            f"the CompNodes hold another model: a {stored.class_}, not this {description.class_} or not of this "
            "configuration; start them with its checkpoint, or load the model they hold"
        )
    own = mine()
    if own is not None and own != stored.weights:
        raise ConfigError(
            "the CompNodes hold other weights than the client; load their checkpoint, or its configuration alone"
        )
