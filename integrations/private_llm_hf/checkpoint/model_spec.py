"""A model's structure as its owner and the parties agree on it: before and after norms are folded."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PatchMismatch
from private_llm.ranges import UNKNOWN, Ranges
from private_llm_hf.checkpoint.folds import NONE_FOLDED, Fold, Folded, Folder, NormFold, fold_batch_norms, fold_norms
from private_llm_hf.checkpoint.norm_readers import norm_readers
from private_llm_hf.checkpoint.weights import Sink, WeightList, skeleton
from private_llm_hf.models.architectures import architecture_of, classes_of, refuse_loading
from private_llm_hf.models.sparse_blocks import attach_predictors, sparse_blocks
from private_llm_hf.vision.network import Network
from private_llm_hf.wire.commands import Description

_PASSING = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")  # of no effect on results


def model_class(name: str) -> type[PreTrainedModel]:
    """A model class by name: transformers' own, or `Network`. Raises PatchMismatch."""
    found = Network if name == Network.__name__ else getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise PatchMismatch(f"model class: got {name!r}; want a PreTrainedModel of transformers")
    return found


def named_class(source: str, config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that a checkpoint's configuration names. Raises ConfigError unless it is one, PatchMismatch."""
    names = getattr(config, "architectures", None) or []
    if len(names) != 1:
        raise ConfigError(f"model {source!r}: its configuration names the classes {names}; want one")
    return model_class(names[0])


def accepted_class(name: object, config: object) -> type[PreTrainedModel]:
    """The class `name` if `architecture()` accepts its configuration's type. Builds nothing. Raises PatchMismatch."""
    model_type = config.get("model_type") if isinstance(config, Mapping) else None
    architecture_of(model_type)
    refuse_loading(config)
    try:
        found = model_class(name if isinstance(name, str) else "")
    except (ImportError, RuntimeError) as error:  # transformers' own, for what it lacks here
        raise PatchMismatch(f"model class {name!r} cannot be loaded here: {type(error).__name__}") from None
    own = getattr(found.config_class, "model_type", None) == model_type
    if not own and found.__name__ not in classes_of(str(model_type)):
        raise PatchMismatch(f"model class: got {name!r}; want one of architecture '{model_type}'")
    return found


def sent_values(config: PretrainedConfig) -> dict[str, Any]:
    """What of a configuration is sent to the parties: all that changes what a model computes, as JSON has it."""
    return {k: v for k, v in json.loads(config.to_json_string(use_diff=False)).items() if k not in _PASSING}


def describe(
    model_class: type[PreTrainedModel], config: PretrainedConfig, ranges: Ranges = UNKNOWN, folded: Folded = NONE_FOLDED
) -> Description:  # fmt: skip
    """What parties need to know to build a model: class, configuration, a digest of both, ranges, folded norms."""
    name, values = model_class.__name__, sent_values(config)
    digest = hashlib.sha256(json.dumps({"class": name, "config": values}, sort_keys=True).encode()).hexdigest()
    return Description(name, values, digest, ranges.to_dict(), {n: tuple(layers) for n, layers in folded.items()})


def folds_norms(config: PrivateConfig) -> bool:
    """Whether norms are folded into layers that read them: where weights are secret, whole at the parties, and
    calibrated, since folded weights are small and want fractional bits of their own.
    """
    return config.weights == "secret" and config.calibrate and config.plan is None and config.sparsity is None


@dataclass(frozen=True)
class ModelSpec:
    """A model without its weights. model: the tree that parties build. source: weights of a checkpoint. shared: those
    that parties get, which differ where norms are folded. norm_folds: layers that take up a norm.
    """

    model: PreTrainedModel
    source: WeightList
    shared: WeightList
    folds: tuple[Fold, ...]
    norm_folds: tuple[NormFold, ...] = ()

    @classmethod
    def of(
        cls, model_class: type[PreTrainedModel], config: PretrainedConfig, fold_norms_too: bool = False
    ) -> "ModelSpec":  # fmt: skip
        """fold_norms_too: see `folds_norms`; not where predictors read norms. Raises PatchMismatch without a rule."""
        folded = norm_readers(model_class, config) if fold_norms_too and not sparse_blocks(config) else NONE_FOLDED
        model = skeleton(model_class, config)
        source = WeightList.of(model)
        folds, norm_folds = fold_batch_norms(model), fold_norms(model, folded)
        attach_predictors(model)
        return cls(model, source, WeightList.of(model), folds, norm_folds)

    @property
    def folded(self) -> Folded:
        """The layers that take up a norm, by its name."""
        found: dict[str, list[str]] = {}
        for fold in self.norm_folds:
            found.setdefault(fold.norm, []).append(fold.layer)
        return found

    def folding(self, sink: Sink) -> Sink:
        """A sink for the tensors of a checkpoint that passes on what the parties get."""
        known = set(self.source.shapes)
        return Folder(self.folds, known, Folder(self.norm_folds, known, sink))
