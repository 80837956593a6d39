"""Swapping GELU or SiLU for an activation that makes zeros, and saving a model that says so.

"relu" and "relu2" have names in transformers: the saved model loads by itself. So does one with "shifted-relu",
relu(x - shift), where FC1 has a bias, or can get one (`mlp_bias` of Llama's configuration), that takes the shift.
Elsewhere, and for "drelu", relu(gate) * relu(up), transformers has no class, and a private run refuses the model. Its
configuration then names an activation that transformers does not know, so that loading it there fails instead of
computing something else, and relufied.json beside it tells `load_relufied` what to put in place.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from private_llm.errors import ConfigError, PatchMismatch, refuse_unknown
from private_llm_hf.checkpoint.model_spec import named_class
from private_llm_hf.sparsity.sites import ReLULinear, ShiftedReLU, Site, activations_of

Activation = Literal["relu", "relu2", "shifted-relu", "drelu"]
ACTIVATIONS: tuple[Activation, ...] = ("relu", "relu2", "shifted-relu", "drelu")
FACTS = "relufied.json"
_KEYS = ("hidden_act", "hidden_activation", "activation_function", "feed_forward_proj", "activation")
"""Names under which configurations keep their activation."""
_GATED, _T5_NAME = "gated-", "dense_act_fn"


@dataclass(frozen=True)
class Relufied:
    """What was put in place of what, by module names; enough to do it again.

    native: whether transformers loads the saved model by itself. ups: up projections that got a ReLU (dReLU).
    Raises ConfigError for an unknown activation.
    """

    activation: Activation
    replaced: str
    native: bool
    modules: tuple[str, ...]
    ups: tuple[str, ...] = ()
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation: got {self.activation!r}; want one of {', '.join(ACTIVATIONS)}")


def relufy(
    model: PreTrainedModel, inputs: Mapping[str, Any], activation: Activation = "relu", shift: float = 1.0
) -> Relufied:
    """Swap the activation of every feed-forward block, in place. inputs: of one short call, to find the blocks.

    Raises ConfigError for an unknown activation or a shift that is not a finite number; PatchMismatch for a model
    without feed-forward blocks, one that has this activation, dReLU for blocks without a gate, or a configuration that
    does not name its activation.
    """
    kind = type(model).__name__
    if not torch.tensor(float(shift)).isfinite():
        raise ConfigError(f"shift: got {shift}; want a finite number")
    blocks = activations_of(model, inputs)
    if not blocks:
        raise PatchMismatch(f"{kind}: no feed-forward block with an activation of its own; nothing to swap")
    key = _key(model.config)
    old = str(getattr(model.config, key))
    if old.removeprefix(_GATED) == activation:
        raise PatchMismatch(f"{kind}: its activation is {old!r} already; train predictors for it as it is")
    ungated = [site.name for site, _ in blocks if len(site.readers) != 2]
    if activation == "drelu" and ungated:
        raise PatchMismatch(f"{kind}: dReLU needs a gate and an up projection, '{ungated[0]}' has none; use 'relu'")
    firsts = [model.get_submodule(site.name) for site, _ in blocks]
    folds = activation == "shifted-relu" and _have_biases(model, blocks)
    made = Relufied(
        activation, old, activation in ("relu", "relu2") or folds, tuple(str(site.activation) for site, _ in blocks),
        tuple(site.readers[1] for site, _ in blocks) if activation == "drelu" else (),
        float(shift) if activation == "shifted-relu" else 0.0,
    )  # fmt: skip
    if folds:
        with torch.no_grad():
            for first in firsts:
                first.get_parameter("bias").sub_(made.shift)
    put_in_place(model, made)
    return made


def put_in_place(model: PreTrainedModel, made: Relufied) -> None:
    """Set the modules that `made` names, and the activation's name in the configuration.

    Raises PatchMismatch where an up projection is no linear layer, or the configuration names no activation.
    """
    key = _key(model.config)
    for name in made.modules:
        model.set_submodule(name, _module(made))
    for name in made.ups:
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise PatchMismatch(f"'{name}' is a {type(layer).__name__}; want a linear layer")
        model.set_submodule(name, ReLULinear.of(layer))
    _rename(model.config, key, _loadable(made))


def save_relufied(model: PreTrainedModel, made: Relufied, folder: str | Path, report: Mapping[str, Any]) -> None:
    """Write the model and relufied.json: what was swapped, and `report` (figures before and after).

    Raises PatchMismatch for a configuration that names no activation.
    """
    folder = Path(folder)
    model.save_pretrained(folder)
    if not made.native:
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        names = {_key(model.config), _T5_NAME} & set(config)  # T5 writes its activation twice
        config |= dict.fromkeys(names, f"private_llm_{made.activation.replace('-', '_')}")
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    facts = {"relufied": {**asdict(made), "modules": list(made.modules), "ups": list(made.ups)}, "report": dict(report)}
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def load_relufied(folder: str | Path) -> PreTrainedModel:
    """A model that `save_relufied` wrote, float32, ready to run.

    Raises ConfigError for another folder, PatchMismatch for a configuration that names no activation, or no class.
    """
    folder = Path(folder)
    if not (folder / FACTS).is_file():
        raise ConfigError(
            f"{folder}: no {FACTS}; want a folder that private_llm_hf.sparsity.relufy.save_relufied wrote"
        )
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))["relufied"]
    refuse_unknown(facts, Relufied.__dataclass_fields__, f"{FACTS}: ")
    made = Relufied(**{**facts, "modules": tuple(facts["modules"]), "ups": tuple(facts["ups"])})
    config = AutoConfig.from_pretrained(folder)
    cls = named_class(str(folder), config)
    if not made.native:
        _rename(config, _key(config), _loadable(made))
    model: PreTrainedModel = cls.from_pretrained(folder, config=config, dtype=torch.float32)
    if not made.native:
        put_in_place(model, made)
    return model.eval()


def with_relu(config: PretrainedConfig) -> tuple[PretrainedConfig, str]:
    """A copy of a configuration with ReLU for its activation, and the activation that it names.

    Raises PatchMismatch where it does not name any.
    """
    made, key = copy.deepcopy(config), _key(config)
    old = str(getattr(config, key)).removeprefix(_GATED)
    _rename(made, key, "relu")
    return made, old


def _have_biases(model: PreTrainedModel, blocks: list[tuple[Site, nn.Module]]) -> bool:
    """Whether every FC1 or gate has a bias; zeros are put in where only a setting of the model is in the way."""
    if getattr(model.config, "mlp_bias", None) is False:
        layers = [model.get_submodule(name) for site, _ in blocks for name in (*site.readers, site.writer)]
        for layer in layers:
            weight = layer.get_parameter("weight")
            layer.bias = nn.Parameter(torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device))
        model.config.mlp_bias = True
    return all(isinstance(model.get_submodule(site.name).bias, Tensor) for site, _ in blocks)


def _module(made: Relufied) -> nn.Module:
    if made.activation == "shifted-relu" and not made.native:
        return ShiftedReLU(made.shift)
    found: nn.Module = ACT2FN[_loadable(made)]
    return found


def _loadable(made: Relufied) -> str:
    """The nearest name that transformers knows."""
    return "relu2" if made.activation == "relu2" else "relu"


def _key(config: PretrainedConfig) -> str:
    for key in _KEYS:
        if isinstance(getattr(config, key, None), str):
            return key
    raise PatchMismatch(f"{type(config).__name__}: no setting that names its activation (of {', '.join(_KEYS)})")


def _rename(config: PretrainedConfig, key: str, name: str) -> None:
    """Set the activation's name; T5's tells whether blocks are gated, and is kept twice."""
    gated = getattr(config, "is_gated_act", False)
    setattr(config, key, _GATED + name if gated else name)
    if hasattr(config, _T5_NAME):
        setattr(config, _T5_NAME, name)
