"""Finding models for the commands; imports the HuggingFace integration when called."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from private_llm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DEMO_PROMPT = "The history of the city begins with"
CHAT_PROMPT = "What is the capital of France?"
LONG_PROMPT = (
    DEMO_PROMPT + " the old bridge over the river , which was built of stone by the people of the town in the early "
    "years of the century"
)
"""Long enough to be dealt to the CompNodes of the default plan."""


def demo_model() -> str:
    """The folder of the bundled model. Raises ConfigError if this installation lacks it."""
    folder = Path(str(resources.files("private_llm_hf").joinpath("demo_model")))
    if not (folder / "config.json").is_file():
        raise ConfigError("the demo model is not part of this installation; name a model folder instead")
    return str(folder)


def smollm2_model(cache: Path | None = None) -> str:
    """The folder of SmolLM2-135M-Instruct, converted at its first use. Raises ConfigError if it is not installed."""
    from private_llm_hf import smollm2

    quiet()
    return str(smollm2.folder(cache))


def shape_of(source: str) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """Class and configuration of a built-in shape, a config.json, a model folder or a hub id. Raises ConfigError."""
    from private_llm_hf.estimate import model_class_of, named_shape
    from transformers import AutoConfig

    found = named_shape(source)
    if found is not None:
        return found
    config: PretrainedConfig = _load("configuration", AutoConfig, source)
    return model_class_of(config), config


def tokenizer_of(source: str) -> Any:  # noqa: ANN401 - a transformers tokenizer
    """The tokenizer of a model folder or hub id. Raises ConfigError."""
    from transformers import AutoTokenizer

    return _load("tokenizer", AutoTokenizer, source)


def plaintext_model(source: str) -> Any:  # noqa: ANN401 - a transformers model
    """The causal model itself, in float32, for comparison. Raises ConfigError."""
    import torch
    from transformers import AutoModelForCausalLM

    return _load("model", AutoModelForCausalLM, source, dtype=torch.float32).eval()


def image_model(source: str) -> Any:  # noqa: ANN401 - a transformers model
    """The image classifier itself, in float32, for comparison. Raises ConfigError."""
    import private_llm_hf  # noqa: F401 - makes plain networks known to transformers
    import torch
    from transformers import AutoModelForImageClassification

    return _load("model", AutoModelForImageClassification, source, dtype=torch.float32).eval()


def image_config(source: str) -> Any:  # noqa: ANN401 - a transformers configuration
    """The configuration of an image classifier. Raises ConfigError."""
    import private_llm_hf  # noqa: F401 - makes plain networks known to transformers
    from transformers import AutoConfig

    return _load("configuration", AutoConfig, source)


def quiet() -> None:
    """No progress bars of transformers beside our own."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _load(what: str, auto: Any, source: str, **more: Any) -> Any:  # noqa: ANN401 - transformers' auto classes
    quiet()
    try:
        return auto.from_pretrained(source, **more)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{what} of {source!r}: {first} (want a model folder or a hub id)") from None
