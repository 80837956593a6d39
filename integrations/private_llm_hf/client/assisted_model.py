"""A model under protocol "assisted": transformers' own at the client, whose linear layers servers multiply.

Everything but linear layers is computed here, on values that only the client has: embeddings, norms, attention with
its cache, activations, sampling. So generate(), its cache and its streamers are transformers' own.
"""

import copy
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from private_llm.errors import ConfigError, LowPrecision, PatchMismatch, PlaintextLeak, UnsupportedOp, undoing
from private_llm.kernels.address import memory_bytes
from private_llm_hf.checkpoint.sample_inputs import empty_inputs
from private_llm_hf.checkpoint.weights import WeightList, WeightSource, skeleton, without_weights
from private_llm_hf.client.assisted_experts import ExpertSizes, assist_experts, experts_at_servers
from private_llm_hf.client.assisted_layers import (
    AssistedConvolution,
    AssistedLinear,
    HoldsWeights,
    Products,
    TakesWeights,
    WeightElsewhere,
    ask,
    copied,
)
from private_llm_hf.client.assisted_rows import (
    CONVOLUTIONS,
    RowCounts,
    refuse_chosen_rows,
    sent_layers,
    sides_of,
    uses_a_token,
)
from private_llm_hf.client.costs import Costs
from private_llm_hf.client.dropped import close_when_dropped
from private_llm_hf.client.generation_settings import check_arguments
from private_llm_hf.client.parties import Parties
from private_llm_hf.client.prefix import Prefix
from private_llm_hf.client.product_servers import ProductServers
from private_llm_hf.client.speculation import DEFAULT_COUNTS, SpeculationConfig
from private_llm_hf.client.speculative_loop import decoding
from private_llm_hf.models.architectures import table
from private_llm_hf.models.norms import CANNOT


