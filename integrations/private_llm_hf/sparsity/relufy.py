"""Swapping GELU or SiLU for an activation that makes zeros, and saving a model that says so.

"relu" and "relu2" have names in transformers: the saved model loads by itself. So does one with "shifted-relu",
relu(x - shift), where FC1 has a bias, or can get one (`mlp_bias` of Llama's configuration), that takes the shift.
Elsewhere, and for "drelu", relu(gate) * relu(up), transformers has no class, and a private run refuses the model. Its
configuration then names an activation that transformers does not know, so that loading it there fails instead of
computing something else, and relufied.json beside it tells `load_relufied` what to put in place.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from private_llm.errors import ConfigError, PatchMismatch, refuse_unknown
from private_llm_hf.checkpoint.model_spec import named_class
from private_llm_hf.sparsity.sites import ReLULinear, ShiftedReLU

ReluKind = Literal["relu", "relu2", "shifted-relu", "drelu"]
ACTIVATIONS: tuple[ReluKind, ...] = ("relu", "relu2", "shifted-relu", "drelu")
FACTS = "relufied.json"
_KEYS = ("hidden_act", "hidden_activation", "activation_function", "feed_forward_proj", "activation")
"""Names under which configurations keep their activation."""
GATED, T5_NAME = "gated-", "dense_act_fn"


@dataclass(frozen=True)
class Relufied:
    """What was put in place of what, by module names. native: whether transformers loads the saved model. ups: up
    projections with a ReLU (dReLU). Raises ConfigError for an unknown activation.
    """

    activation: ReluKind
    replaced: str
    native: bool
    modules: tuple[str, ...]
    ups: tuple[str, ...] = ()
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation: got {self.activation!r}; want one of {', '.join(ACTIVATIONS)}")


def put_in_place(model: PreTrainedModel, made: Relufied) -> None:
    """Set `made`, and the activation's name. Raises PatchMismatch without one, and for projections not linear."""
    key = activation_key(model.config)
    for name in made.modules:
        model.set_submodule(name, _module(made))
    for name in made.ups:
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise PatchMismatch(f"'{name}' is a {type(layer).__name__}; want a linear layer")
        model.set_submodule(name, ReLULinear.of(layer))
    _rename(model.config, key, _loadable(made))


def load_relufied(folder: str | Path) -> PreTrainedModel:
    """A model of `save_relufied`, float32. Raises ConfigError for another folder, PatchMismatch for a new class."""
    folder = Path(folder)
    if not (folder / FACTS).is_file():
        raise ConfigError(f"{folder}: no {FACTS}; want a folder that scripts/relufy.py of the repository wrote")
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))["relufied"]
    refuse_unknown(facts, Relufied.__dataclass_fields__, f"{FACTS}: ")
    made = Relufied(**{**facts, "modules": tuple(facts["modules"]), "ups": tuple(facts["ups"])})
    config = AutoConfig.from_pretrained(folder)
    cls = named_class(str(folder), config)
    if not made.native:
        _rename(config, activation_key(config), _loadable(made))
    model: PreTrainedModel = cls.from_pretrained(folder, config=config, dtype=torch.float32)
    if not made.native:
        put_in_place(model, made)
    return model.eval()


def with_relu(config: PretrainedConfig) -> tuple[PretrainedConfig, str]:
    """A copy of a configuration with ReLU, and the activation that it names. Raises PatchMismatch if it names none."""
    made, key = copy.deepcopy(config), activation_key(config)
    old = str(getattr(config, key)).removeprefix(GATED)
    _rename(made, key, "relu")
    return made, old


def _module(made: Relufied) -> nn.Module:
    if made.activation == "shifted-relu" and not made.native:
        return ShiftedReLU(made.shift)
    found: nn.Module = ACT2FN[_loadable(made)]
    return found


def _loadable(made: Relufied) -> str:
    """The nearest name that transformers knows."""
    return "relu2" if made.activation == "relu2" else "relu"


def activation_key(config: PretrainedConfig) -> str:
    """Under which name a configuration keeps its activation. Raises PatchMismatch for one that keeps none."""
    for key in _KEYS:
        if isinstance(getattr(config, key, None), str):
            return key
    raise PatchMismatch(f"{type(config).__name__}: lacks the name of its activation; want one of {', '.join(_KEYS)}")


def _rename(config: PretrainedConfig, key: str, name: str) -> None:
    """Set the activation's name; T5's tells whether blocks are gated, and is kept twice."""
    gated = getattr(config, "is_gated_act", False)
    setattr(config, key, GATED + name if gated else name)
    if hasattr(config, T5_NAME):
        setattr(config, T5_NAME, name)
