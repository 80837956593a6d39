"""What a run with predictors will send and what it would send without, and estimates of models that have none yet."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.sparsity_config import CometConfig
from private_llm_hf.checkpoint.weights import skeleton
from private_llm_hf.models.architectures import architecture
from private_llm_hf.models.inputs import image_shape
from private_llm_hf.models.sparse_blocks import KEY, SparseBlock, facts_of, layer_sizes, sparse_blocks
from private_llm_hf.sparsity.predictor_set import PredictorSet
from private_llm_hf.sparsity.relufy import with_relu
from private_llm_hf.sparsity.settings import Kind
from private_llm_hf.sparsity.sites import Site, activations_of, find_sites, zeroes
from private_llm_hf.tools.estimate import estimate

_HERE: dict[str, Any] = {
    "party_mode": "threads", "hosts": (), "tls": None, "device": "cpu", "device_map": None, "max_memory": None,
    "offload_folder": None, "offline_folder": None,
}  # fmt: skip
"""Where parties are does not matter to what they send."""


@dataclass(frozen=True)
class SparsityPrice:
    """Bytes and rounds of a run, with and without predictors. most: bytes may be fewer, as activity is unknown."""

    sparse_bytes: int
    dense_bytes: int
    sparse_rounds: int
    dense_rounds: int
    most: bool

    @property
    def pays(self) -> bool:
        """Whether predictors save bytes."""
        return self.sparse_bytes < self.dense_bytes


def sparsity_price(model: Any, sequence: int, new_tokens: int, batch: int = 1) -> SparsityPrice:  # noqa: ANN401 - a private model
    """Of `new_tokens` after `sequence` tokens (0: one forward; images do not count tokens), by the estimator.

    model: a private model with predictors. Where levels are not budgets, as many units count as the predictors in the
    settings' folder predicted on the text of their measurement. Raises ConfigError without any, and as `estimate`.
    """
    private: PrivateConfig = replace(model.parties.config, **_HERE)
    settings = private.sparsity or CometConfig()
    cls, blocks = type(model).original_class, sparse_blocks(model.config)
    active = {} if settings.levels == "budget" else _predicted(settings)
    supposed = [replace(block, budget=active.get(block.name, block.budget)) for block in blocks]
    sparse, dense = (
        estimate(cls, config, chosen, max(1, sequence), new_tokens, batch, ranges=model.parties.ranges).costs
        for config, chosen in (
            (_with(model.config, settings, supposed), private),
            (_with(model.config, settings, []), replace(private, sparsity=None)),
        )
    )
    most = settings.levels != "budget" and not active
    return SparsityPrice(sparse.bytes_total, dense.bytes_total, sparse.rounds, dense.rounds, most)


def _predicted(settings: CometConfig) -> Mapping[str, int]:
    """By block, units that are predicted active in the mean; empty where the predictors are not here."""
    if settings.predictors is None:
        return {}
    found = {}
    for member in PredictorSet.from_pretrained(settings.predictors):
        measured = member.measures.get("test") or member.measures.get("validation")
        if measured is not None:
            found[member.site.name] = max(1, round(measured.predicted * member.predictor.units))
    return found


def _with(config: PretrainedConfig, settings: CometConfig, blocks: list[SparseBlock]) -> PretrainedConfig:
    made = type(config).from_dict(config.to_dict())
    setattr(made, KEY, facts_of(settings, blocks) if blocks else None)
    return made


# -- sparsity that is supposed, for estimates of models without predictors --------------------------------------------
_TOKENS = 4
_WORDS = "neurons=0.9,heads=0.5,block=16,rank=128,heads-rank=32,levels=open"


@dataclass(frozen=True)
class PlannedSparsity:
    """What predictors would leave out, in kept orders.

    neurons, heads: the share of neurons (blocks of them, with `block` above 1) and heads that each position leaves out,
    from 0 to below 1; None: none of this kind has a predictor. block: neurons of a unit. rank, heads_rank: of the
    predictors of neurons and heads. levels: "budget" opens the rest of the units as a public budget, "open" as many as
    are active, which are supposed to be the same number. Raises ConfigError.
    """

    neurons: float | None = None
    heads: float | None = None
    block: int = 1
    rank: int = 128
    heads_rank: int = 32
    levels: Literal["budget", "open"] = "budget"

    def __post_init__(self) -> None:
        if self.neurons is None and self.heads is None:
            raise ConfigError(f"sparsity: got neither neurons nor heads; want for instance {_WORDS}")
        for key in ("neurons", "heads"):
            share = getattr(self, key)
            if share is not None and not 0 <= share < 1:
                raise ConfigError(f"sparsity: {key}: got {share!r}; want a share from 0 to below 1 that is left out")
        for key in ("block", "rank", "heads_rank"):
            if getattr(self, key) < 1:
                raise ConfigError(f"sparsity: {key.replace('_', '-')}: got {getattr(self, key)}; want at least 1")
        if self.levels not in ("budget", "open"):
            raise ConfigError(f"sparsity: levels: got {self.levels!r}; want 'budget' or 'open'")

    @classmethod
    def parse(cls, text: str) -> "PlannedSparsity":
        """Of `neurons=0.9,heads=0.5,block=16,rank=128,heads-rank=32,levels=open`. Raises ConfigError."""
        values: dict[str, Any] = {}
        names = [item.name for item in fields(cls)]
        for piece in text.split(","):
            key, equals, value = (part.strip() for part in piece.partition("="))
            name = key.replace("-", "_")
            if not equals or name not in names or name in values:
                raise ConfigError(f"sparsity: got {piece!r}; want KEY=VALUE,... as in {_WORDS}, each key once")
            try:
                values[name] = value if name == "levels" else (float if name in ("neurons", "heads") else int)(value)
            except ValueError:
                raise ConfigError(f"sparsity: {key}: got {value!r}; want a number, as in {_WORDS}") from None
        return cls(**values)

    @property
    def settings(self) -> CometConfig:
        """The session's."""
        return CometConfig(
            neurons=self.neurons is not None, heads=self.heads is not None, orders="kept", levels=self.levels
        )

    def applied(self, cls: type[PreTrainedModel], config: PretrainedConfig) -> tuple[PretrainedConfig, str | None]:
        """The configuration of a model with such predictors, and the activation that ReLU took the place of, if any.

        Raises ConfigError for blocks that do not divide the neurons, ranks above the width, and heads whose projections
        are fused; PatchMismatch for a model without blocks of a wanted kind.
        """
        model, replaced = _bare(cls, config), None
        zeros = (zeroes(activation) for _, activation in activations_of(model, _short(model)))
        if self.neurons is not None and not any(zeros):
            config, replaced = with_relu(config)
            model = _bare(cls, config)
        kinds: tuple[Kind, ...] = self.settings.kinds  # type: ignore[assignment]
        blocks = [self._block(model, site) for site in find_sites(model, _short(model), kinds)]
        made = type(config).from_dict(config.to_dict())
        setattr(made, KEY, facts_of(self.settings, blocks))
        return made, replaced

    def _block(self, model: PreTrainedModel, site: Site) -> SparseBlock:
        ffn = site.kind == "ffn"
        block, rank = (self.block, self.rank) if ffn else (1, self.heads_rank)
        if site.units % block:
            raise ConfigError(f"sparsity: block: got {block}, which does not divide the {site.units} of '{site.name}'")
        made, taken = layer_sizes(model.get_submodule(site.name))[1], layer_sizes(model.get_submodule(site.writer))[0]
        if not ffn and made != taken:
            raise ConfigError(
                f"sparsity: heads: '{site.name}' makes queries, keys and values in one, which cannot be put in a "
                "secret order by heads; leave heads out"
            )
        if rank > site.width:
            raise ConfigError(f"sparsity: rank: got {rank} for inputs of width {site.width}; want at most that width")
        units = site.units // block
        left_out = (self.neurons if ffn else self.heads) or 0.0
        budget = max(1, units - int(left_out * units + 1e-9))
        return SparseBlock(
            site.name, site.kind, site.width, units, block, rank, "linear", budget, site.readers, site.writer,
            site.activation,
        )  # fmt: skip


def _bare(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """The model on the meta device, where no padding can be looked for."""
    config = copy.deepcopy(config)
    config.pad_token_id = None
    return skeleton(cls, config)


def _short(model: PreTrainedModel) -> dict[str, Any]:
    """A short input on the meta device."""
    if architecture(model.config).kind == "vision":
        return {"pixel_values": torch.zeros(1, *image_shape(model.config), device="meta")}
    ids = torch.ones(1, _TOKENS, dtype=torch.int64, device="meta")
    return {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}
