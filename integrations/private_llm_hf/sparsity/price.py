"""What a run with predictors will send and what it would send without them, counted before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PretrainedConfig

from private_llm.config import PrivateConfig
from private_llm.sparsity_config import CometConfig
from private_llm_hf.models.sparse_blocks import KEY, SparseBlock, facts_of, sparse_blocks
from private_llm_hf.sparsity.predictor_set import PredictorSet
from private_llm_hf.tools.estimate import estimate

_HERE: dict[str, Any] = {
    "party_mode": "threads", "hosts": (), "tls": None, "device": "cpu", "device_map": None, "max_memory": None,
    "offload_folder": None, "offline_folder": None,
}  # fmt: skip
"""Where parties are does not matter to what they send."""


@dataclass(frozen=True)
class SparsityPrice:
    """Bytes over all links and rounds of one run, with and without predictors.

    most: whether fewer bytes may be sent, since how many units will be active is not known here.
    """

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
    settings' folder predicted on the text that they were measured on. Raises ConfigError for a model without predictors
    and as `estimate`.
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
