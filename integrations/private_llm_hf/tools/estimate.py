"""What a run will cost, without weights, data, other parties or hardware: the same code on meta tensors.

The client's model is the ordinary private model; after it come the ordinary parties, one after the other, each in a
session that counts instead of computing. Token values do not matter, because no cost depends on them: logits are
zeros here, and generation is told to make a fixed number of tokens.
"""

import copy
import dataclasses
import itertools
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, WeakProtection
from private_llm.net.transport import CLIENT, MetaTransport
from private_llm.protocol_facts import ASSISTED
from private_llm.protocols.session import client_end, meta_session
from private_llm.protocols.weight_sharing import bytes_at_rest
from private_llm.ranges import UNKNOWN, Ranges
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm.token_sharding import Stage, seconds_of
from private_llm_hf.checkpoint.calibration_runs import check_ranges
from private_llm_hf.checkpoint.model_spec import ModelSpec, describe, folds_norms
from private_llm_hf.client.costs import Costs, layer_of
from private_llm_hf.client.model import private_class
from private_llm_hf.client.nodes import check_sharding
from private_llm_hf.client.session_client import Secret, SessionClient, share
from private_llm_hf.client.split import split_forward
from private_llm_hf.models.architectures import architecture, read_facts
from private_llm_hf.models.inputs import image_shape
from private_llm_hf.party.loading import LoadedModel
from private_llm_hf.party.model import empty_model, meta_parameters
from private_llm_hf.party.party import Party
from private_llm_hf.patch_plan import make_patch_plan
from private_llm_hf.token_sharding.cut import Cut, stop_after
from private_llm_hf.tools.estimate_nodes import MetaNodes, Sharded
from private_llm_hf.tools.estimate_products import (
    ProductExchange,
    StoredProducts,
    counted_model,
    kept_bytes,
    own_bytes,
)
from private_llm_hf.tools.priced_once import QuickShapes, price_once
from private_llm_hf.vision.network import Network
from private_llm_hf.vision.networks import BUILDERS
from private_llm_hf.wire.answers import CostRows, Outputs
from private_llm_hf.wire.codec import Message
from private_llm_hf.wire.commands import CacheEdit, Call, Description, Forward, LoadModel


@dataclass(frozen=True)
class LayerCost:
    """What one layer (all modules up to its number) costs in sum: bytes by link, rounds, multiply-adds by party."""

    name: str
    sent: dict[tuple[int, int], int]
    rounds: int
    macs: dict[int, int]
    stages: tuple[Stage, ...] = ()  # what a layer under token sharding consists of, one after the other
    exchanges: tuple[ProductExchange, ...] = ()  # the same under protocol "assisted"

    @property
    def bytes_total(self) -> int:
        """Over all links."""
        return sum(self.sent.values())

    def seconds(self, bandwidth_mbit: float, latency_ms: float, gmacs: float) -> float:
        """One latency a round, the busiest link's bytes, the busiest party's multiply-adds, one after the other.

        Under token sharding the sum of its stages (see `nodes/stage_costs.py`): two latencies a round, and the
        bytes of the busiest network card in place of a link's.
        """
        if self.stages:
            return seconds_of(self.stages, bandwidth_mbit, latency_ms, gmacs)
        wire = max(self.sent.values(), default=0) * 8 / (bandwidth_mbit * 1e6)
        return self.rounds * latency_ms / 1e3 + wire + max(self.macs.values(), default=0) / (gmacs * 1e9)


@dataclass(frozen=True)
class Estimate:
    """All costs of a run. Bytes, rounds and multiply-adds are exact; memory counts weights and cache of one party.

    Under token sharding weights are those of a CompNode, and the cache is that of the fullest AttnNode; after a split
    both are of a party, and `sharded` has those of the nodes. seeds_bytes: the weights of each party with
    weights_at_rest="seeds"; () where there are no masks. prompt: of a generation, the part before its first new token.
    exchanges: under protocol "assisted"; then cache_bytes are the client's, and client_bytes are its own weights and
    what it keeps of the others. corrections: that it takes, if any.
    """

    costs: Costs
    weight_bytes: int
    cache_bytes: int
    sharded: Sharded | None = None
    prompt: "Estimate | None" = None
    seeds_bytes: tuple[int, ...] = ()
    exchanges: tuple[ProductExchange, ...] = ()
    client_bytes: int = 0
    corrections: StoredProducts | None = None

    def layers(self) -> list[LayerCost]:
        """See `by_layer`; those of nodes after the others."""
        if self.exchanges:
            own = defaultdict(list)
            for each in self.exchanges:
                own[each.layer].append(each)
            return [dataclasses.replace(layer, exchanges=tuple(own[layer.name])) for layer in by_layer(self.costs)]
        after = by_stages(self.sharded.forwards) if self.sharded else []
        names = {layer.name for layer in after}
        return [*(layer for layer in by_layer(self.costs) if layer.name not in names), *after]


