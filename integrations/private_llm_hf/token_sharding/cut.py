"""Where a model is cut: a party stops after the last layer before the cut, a CompNode goes on after it.

Both run the model's own forward. At the party a hook ends it; at the CompNode the layers before the cut are empty and
give out the hidden states that came from the parties.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.errors import ConfigError, DomainError, PatchMismatch
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.checkpoint.weights import skeleton
from private_llm_hf.token_sharding.attention_calls import cascade_config, listen, register, shape_alone


@dataclass(frozen=True)
class Cut:
    """Between layers `count - 1` and `count` at `path`. tuples: what layers return. width: of a hidden state."""

    path: str
    count: int
    width: int
    tuples: bool

    @classmethod
    def of(cls, kind: type[PreTrainedModel], config: PretrainedConfig, count: int) -> "Cut":
        """Where `count` layers end. Raises ConfigError unless a layer comes after them, PatchMismatch unless there is
        one list of layers, DomainError if forward does not reach it.
        """
        layers = config.num_hidden_layers
        if count >= layers:
            raise ConfigError(f"split: got {count}; want 1 to {layers - 1} for a model of {layers} layers")
        register()
        model = skeleton(kind, cascade_config(config))  # whose masks nobody looks at
        listen(model, shape_alone)
        paths = [p for p, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
        if len(paths) != 1:
            raise PatchMismatch(f"{kind.__name__}: found {paths or 'no list of layers'}; a split needs exactly one")
        stop_after(model, f"{paths[0]}.0")
        ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
        reached = _run_to(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False})
        return cls(paths[0], count, reached.states.shape[-1], reached.tuples)

    def belongs_before(self, name: str) -> bool:
        """Whether a weight is of a layer before the cut."""
        layer = name.removeprefix(f"{self.path}.").partition(".")[0]
        return name.startswith(f"{self.path}.") and int(layer) < self.count

    def shortened(self, config: PretrainedConfig) -> PretrainedConfig:
        """The configuration of a model that ends at the cut."""
        made = copy.deepcopy(config)
        for name, value in vars(config).items():
            if isinstance(value, (list, tuple)) and len(value) == config.num_hidden_layers:
                setattr(made, name, value[: self.count])  # a fact for each layer
        made.num_hidden_layers = self.count
        return made


class Reached(Exception):
    """Carries a layer's output out of a forward, whose rest is not wanted."""

    def __init__(self, output: Any) -> None:  # noqa: ANN401 - whatever a layer returns
        super().__init__()
        self.tuples = isinstance(output, tuple)
        self.states: Tensor = output[0] if self.tuples else output


def stop_after(model: nn.Module, path: str) -> None:
    """Let every forward end with `Reached` after the module at `path`."""

    def leave(module: nn.Module, inputs: object, output: object) -> None:
        raise Reached(output)

    model.get_submodule(path).register_forward_hook(leave)


def _run_to(model: nn.Module, inputs: dict[str, Any]) -> Reached:
    try:
        with torch.no_grad():
            model(**inputs, return_dict=True)
    except Reached as reached:
        return reached
    raise DomainError(f"{type(model).__name__}: its forward did not come to the layer where it is split")


def states_before_cut(model: nn.Module, inputs: dict[str, Any]) -> SecretTensor:
    """Hidden states at the end of a party's layers, [batch, new, hidden]. Raises DomainError if it ends elsewhere."""
    states = _run_to(model, inputs).states
    if not isinstance(states, SecretTensor):
        raise DomainError(f"{type(model).__name__}: the states at the split are not secret")
    return states


class StandIn:
    """In place of the layers before the cut at a CompNode: what the parties computed comes out of them."""

    def __init__(self, model: nn.Module, cut: Cut) -> None:
        self.rows: Tensor | None = None
        self.width, self._tuples = cut.width, cut.tuples
        layers = model.get_submodule(cut.path)
        for index in range(cut.count):
            layer = layers.get_submodule(str(index))
            layer._modules.clear()  # what it was stays, as models ask layers for their kind
            layer._parameters.clear()
            layer.forward = self._forward

    def _forward(self, hidden: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor]:
        if self.rows is None or self.rows.shape != hidden.shape:
            raise DomainError("no hidden states came for this forward from the layers before the split")
        return (self.rows,) if self._tuples else self.rows
