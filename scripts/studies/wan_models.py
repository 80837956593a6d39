"""The models of bench_wan.py: where each comes from, its prompt, and what the estimator needs to know of it."""

import tempfile
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
import scripts_folder  # noqa: F401 - finds `bench`
import torch
from bench.whole import gpt2_forward
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.ranges import UNKNOWN, Ranges

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

PROMPT, TINY_PROMPT = 128, 12
"""Tokens of the prompt."""
QUESTION = "Repeat these words: the quick brown fox jumps over the lazy dog, and the lazy dog sleeps on."


@dataclass(frozen=True)
class WanModel:
    """name: as a row tells it. words: for people. text: its weights are real, and its prompt is words. weights: it has
    any, and can run.
    """

    name: str
    words: str
    text: bool = False
    weights: bool = True

    def missing(self) -> str | None:
        """What is not installed, in a sentence; None if the model can be had, or is only a shape."""
        if self.name != "smollm2":
            return None
        from private_llm_hf.models import smollm2

        return smollm2.missing()

    def shape(self) -> "tuple[type[PreTrainedModel], PretrainedConfig]":
        """What the estimator is given. Raises ConfigError for a model that is not installed."""
        from private_llm_hf.tools.estimate import model_class_of, named_shape
        from transformers import AutoConfig

        found = named_shape(self.name)
        if found is not None:
            return found
        config = AutoConfig.from_pretrained(self.folder())
        return model_class_of(config), config

    def ranges(self, config: PrivateConfig) -> Ranges:
        """Those of calibration; a shape has none."""
        return _ranges(self.name, config.frac_bits, config.ring) if self.weights else UNKNOWN

    def folder(self) -> str:
        """The model's folder; one with random weights is made once, and goes with this process.

        Raises ConfigError for a model that is not installed, or is only a shape.
        """
        if self.name == "smollm2":
            from private_llm_hf.models import smollm2

            quiet()
            return str(smollm2.folder())
        if self.name == "demo":
            return str(resources.files("private_llm_hf").joinpath("demo_model"))
        if self.name == "gpt2":
            return _random_gpt2().name
        raise ConfigError(f"wan: {self.name} is a shape without weights; it is modelled, not measured")

    def prompt(self, folder: str, tokens: int) -> Tensor:
        """Ids [1, tokens]: a chat's, or a text's, repeated or cut to that length; or from all over the vocabulary."""
        if self.name == "gpt2":
            return torch.from_numpy(np.random.default_rng(4).integers(0, 50257, (1, tokens)))
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        if self.name == "smollm2":
            from private_llm_hf.models import smollm2

            ids: Tensor = smollm2.chat(tokenizer, [QUESTION])["input_ids"]
        else:
            ids = tokenizer(QUESTION, return_tensors="pt")["input_ids"]
        return ids.repeat(1, -(-tokens // ids.shape[1]))[:, :tokens]


def quiet() -> None:
    """No progress bars of transformers."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def plaintext(folder: str) -> "PreTrainedModel":
    """The causal model itself, in float32."""
    from transformers import AutoModelForCausalLM

    quiet()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@lru_cache(maxsize=4)
def _ranges(name: str, frac_bits: int, ring: int) -> Ranges:
    """Of a model with a folder of its own."""
    from private_llm_hf.checkpoint.calibration_runs import loaded_ranges

    config = PrivateConfig.from_dict({"frac_bits": frac_bits, "ring": ring})
    return loaded_ranges(plaintext(wan_model(name).folder()), config)


@lru_cache(maxsize=1)
def _random_gpt2() -> tempfile.TemporaryDirectory[str]:
    """GPT-2 small with random weights."""
    place = tempfile.TemporaryDirectory(prefix="private-llm-")
    built: Any = gpt2_forward((1, 1, 768, 12, 12, 50257)).build()
    quiet()
    built.save_pretrained(place.name)
    return place


_MODELS = (
    WanModel("gpt2", "GPT-2 small, random weights"),
    WanModel("smollm2", "SmolLM2-135M-Instruct", text=True),
    WanModel("llama-7b", "LLaMA-7B", weights=False),
    WanModel("llama-8b", "a Llama of 8B parameters", weights=False),
    WanModel("llama-13b", "LLaMA-13B", weights=False),
    WanModel("demo", "the bundled model", text=True),
)


def wan_model(name: str) -> WanModel:
    """By its name. Raises ConfigError for another one."""
    for model in _MODELS:
        if model.name == name:
            return model
    raise ConfigError(f"wan: got model {name!r}; want one of {', '.join(model.name for model in _MODELS)}")
