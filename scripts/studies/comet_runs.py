"""What `comet_tables.py` counts: models of Comet's paper in protocols, dense and with its sparsity, each run once."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import transformers
from private_llm_hf.sparsity.price import PlannedSparsity
from private_llm_hf.sparsity.relufy import with_relu
from private_llm_hf.tools.estimate import Estimate, estimate, named_shape
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.nn import predicted

LENGTHS = (1, 2, 4, 8, 16)

Shape = tuple[type[PreTrainedModel], PretrainedConfig]
SETTINGS: dict[str, dict[str, Any]] = {
    "dealer, remask": {"protocol": "dealer", "matmul": "remask"},
    "dealer, masked": {"protocol": "dealer"},
    "trio": {"protocol": "trio"},
    "quad": {"protocol": "quad"},
}
SPARSITY = {"OPT-1.3B": (0.61, 0.34), "OPT-2.7B": (0.76, 0.42), "OPT-6.7B": (0.90, 0.50), "LLaMA-2-7B": (0.85, 0.49)}
"""Shares of neurons and heads left out: the paper's for 1.3B, 6.7B and LLaMA; 2.7B lies between."""
BLOCK, BLOCK_SHARE = 16, 2.0
"""Blocks of so many neurons, of which so many times the neurons' share is active."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is counted: models with ReLU, those of them that had another activation when given, tokens in and out."""

    models: Mapping[str, Shape]
    given: Mapping[str, Shape]
    prompt: int
    new: int
    lengths: tuple[int, ...]
    rank: int
    heads_rank: int

    @property
    def main(self) -> str:
        """The model that is taken apart."""
        return list(self.models)[-2]


def sizes(tiny: bool) -> Sizes:
    """The paper's, or two small models."""
    if tiny:
        opt = transformers.OPTConfig(
            hidden_size=64, ffn_dim=256, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64,
            vocab_size=100,
        )  # fmt: skip
        llama = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
        )
        small: dict[str, Shape] = {
            "OPT-6.7B": (transformers.OPTForCausalLM, opt), "LLaMA-2-7B": _relu((transformers.LlamaForCausalLM, llama)),
        }  # fmt: skip
        return Sizes(small, {"LLaMA-2-7B": (transformers.LlamaForCausalLM, llama)}, 5, 2, (1, 2), 8, 4)
    names = {"OPT-1.3B": "opt-1.3b", "OPT-2.7B": "opt-2.7b", "OPT-6.7B": "opt-6.7b", "LLaMA-2-7B": "llama-7b"}
    found = {label: shape for label, name in names.items() if (shape := named_shape(name)) is not None}
    relu = {label: _relu(shape) for label, shape in found.items()}
    return Sizes(relu, {"LLaMA-2-7B": found["LLaMA-2-7B"]}, 512, 16, LENGTHS, 128, 32)


def _relu(shape: Shape) -> Shape:
    """The dense model has ReLU, too."""
    cls, config = shape
    return cls, with_relu(config)[0]


def planned(label: str, size: Sizes, **changes: Any) -> PlannedSparsity:  # noqa: ANN401 - of several kinds
    """The paper's sparsity of a model, levels open, with changes."""
    neurons, heads = SPARSITY[label]
    made = PlannedSparsity(neurons, heads, rank=size.rank, heads_rank=size.heads_rank, levels="open")
    return dataclasses.replace(made, **changes)


def ways(label: str, size: Sizes) -> dict[str, PlannedSparsity | None]:
    """What is set side by side for each model."""
    neurons = SPARSITY[label][0]
    blocks = 1 - min(1.0, BLOCK_SHARE * (1 - neurons))
    return {
        "dense": None,
        "Comet": planned(label, size),
        "with budgets": planned(label, size, levels="budget"),
        f"blocks of {BLOCK}, budgets": planned(label, size, levels="budget", block=BLOCK, neurons=blocks),
    }


class Counter:
    """Estimates, each made once."""

    def __init__(self, size: Sizes, step: Callable[[str], None]) -> None:
        self.size, self._step = size, step
        self._made: dict[object, Estimate] = {}

    def run(
        self, label: str, setting: str, way: PlannedSparsity | None, new: int | None = None, whole_fc2: bool = False,
        functions: str | None = None,
    ) -> Estimate:  # fmt: skip
        """Costs of generating `new` tokens (default: all) after the prompt. whole_fc2: FC2 is dense. functions: of a
        system, with the activation that the model was given."""
        key = (label, setting, way, new or self.size.new, whole_fc2, functions)
        if key not in self._made:
            cls, config = self.size.models[label]
            more = {} if functions is None else {"approximations": functions, "plugins": ("rivals",)}
            if functions is not None:
                cls, config = self.size.given.get(label, (cls, config))
            private = PrivateConfig(**SETTINGS[setting], **more, sparsity=None if way is None else way.settings)
            if way is not None:
                config, _ = way.applied(cls, config)
            with mock.patch.object(predicted, "FEW_ROWS", 0 if whole_fc2 else predicted.FEW_ROWS):
                self._made[key] = estimate(cls, config, private, self.size.prompt, new or self.size.new)
            self._step(f"{label}, {setting}")
        return self._made[key]
