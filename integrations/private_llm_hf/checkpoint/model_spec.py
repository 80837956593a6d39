"""A model's structure as its owner and the parties agree on it: before and after batch norms are folded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.errors import PatchMismatch
from private_llm.ranges import UNKNOWN, Ranges
from private_llm_hf.checkpoint.weights import Sink, WeightList, skeleton
from private_llm_hf.models.architectures import architecture_of, classes_of, refuse_loading
from private_llm_hf.models.batch_norm import Fold, Folder, fold_batch_norms
from private_llm_hf.models.sparse_blocks import attach_predictors
from private_llm_hf.vision.network import Network
from private_llm_hf.wire.commands import Description

_PASSING = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
"""Configuration keys that do not change what a model computes."""


def model_class(name: str) -> type[PreTrainedModel]:
    """A model class by name: transformers' own, or `Network`. Raises PatchMismatch."""
    found = Network if name == Network.__name__ else getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise PatchMismatch(f"model class: got {name!r}; want a PreTrainedModel of transformers")
    return found


def accepted_class(name: object, config: object) -> type[PreTrainedModel]:
    """The class called `name`, if `architecture()` accepts the type of the configuration, and it is the class's own.

    Builds nothing. Raises PatchMismatch.
    """
    model_type = config.get("model_type") if isinstance(config, Mapping) else None
    architecture_of(model_type)
    refuse_loading(config)
    try:
        found = model_class(name if isinstance(name, str) else "")
    except (ImportError, RuntimeError) as error:  # transformers' own, for what it lacks here
        raise PatchMismatch(f"model class {name!r} cannot be loaded here: {type(error).__name__}") from None
    if getattr(found.config_class, "model_type", None) != model_type and found.__name__ not in classes_of(
        str(model_type)
    ):
        raise PatchMismatch(f"model class {name!r} is none of architecture '{model_type}'")
    return found


def describe(
    model_class: type[PreTrainedModel], config: PretrainedConfig, ranges: Ranges = UNKNOWN
) -> Description:  # fmt: skip
    """What parties need to know to build a model: class, configuration, a digest of both, and the ranges."""
    values = {k: v for k, v in json.loads(config.to_json_string(use_diff=False)).items() if k not in _PASSING}
    facts = {"class": model_class.__name__, "config": values}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return Description(model_class.__name__, values, digest, ranges.to_dict())


@dataclass(frozen=True)
class ModelSpec:
    """What is known of a model without its weights.

    model: the tree that the parties build. source: the weights that a checkpoint holds. shared: those that the parties
    get, which differ where norms are folded.
    """

    model: PreTrainedModel
    source: WeightList
    shared: WeightList
    folds: tuple[Fold, ...]

    @classmethod
    def of(cls, model_class: type[PreTrainedModel], config: PretrainedConfig) -> ModelSpec:
        """From class and configuration alone. Raises PatchMismatch for weights without a rule."""
        model = skeleton(model_class, config)
        source = WeightList.of(model)
        folds = fold_batch_norms(model)
        attach_predictors(model)
        return cls(model, source, WeightList.of(model), folds)

    def folding(self, sink: Sink) -> Sink:
        """A sink for the tensors of a checkpoint that passes on what the parties get."""
        return Folder(self.folds, set(self.source.shapes), sink)