def by_layer(costs: Costs) -> list[LayerCost]:
    """Costs per layer, in the order in which they first cost something; "input and output" belongs to no module."""
    sent: dict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    rounds: dict[str, Counter[int]] = defaultdict(Counter)
    macs: dict[str, Counter[int]] = defaultdict(Counter)
    for ledger in costs.ledgers:
        for (scope, _, to), count in ledger.sent.items():
            sent[layer_of(scope)][(ledger.party, to)] += count
        for (scope, _), count in ledger.rounds.items():
            rounds[layer_of(scope)][ledger.party] += count
        for scope, count in ledger.macs.items():
            macs[layer_of(scope)][ledger.party] += count
    return [
        LayerCost(name, dict(sent[name]), max(rounds[name].values(), default=0), dict(macs[name]))
        for name in dict.fromkeys([*sent, *rounds, *macs])
    ]


def by_stages(forwards: Iterable[Iterable[Stage]]) -> list[LayerCost]:
    """Costs per layer of stages; a round is one exchange between CompNodes and AttnNodes."""
    groups: dict[str, list[Stage]] = defaultdict(list)
    for stage in itertools.chain(*forwards):
        groups[stage.layer].append(stage)
    made = []
    for name, stages in groups.items():
        sent, macs = Counter[tuple[int, int]](), Counter[int]()
        for stage in stages:
            sent.update(stage.sent)
            macs.update(stage.macs)
        rounds = sum(stage.what == "rows" for stage in stages)
        made.append(LayerCost(name, dict(sent), rounds, dict(macs), tuple(stages)))
    return made


class _MetaParty(Party):
    def __init__(
        self, config: PrivateConfig, number: int, description: Description, every_layer: bool, empty: PreTrainedModel
    ) -> None:
        session = meta_session(config, number)
        self.config, self.number, self.transport = config, number, session.protocol.transport
        self.session = session
        session.numerics.ranges = Ranges(description.ranges)
        self.answer = Outputs("", ())
        self.state = LoadedModel(session, LoadModel(description, None), dict(meta_parameters(empty, session)))
        if not every_layer and not session.numerics.ranges.modules:  # with ranges, no two layers are equal
            price_once(self.state.model, self.transport.ledger)
        self.transport.ledger.reset()

    def _compare(self, parties: Iterable[int]) -> None:
        """Nobody is there, and it costs control messages alone."""

    def _answer(self, message: Message) -> None:
        if isinstance(message, Outputs):
            self.answer = message

    def weight_bytes(self) -> int:
        """Memory of this party's shares of the weights, tied ones once; public ones are kept with their ring form."""
        weights = list(self.ready().model.parameters())
        kept = self.session.ring.bytes if self.config.weights == "public" else 0
        return sum(_bytes(weight) + kept * weight.numel() for weight in weights)

    def seeds_bytes(self) -> int:
        shapes = (tuple(weight.shape) for weight in self.ready().model.parameters())
        return sum(bytes_at_rest(self.config, self.session.party, shape, True) for shape in shapes)

    def cache_bytes(self) -> int:
        """Memory of the shares in the caches that are kept."""
        return sum(
            _bytes(value)
            for cache in self.ready().caches()
            for layer in getattr(cache, "layers", ())
            for value in (layer.keys, layer.values)
            if value is not None
        )


def _bytes(value: Tensor) -> int:
    if not isinstance(value, SecretTensor):
        return value.numel() * value.element_size()
    held: Fixed = value.value(full=True)
    return sum(part.numel() * part.element_size() for part in held.share.parts)