# -- drafts: every check of them has the same number of rows, which is what servers see -------------------------------
# How many drafted tokens were accepted stays here, because the cache is here. Servers see how many checks a text took.
class DraftsOfOneLength:
    """What `generate` of models under "assisted" does with drafts, in front of transformers' own class."""

    def generate(self, *args: Any, speculation: SpeculationConfig | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
        """As transformers' own; with `speculation` as `generate` under other protocols (docs/speculation.md).

        By default every check reads DEFAULT_COUNTS.window rows and all that are right go on. Raises ConfigError,
        DomainError and UnsupportedOp for what speculation does not do, before anything is sent.
        """
        if speculation is not None:
            check_arguments(args, kwargs, self.config.get_text_config().vocab_size, speculation)  # type: ignore[attr-defined]
            if speculation.fixed_counts is None and not speculation.open_counts and speculation.length is None:
                speculation = replace(speculation, length=DEFAULT_COUNTS.window - 1)
            kwargs["custom_generate"] = decoding(speculation, kwargs.get("streamer"), beyond=True)
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _get_candidate_generator(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> "_OneLength":  # noqa: ANN401
        """transformers' own drafts (assistant_model, prompt_lookup_num_tokens), as many tokens in every check."""
        made = super()._get_candidate_generator(generation_config, *args, **kwargs)  # type: ignore[misc]
        return _OneLength(made, generation_config.max_length)


class _OneLength(CandidateGenerator):  # type: ignore[misc]
    """Another's drafts, filled up to the most that it drafts; fewer only before the longest text that was asked for.

    Filled in is the last token again, with certainty, so whether it is accepted follows the rules for drafts.
    """

    def __init__(self, inner: CandidateGenerator, limit: int) -> None:
        self._inner, self._limit, self._drafted = inner, limit, 0
        self._length: int = getattr(inner, "num_output_tokens", None) or inner.num_assistant_tokens

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def get_candidates(self, input_ids: Tensor, **more: object) -> tuple[Tensor, Tensor | None]:
        """The text and what is drafted after it [1, n], and logits of that [1, drafted, V], if the draft has some."""
        ids, logits = self._inner.get_candidates(input_ids, **more)
        end = input_ids.shape[1] + max(0, min(self._length, self._limit - input_ids.shape[1] - 1))
        ids = ids[:, :end]
        self._drafted, missing = ids.shape[1] - input_ids.shape[1], end - ids.shape[1]
        last = int(input_ids[0, -1])
        if logits is not None:
            certain = torch.full((1, missing, logits.shape[-1]), -torch.inf)
            certain[..., last] = 0.0
            logits = torch.cat([logits[:, : self._drafted], certain.to(logits)], 1)
        return functional.pad(ids, (0, missing), value=last), logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Tell the draft of its own tokens."""
        drafted = self._drafted
        self._inner.update_candidate_strategy(input_ids, scores[:, : drafted + 1], min(int(num_matches), drafted))


class AssistedModel(DraftsOfOneLength):
    """What models under protocol "assisted" have beside transformers' own methods."""

    parties: ProductServers
    joins: Callable[[], Parties] | None = None
    """Opens another session with the same servers."""
    reads: WeightSource
    """The weights, for servers that do not hold them themselves."""
    stored = False
    """Whether its weights were not read here (`parties.stored`: whether the servers had them)."""
    _end: Callable[[], object]

    def cost(self, reset: bool = False) -> Costs:
        """Bytes, rounds and multiply-adds since the last reset. Raises PartyFailed if the session is over."""
        return self.parties.costs(reset)

    def prefix(self, input_ids: Tensor) -> Prefix:
        """As `PrivateModel.prefix`; the cache is here."""
        return Prefix(self, input_ids)

    def open_session(self) -> "AssistedModel":
        """Another model on a session of its own, whose calls run beside this one's; they share what is in memory here.

        Close it when it is not needed any more. Raises as `reconnect`, PartiesBusy where servers serve fewer clients.
        """
        servers = self._joined()
        made: AssistedModel = copied(self)  # type: ignore[arg-type, assignment]
        made._ask(servers)
        return made

    def reconnect(self) -> None:
        """End this session, if it goes on, and begin a new one, with a new key of masks. Caches are here, and stay.

        Servers that hold no checkpoint get the weights again. Raises TransportError as `from_pretrained`, ConfigError
        if the weights are needed and have changed, or are those of a `patch` of which the plaintext model is gone. The
        model may try again then.
        """
        self._end()
        self._ask(self._joined())

    def _joined(self) -> ProductServers:
        if self.joins is None:
            raise ConfigError("sessions: this model was not made by from_pretrained() or patch()")
        servers = self.joins()
        with undoing(servers.close):
            if not isinstance(servers, ProductServers):
                raise ConfigError(f"start: got {type(servers).__name__}; want the servers of protocol='assisted'")
            if not servers.use_weights_of(self.parties):
                original: type[PreTrainedModel] = type(self).__bases__[-1]
                where: str = servers.config.experts
                built(original, self.config, self.reads, servers, RowCounts(), where)  # type: ignore[attr-defined]
                if servers.digests != self.parties.digests:
                    raise ConfigError("the weights have changed since this model was loaded; load it again")
            servers.costs(reset=True)  # of loading
        return servers

    def _ask(self, servers: ProductServers) -> None:
        ask(self, servers)  # type: ignore[arg-type]
        if servers.corrections is not None:
            servers.uses = uses_a_token(type(self).__bases__[-1], self.config)  # type: ignore[attr-defined]
        self.parties, self._end = servers, close_when_dropped(self, servers.close)

    def close(self) -> None:
        """End the session with the servers."""
        self.parties.close()

    def __enter__(self) -> "AssistedModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save_pretrained(self, *_: object, **__: object) -> None:
        """Raises PlaintextLeak: the weights of linear layers are with the servers."""
        raise PlaintextLeak("the servers hold the weights of linear layers; save the checkpoint that they came from")

    push_to_hub = state_dict = save_pretrained

    device = torch.device("cpu")
    """Where inputs are expected and outputs appear."""

    def train(self, mode: bool = True) -> "AssistedModel":
        """The model as it is for mode=False. Raises UnsupportedOp for True."""
        if mode:
            raise UnsupportedOp("models under protocol='assisted' run inference only; train the plaintext model")
        made: AssistedModel = super().train(False)  # type: ignore[misc]
        return made


def open_assisted(
    model_class: type[PreTrainedModel], config: PretrainedConfig, weights: WeightSource, servers: Parties,
    generation: GenerationConfig | None,
) -> PreTrainedModel:  # fmt: skip
    """Build the model here without the weights of its linear layers, which go to the servers as they are read.

    Raises PatchMismatch for modules that read the weight of a linear layer themselves, and where values choose how many
    rows a layer reads; DomainError naming a layer with values that are not finite; ConfigError for the parties of
    another protocol.
    """
    if not isinstance(servers, ProductServers):
        raise ConfigError(f"start: got {type(servers).__name__}; want the servers of protocol='assisted'")
    with undoing(servers.close):
        return _opened(model_class, config, weights, servers, generation)


def _opened(
    model_class: type[PreTrainedModel], config: PretrainedConfig, weights: WeightSource, servers: ProductServers,
    generation: GenerationConfig | None,
) -> PreTrainedModel:  # fmt: skip
    rows = RowCounts()
    model = built(model_class, config, weights, servers, rows, servers.config.experts)
    servers.costs(reset=True)  # of loading
    if servers.errors:
        worst, mean = max(servers.errors, key=servers.errors.__getitem__), sum(servers.errors.values())
        warnings.warn(
            f"weights of 8 bits: rounding changes a layer's weights by {mean / len(servers.errors):.2%} on average and "
            f"by {servers.errors[worst]:.2%} at most ('{worst}'), so answers may differ from those of 16 bits",
            LowPrecision, stacklevel=4,
        )  # fmt: skip
    model._ask(servers)
    rows.watch(model)
    if generation is not None:
        model.generation_config = generation
    return model


def built(
    model_class: type[PreTrainedModel], config: PretrainedConfig, weights: WeightSource, servers: HoldsWeights,
    rows: RowCounts, experts: str,
) -> PreTrainedModel:  # fmt: skip
    """The model without the weights of its linear layers, which `servers` get, and of experts, if they shall.

    experts: `PrivateConfig.experts`. Raises as `open_assisted`, before a weight is read where shapes tell that a server
    holds another checkpoint.
    """
    wanted = WeightList.of(skeleton(model_class, config))
    model = without_weights(_assisted_class(model_class), config).eval()
    layers: dict[str, Any] = {**sent_layers(model)}
    sent = experts_at_servers(model, experts)
    for group in layers_by_input(model_class, config, list(layers), sent):
        products = Products(servers, rows, "+".join(group), [sides_of(layers[name]) for name in group])
        for member, name in enumerate(group):
            parent, _, own = name.rpartition(".")
            made = AssistedConvolution if isinstance(layers[name], CONVOLUTIONS) else AssistedLinear
            setattr(model.get_submodule(parent), own, made(layers[name], products, member, name))
    assist_experts(model, sent, servers, rows)
    if isinstance(servers, ProductServers):
        found = (each for module in model.modules() if isinstance(module, TakesWeights) for each in module._products)
        servers.expect({(each.outputs, each.inputs): each.name for each in found})
    weights(wanted, _Filling(model, wanted), False)
    return model


def _check_room(model: PreTrainedModel) -> None:
    """Raises ConfigError for a model of which more stays here than memory holds, before a weight is read."""
    held = (*model.named_parameters(), *model.named_buffers())
    left = {name: tensor.numel() * 4 for name, tensor in held if not isinstance(tensor, WeightElsewhere)}
    needed, room = sum(left.values()), memory_bytes()
    if needed > room:
        largest = max(left, key=lambda name: left[name])
        raise ConfigError(
            f"memory: {needed / 1e9:.1f} GB of this model stay at the client (embeddings, norms, and experts that "
            f"servers cannot take; the largest is {largest!r}), and this machine has {room / 1e9:.1f} GB; want more "
            "memory, or a smaller model"
        )


class _Filling:
    """A sink: weights of linear layers and experts go to the servers, the others into the model."""

    def __init__(self, model: PreTrainedModel, wanted: WeightList) -> None:
        self._model, self._empty = model, True
        self._names: dict[str, list[str]] = {name: [name] for name in wanted.shapes}
        for name, source in wanted.tied.items():
            self._names[source].append(name)

    def __call__(self, name: str, tensor: Tensor) -> None:
        """One weight, for all that share it. Raises ConfigError if not all will have room."""
        if self._empty:  # an estimate reads no weights
            _check_room(self._model)
            self._empty = False
        held: nn.Parameter | None = None
        for each in self._names[name]:
            path, _, own = each.rpartition(".")
            module = self._model.get_submodule(path)
            if isinstance(module, TakesWeights) and own in module.elsewhere:
                module.take(own, tensor)
            elif own in module._buffers:
                module._buffers[own] = tensor.detach().to("cpu", torch.float32, copy=True)
            else:
                if held is None:
                    held = nn.Parameter(tensor.detach().to("cpu", torch.float32, copy=True), requires_grad=False)
                module._parameters[own] = held


def layers_by_input(
    model_class: type[PreTrainedModel], config: PretrainedConfig, layers: Sequence[str],
    experts: Mapping[str, ExpertSizes],
) -> list[list[str]]:  # fmt: skip
    """Linear layers of a block in groups that read the same tensor: queries, keys and values, in some models MLPs too.

    Found in a forward on the meta device; where that needs values, by their names. Raises PatchMismatch if that
    forward reads the weight of a linear layer itself, or how many rows layers read depends on values. experts: whose
    weights servers hold, too.
    """
    settings = copy.deepcopy(config)
    settings._attn_implementation = "eager"  # others look into the mask
    model = skeleton(model_class, settings)
    groups: dict[tuple[str, int, int], tuple[Tensor, list[str]]] = {}
    for name in layers:
        layer = model.get_submodule(name)
        plain = copy.copy(layer)
        plain._parameters = dict(layer._parameters)

        def note(x: Tensor, name: str = name, plain: nn.Module = plain) -> Tensor:
            # windows of a convolution are no other layer's input
            place = (name if isinstance(plain, CONVOLUTIONS) else _block(name), id(x), x._version)
            groups.setdefault(place, (x, []))[1].append(name)  # which keeps x, so that its id stays its own
            made: Tensor = type(plain).forward(plain, x)
            return made

        layer.weight = WeightElsewhere.of(layer.get_parameter("weight"), name)
        layer.forward, layer._apply = note, lambda *_, layer=layer: layer  # a forward may say to()
    for name, sizes in experts.items():
        model.get_submodule(name).forward = lambda x, *_, out=sizes.out: x.new_empty(len(x), out)
    try:
        with torch.no_grad():
            model(**empty_inputs(config))
    except UnsupportedOp as error:
        raise PatchMismatch(f"{model_class.__name__}: {error}") from None
    except (PatchMismatch, *CANNOT):
        groups = {}
        refuse_chosen_rows(model_class, config)
    found: list[list[str]] = []
    seen: set[str] = set()
    for _, group in groups.values():  # a layer that runs twice is in its first group
        new = [name for name in dict.fromkeys(group) if name not in seen]
        seen.update(new)
        found += [new] if new else []
    found += _by_name(model, [name for name in layers if name not in seen])
    seen = {name for group in found for name in group}
    return found + [[name] for name in layers if name not in seen]


def _block(name: str) -> str:
    """The block that a layer belongs to: its name up to the last number."""
    found = re.match(r".*\.\d+(?=\.)", name)
    return found[0] if found else ""


def _by_name(model: nn.Module, layers: Sequence[str]) -> list[list[str]]:
    """Linear layers in groups that read the same input by their names. A wrong guess costs bytes, and no result."""
    found = []
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in layers):
        for names, where in table("same_input").items():
            group = [f"{parent}.{own}" for own in names.split()]
            if not {*group} <= {*layers} or not re.fullmatch(where, parent) or _CROSS.search(parent):
                continue
            members = [model.get_submodule(name) for name in group]
            if len({(type(each), each.get_parameter("weight").shape[1:]) for each in members}) == 1:
                found += [group] if type(members[0]) is nn.Linear else []
    return found


_CROSS = re.compile("cross|encoder_attn|EncDec", re.IGNORECASE)
"""Attention whose queries read one input, its keys and values another."""


_CLASSES: dict[type[PreTrainedModel], type[PreTrainedModel]] = {}


def _assisted_class(original: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The subclass of a model class: one per class, so that isinstance means something."""
    if original not in _CLASSES:
        body = {"__module__": __name__, "__doc__": f"{original.__name__} under protocol 'assisted'."}
        _CLASSES[original] = type(f"Assisted{original.__name__}", (AssistedModel, original), body)
    return _CLASSES[original]
