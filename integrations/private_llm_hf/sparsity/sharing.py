"""The owner's part of a sparse private run: predictors become weights, and units get their secret order.

A unit's place in its layer means nothing to the model: rows of FC1 (gate, up) and columns of FC2 (down) may be put in
any common order, and so may the heads of an attention block. Neurons of a unit are put side by side. The owner draws
an order of units for each block, uniformly and from the project's PRG, before the weights are shared; nobody else ever
holds it, and it changes whenever the model is shared.
"""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from private_llm.errors import ConfigError, PatchMismatch
from private_llm.protocols.share import drawn
from private_llm.ring.prg import Seed
from private_llm.sparsity_config import CometConfig
from private_llm_hf.checkpoint.model_spec import ModelSpec
from private_llm_hf.checkpoint.norm_readers import norms_read
from private_llm_hf.checkpoint.weights import Sink, WeightsDigest, skeleton
from private_llm_hf.kv_cache.attention_interface import NAME
from private_llm_hf.models.architectures import attention_of
from private_llm_hf.models.norms import spelled_norm
from private_llm_hf.models.sparse_blocks import KEY, SparseBlock, facts_of, layer_sizes
from private_llm_hf.sparsity.predictor import Predictor
from private_llm_hf.sparsity.predictor_set import OTHER_ACTIVITY, PredictorSet, SitePredictor