class _MetaParties(SessionClient):
    """Stands where the client's link to the parties stands; answers every call with zeros of the right shape."""

    def __init__(
        self, config: PrivateConfig, description: Description, progress: Callable[[], None], every_layer: bool
    ) -> None:
        self.config = config
        self.ring = Ring(config.ring)
        empty = empty_model(description.config, description.class_, description.folded)
        self.parties = [_MetaParty(config, number, description, every_layer, empty) for number in range(config.parties)]
        transport = MetaTransport(CLIENT)
        self.end = client_end(config, transport)
        transport.ledger.reset()
        self._ledger = transport.ledger
        self._numbers = itertools.count(1)
        self._progress = progress

    def forward(self, call: Call, secrets: list[Secret]) -> tuple[str, dict[str, Tensor]]:
        return self._count(Forward(call), secrets)

    def _count(self, command: Forward, secrets: list[Secret]) -> tuple[str, dict[str, Tensor]]:
        share(self.end, secrets)
        with torch.no_grad(), QuickShapes():  # type: ignore[no-untyped-call]  # PyTorch's constructor
            for party in self.parties:
                party.forward(command)
        self._progress()
        answer = self.parties[0].answer
        return answer.class_, {out.name: torch.zeros(out.shape, dtype=torch.float64) for out in answer.outputs}

    def command(self, edit: CacheEdit) -> None:
        for party in self.parties:
            party.ready().edit("", edit)

    def new_handle(self) -> int:
        return next(self._numbers)

    def release(self, handle: int) -> None:
        """Kept until the end, so that memory can be read off."""

    def costs(self, reset: bool = False) -> Costs:
        ledgers = [*(party.transport.ledger for party in self.parties), self._ledger]
        return Costs.from_rows([CostRows.of(ledger) for ledger in ledgers], self.config.helper)

    def close(self) -> None:
        """Nothing runs."""

    def estimate(self) -> Estimate:
        cache = max(party.cache_bytes() for party in self.parties)
        facts = self.config.facts
        masked = self.config.weights == "secret" and facts is not None and facts.hides
        seeds = tuple(party.seeds_bytes() for party in self.parties) if masked else ()
        return Estimate(self.costs(), self.parties[0].weight_bytes(), cache, seeds_bytes=seeds)


class _ShardedOnly(MetaNodes):
    """All layers on nodes."""

    def estimate(self) -> Estimate:
        found = self.sharded()
        return Estimate(self.costs(), found.weight_bytes, found.cache_bytes, found)


class _MetaSplit(_MetaParties):
    """Parties that count up to the cut, nodes that are formulas after it (see `SplitParties`)."""

    def __init__(
        self, config: PrivateConfig, model_class: type[PreTrainedModel], settings: PretrainedConfig,
        progress: Callable[[], None], every_layer: bool, ranges: Ranges,
    ) -> None:  # fmt: skip
        cut = Cut.of(model_class, settings, config.split or 0)
        super().__init__(config, describe(model_class, cut.shortened(settings), ranges), lambda: None, every_layer)
        for party in self.parties:
            stop_after(party.ready().model, f"{cut.path}.{cut.count - 1}")
        self._nodes = MetaNodes(config, model_class, settings, progress, cut)

    def forward(self, call: Call, secrets: list[Secret]) -> tuple[str, dict[str, Tensor]]:
        step = self._nodes.step(call)
        self._count(split_forward(call, step, self.config.parties), secrets)
        return self._nodes.run(step, "states", lambda node, rows: None)

    def command(self, edit: CacheEdit) -> None:
        super().command(edit)
        self._nodes.command(edit)

    def costs(self, reset: bool = False) -> Costs:
        first, after = super().costs(), self._nodes.costs()
        return Costs((*first.ledgers, *after.ledgers[:-1]), first.helpers)

    def estimate(self) -> Estimate:
        return dataclasses.replace(super().estimate(), sharded=self._nodes.sharded())


def estimate(
    model_class: type[PreTrainedModel], config: PretrainedConfig, private_config: PrivateConfig, sequence: int,
    new_tokens: int = 0, batch: int = 1, progress: Callable[[], None] = lambda: None,
    image: Sequence[int] | None = None, every_layer: bool = False, ranges: Ranges = UNKNOWN,
) -> Estimate:  # fmt: skip
    """Cost of one forward over `sequence` tokens, or of generating `new_tokens` after a prompt of that length.

    Models of images take a batch of them instead, each of shape `image` (default: what the configuration says). Loading
    the weights is not counted. progress is called after each forward. Layers of equal cost are priced once (see
    `priced_once.py`), which changes no figure; every_layer=True runs each. ranges: of calibration. Raises ConfigError
    for sizes below 1 and ranges of another model, and what the run itself would raise (DomainError, PatchMismatch).
    """
    if sequence < 1 or new_tokens < 0 or batch < 1:
        raise ConfigError(f"estimate: got seq {sequence}, new {new_tokens}, batch {batch}; want at least 1, 0 and 1")
    work = _Work(config, sequence, new_tokens, batch, image)
    if private_config.protocol == ASSISTED:
        return _of_exchanges(model_class, private_config, work, progress)
    spec = ModelSpec.of(model_class, config, folds_norms(private_config))
    bare = spec.model
    work.check(bare)
    check_ranges(bare, ranges)
    parties: _MetaParties | _ShardedOnly
    if private_config.plan is None:
        description = describe(model_class, config, ranges, spec.folded)
        parties = _MetaParties(private_config, description, progress, every_layer)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WeakProtection)  # no text is at risk here
            check_sharding(model_class, config, private_config.plan, private_config.split)
        if private_config.split is None:
            parties = _ShardedOnly(private_config, model_class, config, progress)
        else:
            parties = _MetaSplit(private_config, model_class, config, progress, every_layer, ranges)
    patch_plan = make_patch_plan(bare, private_config)
    model = private_class(model_class)(config, parties, patch_plan, work.generation if bare.can_generate() else None)
    first = _FirstToken(parties.estimate)
    with torch.no_grad():
        work.run(model, first)
    return dataclasses.replace(parties.estimate(), prompt=first.prompt)