class SharedPredictors:
    """A model's predictors on their way into shares, and orders; `repr` shows none. config: with their public facts."""

    def __init__(
        self, predictors: PredictorSet, settings: CometConfig, cls: type[PreTrainedModel], config: PretrainedConfig
    ) -> None:
        """Raises ConfigError for predictors of another model or class, without a budget where one is wanted, or without
        any block of the wanted kinds; PatchMismatch for a block whose units cannot be put in another order."""
        predictors.check(config, cls)
        bare = skeleton(cls, config)
        self._weights: str = predictors.model["weights"]
        self._members: list[tuple[SitePredictor, SparseBlock, Tensor]] = []
        self._norms = _read_norms(cls, config, bare)
        self._moves: dict[str, list[tuple[int, Tensor]]] = {}  # along which dimension, in which order
        blocks = []
        for member in predictors:
            if member.site.kind not in settings.kinds:
                continue
            block = _facts(member, settings)
            order = self._ordered(bare, block, member.predictor.grouping, settings.orders == "kept")
            self._members.append((member, block, order))
            blocks.append(block)
        if not blocks:
            raise ConfigError(
                f"sparsity: {settings.predictors} holds no predictors of {' or '.join(settings.kinds)}; train some "
                "(--kinds), or ask for another kind"
            )
        self.config = copy.deepcopy(config)
        setattr(self.config, KEY, facts_of(settings, blocks))

    def stream(self, weights: Callable[[Sink], None], spec: ModelSpec, sink: Sink) -> None:
        """Pass on the model's weights (from `weights`), reordered and folded, then the predictors'. Raises ConfigError
        if predictors were trained on others, PatchMismatch for a weight in two blocks.
        """
        digest, folded = WeightsDigest(), spec.folding(sink)
        left = {name for name in self._moves if name.endswith(".weight")}
        vectors: dict[str, Tensor] = {}
        wanted = {self._norms[block.name][0] for _, block, _ in self._members if block.name in self._norms}

        def take(name: str, tensor: Tensor) -> None:
            digest(name, tensor)
            left.discard(name)
            if name.rpartition(".")[0] in wanted:
                vectors[name] = tensor.detach().double().cpu()
            for dim, index in self._moves.get(name, ()):
                tensor = tensor.index_select(dim, index.to(tensor.device))
            folded(name, tensor)

        weights(take)
        if digest.text() != self._weights:
            raise ConfigError(f"sparsity: predictors of the same architecture with other weights{OTHER_ACTIVITY}")
        if left:
            raise PatchMismatch(
                f"sparsity: '{min(left)}' is tied to another weight, so its units have no secret order of their own; "
                "want orders='fresh'"
            )
        for member, block, order in self._members:
            for own, value in scaled(member.predictor, *self._gain(block, vectors)).items():
                ordered = value[order] if own.startswith("fc2.") else value
                sink(f"{block.predictor}.{own}", ordered.contiguous())

    def _gain(self, block: SparseBlock, vectors: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Weight and bias of the norm that a block reads, as far as they are known."""
        name, offset = self._norms.get(block.name, ("", 0.0))
        weight = vectors.get(f"{name}.weight")
        return None if weight is None else weight + offset, vectors.get(f"{name}.bias")

    def _ordered(self, model: PreTrainedModel, block: SparseBlock, grouping: Tensor | None, kept: bool) -> Tensor:
        """Draw the block's order of units, if it is kept, and note what moves. grouping: of neurons into units."""
        if block.kind == "ffn":
            order = _uniform(block.units) if kept else torch.arange(block.units)
            index = _spread(order, block.block)
            if grouping is not None:
                index = grouping.long()[index]
            elif not kept:
                return order
            for name in (*block.readers, block.writer):
                self._move(model, name, index, outputs=name != block.writer)
            _refuse_between(model, block)
            return order
        groups = getattr(model.config, "num_key_value_heads", None) or block.units
        return self._ordered_heads(model, block, groups)

    def _ordered_heads(self, model: PreTrainedModel, block: SparseBlock, groups: int) -> Tensor:
        heads, path = block.units, block.name.rpartition(".")[0]
        if attention_of(model.config.model_type, type(model)) != NAME:
            raise PatchMismatch(
                f"sparsity: {type(model).__name__} computes attention in code of its own, where heads cannot be left "
                "out; want CometConfig(heads=False)"
            )
        if block.name.rpartition(".")[2].lower().lstrip("w")[:1] in ("k", "v"):
            raise PatchMismatch(
                f"sparsity: '{block.name}' runs first in its attention block and looks like keys or values, where no "
                "head may be left out; want CometConfig(heads=False)"
            )
        depth = layer_sizes(model.get_submodule(block.writer))[0] // heads
        each = heads // groups
        of_groups = _uniform(groups)
        inside = torch.stack([_uniform(each) for _ in range(groups)])
        order = (of_groups[:, None] * each + inside).view(-1)
        wholes, shared = _spread(order, depth), _spread(of_groups, depth)
        for name, module in model.get_submodule(path).named_modules():
            full = f"{path}.{name}"
            if full == block.writer or not isinstance(module, nn.Linear | Conv1D):
                continue
            size = layer_sizes(module)[1]
            if size not in (len(wholes), len(shared)):
                raise PatchMismatch(
                    f"sparsity: '{full}' makes {size} values, which are not those of {heads} heads or {groups} groups "
                    "of keys: heads of fused or compressed projections cannot be put in a secret order; want "
                    "CometConfig(heads=False)"
                )
            self._move(model, full, wholes if size == len(wholes) else shared, outputs=True)
        _refuse_per_head(model, path, heads, depth, groups)
        self._move(model, block.writer, wholes, outputs=False)
        return order

    def _move(self, model: PreTrainedModel, name: str, index: Tensor, outputs: bool) -> None:
        turned = isinstance(model.get_submodule(name), Conv1D)
        self._moves.setdefault(f"{name}.weight", []).append((int(turned == outputs), index))
        if outputs:
            self._moves.setdefault(f"{name}.bias", []).append((0, index))


def shared_predictors(
    settings: CometConfig | None, cls: type[PreTrainedModel], config: PretrainedConfig
) -> SharedPredictors | None:
    """What `settings` adds to a model that is being shared; None without a folder of predictors."""
    if settings is None or settings.predictors is None:
        return None
    return SharedPredictors(PredictorSet.from_pretrained(settings.predictors), settings, cls, config)


def _facts(member: SitePredictor, settings: CometConfig) -> SparseBlock:
    site, predictor = member.site, member.predictor
    units, each = predictor.units, predictor.config.block
    if units * each != predictor.neurons:
        raise ConfigError(
            f"sparsity: '{site.name}' has {predictor.neurons} neurons in blocks of {each}; want a block that divides "
            "their number, so that all blocks look alike"
        )
    share = settings.neuron_budget if site.kind == "ffn" else settings.head_budget
    budget = predictor.most if share is None else max(1, int(share * units))
    if settings.levels == "budget" and share is None and predictor.config.budget is None:
        key = "neuron_budget" if site.kind == "ffn" else "head_budget"
        raise ConfigError(
            f"sparsity: the predictor of '{site.name}' has no budget; train with --budget-share or --budget, or pass "
            f"CometConfig({key}=0.3), on the command line --{key.replace('_', '-')} 0.3, for a public share of units a "
            "position, or orders='kept' with levels='open', which shows their number"
        )
    return SparseBlock(
        site.name, site.kind, site.width, units, each, predictor.config.rank, predictor.config.hidden,
        budget, site.readers, site.writer, site.activation,
    )  # fmt: skip


def _read_norms(
    cls: type[PreTrainedModel], config: PretrainedConfig, model: PreTrainedModel
) -> dict[str, tuple[str, float]]:
    """Of layers that read a norm its name, and what is added to its weight for good."""
    found = {}
    for layer, name in norms_read(cls, config).items():
        norm = spelled_norm(model.get_submodule(name))
        if norm is not None:
            found[layer] = (name, norm.offset)
    return found


def _uniform(count: int) -> Tensor:
    return drawn(Seed.fresh().stream("order of units").words(count, "cpu"))


def _spread(order: Tensor, each: int) -> Tensor:
    """An order of units as one of their `each` entries."""
    return (order[:, None] * each + torch.arange(each)).view(-1)


def _refuse_between(model: PreTrainedModel, block: SparseBlock) -> None:
    """Raise PatchMismatch for a vector of the neurons' width that is neither a reader's nor moved with them."""
    path, first = block.writer.rpartition(".")[0], block.name.rpartition(".")[0]
    while path and not f"{first}.".startswith(f"{path}."):
        path = path.rpartition(".")[0]
    neurons = block.units * block.block
    for name, value in model.get_submodule(path).named_parameters():
        full = f"{path}.{name}" if path else name
        owner = full.rpartition(".")[0]
        if value.shape == (neurons,) and owner not in (*block.readers, block.writer) and block.width != neurons:
            raise PatchMismatch(
                f"sparsity: '{full}' has an entry for each neuron of '{block.name}', so neurons cannot be put in a "
                "secret order or in groups; want orders='fresh', and predictors of single neurons or --no-group"
            )


def _refuse_per_head(model: PreTrainedModel, path: str, heads: int, depth: int, groups: int) -> None:
    """Raise PatchMismatch for weights of an attention module that have an entry for each head."""
    module = model.get_submodule(path)
    found = [own for own, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    for own, value in module.named_parameters():
        home = own.rpartition(".")[0]
        linear = isinstance(module.get_submodule(home), nn.Linear | Conv1D)
        per_head = {heads, groups, heads * depth, groups * depth} & set(value.shape)
        # a norm within heads has one weight for all of them; what the attention module holds itself may be a sink
        if not linear and per_head and (not home or tuple(value.shape) != (depth,)):
            found.append(own)
    if found:
        raise PatchMismatch(
            f"sparsity: '{path}.{found[0]}' has entries for each head, so heads cannot be put in a secret order; want "
            "CometConfig(heads=False)"
        )


# -- Predictors whose scores have a known size, whatever the size of their inputs and weights -------------------------
# A score counts by its sign alone, so each unit's row may be multiplied by any positive number, and so may a hidden
# value if the rows that read it are divided by it. What a block reads is nearly always a norm's output g * n + h, of
# which the owner knows g and h, and rows n have a mean square of 1: scores get a root mean square of 2 for independent
# entries, and then none exceeds 2 (sqrt(width) + 1). Between the two layers the factor is divided so that the weights
# of both are of one size: fixed point rounds either as little as it can.
_SIZE = 2.0  # root mean square of scores: comparisons resolve 2^-8, the check of ranges wants them below 2^10

_LEARNT = 0.25  # factor of scores where nothing is known of the input: those of training are logits, of 1 to 10

_SMALLEST, _LARGEST = 2.0**-4, 2.0**8  # of hidden values' root mean square: they have 18 fractional bits, up to 2^20


def scaled(predictor: Predictor, gain: Tensor | None = None, shift: Tensor | None = None) -> dict[str, Tensor]:
    """Weights by their names, float32: of the same predictions, with threshold 0 and scores of about `_SIZE`. gain,
    shift: float64 [width], weight and bias of the norm whose output is read; None: nothing is known of the input.
    """
    down, lift = predictor.fc1.weight.detach().double(), predictor.fc1.bias.detach().double()
    up, bias = predictor.fc2.weight.detach().double(), predictor.fc2.bias.detach().double()
    bias = bias - predictor.config.threshold
    read = down if gain is None else down * gain
    middle = lift if shift is None else lift + down @ shift
    hidden = _positive((read.square().sum(1) + middle.square()).sqrt())
    if gain is None:
        factor = torch.full_like(bias, _LEARNT)
    elif predictor.config.hidden == "linear":
        size = ((up @ read).square().sum(1) + (up @ middle + bias).square()).sqrt()
        factor = _SIZE / _positive(size)
    else:  # hidden values have one sign: they may add up
        factor = _SIZE / _positive(up.abs() @ hidden + bias.abs())
    above, below = up * hidden * factor[:, None], down / hidden[:, None]
    balance = (_root_mean_square(above) / _positive(_root_mean_square(below))).sqrt()
    balance = balance.clamp(_SMALLEST, _LARGEST)
    found = {
        "fc1.weight": below * balance, "fc1.bias": lift / hidden * balance,
        "fc2.weight": above / balance, "fc2.bias": bias * factor,
    }  # fmt: skip
    return {name: value.float() for name, value in found.items()}


def _positive(size: Tensor) -> Tensor:
    """Sizes to divide by: 1 where there is none."""
    return torch.where(size > 0, size, 1.0)


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