@dataclass(frozen=True)
class _Work:
    """What is estimated."""

    config: PretrainedConfig
    sequence: int
    new: int
    batch: int
    image: Sequence[int] | None

    def check(self, model: PreTrainedModel) -> None:
        """Raises ConfigError for new tokens of a model that does not generate."""
        if self.new and not model.can_generate():
            raise ConfigError(f"{type(model).__name__} does not generate; leave out --new")

    @property
    def generation(self) -> GenerationConfig:
        """Nothing ends early."""
        made = GenerationConfig.from_model_config(self.config)
        made.eos_token_id = None
        return made

    def run(self, model: PreTrainedModel, first: BaseStreamer) -> object:
        """One forward, or the generation, whose first new token `first` is told."""
        ids = torch.ones(self.batch, self.sequence, dtype=torch.int64)
        mask = torch.ones_like(ids)
        if architecture(self.config).kind == "vision":
            return model(torch.zeros(self.batch, *(self.image or image_shape(self.config))))
        if self.new:
            return model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=self.new, do_sample=False, num_beams=1,
                pad_token_id=0, streamer=first, return_dict_in_generate=True,
            )  # fmt: skip
        return model(input_ids=ids, attention_mask=mask)


def _of_exchanges(
    model_class: type[PreTrainedModel], private_config: PrivateConfig, work: _Work, progress: Callable[[], None]
) -> Estimate:  # fmt: skip
    """Under protocol "assisted"."""
    model, servers = counted_model(model_class, work.config, private_config, progress)
    work.check(model)
    if model.can_generate():
        model.generation_config = work.generation
    own = own_bytes(model) + servers.check_bytes

    def so_far() -> Estimate:
        return Estimate(servers.costs(), servers.weight_bytes, 0, exchanges=tuple(servers.asked), client_bytes=own)

    first = _FirstToken(so_far)
    servers.goes_on()
    with torch.no_grad():
        cache = kept_bytes(work.run(model, first))
    return dataclasses.replace(so_far(), cache_bytes=cache, prompt=first.prompt, corrections=servers.prepared)


class _FirstToken(BaseStreamer):  # type: ignore[misc]
    """Notes what was counted when the first new token comes."""

    def __init__(self, estimate: Callable[[], Estimate]) -> None:
        self.prompt: Estimate | None = None
        self._estimate, self._puts = estimate, 0

    def put(self, value: Tensor) -> None:
        """The prompt comes first, then one token of each row at a time."""
        self._puts += 1
        if self._puts == 2:
            self.prompt = self._estimate()

    def end(self) -> None:
        """Generation is over."""


def named_shape(name: str) -> tuple[type[PreTrainedModel], PretrainedConfig] | None:
    """Class and configuration of a built-in shape (models/shapes.json, networks.py), or None."""
    if name in BUILDERS:
        build, image = BUILDERS[name]
        with torch.device("meta"):
            return Network, Network.of(build(), image).config
    shapes = read_facts("shapes.json")
    if name not in shapes:
        return None
    values = copy.deepcopy(shapes[name]["config"])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    return getattr(transformers, shapes[name]["class"]), config


def shape_names() -> list[str]:
    """Names of the built-in shapes."""
    return [*BUILDERS, *read_facts("shapes.json")]


def model_class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class a configuration names, or the one that generates with it, or the bare model; else ConfigError."""
    for name in getattr(config, "architectures", None) or ():
        found = Network if name == Network.__name__ else getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            known = auto._model_mapping[type(config)]
            first: type[PreTrainedModel] = known[0] if isinstance(known, tuple) else known
            return first
    raise ConfigError(f"no model class is known for '{config.model_type}'; name one in config.architectures")
