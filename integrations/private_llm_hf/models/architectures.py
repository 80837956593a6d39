"""What is known of architectures: transformers' own tables, exceptions to them, rules for modules (models/*.json)."""

import contextlib
import functools
import importlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from private_llm.errors import PatchMismatch

_EXCEPTIONS = "architectures.json"  # facts by model type that transformers' tables do not tell
_FOREIGN = frozenset(
    {"timm_wrapper", "timm_backbone", "encoder-decoder", "vision-encoder-decoder", "speech-encoder-decoder", "rag"}
)
"""Model types whose code is not transformers' own, or that are made of whatever their configuration names."""
_LOADING = frozenset({
    "checkpoint_path", "pretrained_cfg", "model_args", "auto_map", "backbone", "use_timm_backbone",
    "use_pretrained_backbone", "custom_pipelines", "trust_remote_code",
})  # fmt: skip
"""Settings that name something to be loaded."""


@dataclass(frozen=True)
class Architecture:
    """Public facts of a model type.

    kind: which stacks it has. positions: "limited" by max_position_embeddings, "after padding" (counted from
    pad_token_id + 1 over unmasked tokens, as RoBERTa does) or "unlimited" (relative positions).
    images: "sized" as config.image_size says, or "any" size that the layers can take.
    """

    kind: Literal["decoder", "encoder", "encoder-decoder", "vision"]
    positions: Literal["limited", "after padding", "unlimited"] = "limited"
    images: Literal["sized", "any"] = "sized"

    @property
    def caches(self) -> bool:
        """Whether it generates with a KV cache."""
        return self.kind in ("decoder", "encoder-decoder")


def architecture(config: PretrainedConfig) -> Architecture:
    """The architecture of a configuration. Raises PatchMismatch for a kind of model that is not run."""
    return architecture_of(config.model_type)


def architecture_of(model_type: object) -> Architecture:
    """The architecture of a model type: what architectures.json says of it, the rest from transformers' own tables.
    Raises PatchMismatch for what transformers does not know, and for kinds of models that are not run.
    """
    if not isinstance(model_type, str) or model_type not in {*CONFIG_MAPPING_NAMES, *read_facts(_EXCEPTIONS)}:
        raise PatchMismatch(
            f"unknown architecture {str(model_type)[:80]!r}; want a model type of transformers "
            f"{transformers.__version__}, or a torch.nn network"
        )
    return _known(model_type)


def caches(config: PretrainedConfig) -> bool:
    """Whether models of this configuration may generate with a KV cache; also of kinds that no shares are made of."""
    with contextlib.suppress(PatchMismatch):
        return architecture(config).caches
    return True


@functools.cache
def _known(model_type: str) -> Architecture:
    facts = dict(read_facts(_EXCEPTIONS).get(model_type, {}))
    if "kind" not in facts:
        facts["kind"] = _kind(model_type)
    if "positions" not in facts or "images" not in facts:
        usual = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING_NAMES else object
        limited = _mentions(usual, "max_position_embeddings") or _mentions(usual, "max_seq_len")
        source = ""
        with contextlib.suppress(ImportError, OSError, TypeError):  # no such model runs here
            name = usual.__module__.replace("configuration_", "modeling_")
            source = inspect.getsource(importlib.import_module(name)) if facts["kind"] == "encoder" else ""
        counted = "create_position_ids_from_input_ids" in source  # by the tokens that are not padding, as RoBERTa does
        facts.setdefault("positions", "after padding" if counted else "limited" if limited else "unlimited")
        facts.setdefault("images", "sized" if _mentions(usual, "image_size") else "any")
    return Architecture(**facts)


def _kind(model_type: str) -> str:
    """Which stacks a model type has, by the tables of transformers' auto classes."""
    if model_type in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and model_type not in _FOREIGN:
        return "encoder-decoder"
    if model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return "encoder"
    if model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "decoder"
    if model_type in modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES and model_type not in _FOREIGN:
        return "vision"
    raise PatchMismatch(
        f"architecture {model_type!r} is of a kind that is not run; want a model that generates text, fills in masked "
        "tokens or classifies images, of transformers' own code (sound, video, and texts with images have no private "
        "rule: use protocol='assisted' if the weights are public, or compute these in the clear)"
    )


@functools.cache
def classes_of(model_type: str) -> frozenset[str]:
    """Names of the classes that transformers' auto classes load for a model type (some share those of another)."""
    tables = (value for name, value in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES"))
    found: set[str] = set()
    for names in tables:
        known = names.get(model_type, ())
        found.update((known,) if isinstance(known, str) else known)
    return frozenset(found)


def refuse_loading(config: object) -> None:
    """Raise PatchMismatch for settings by which configurations, which parties get from clients, load something else."""
    if not isinstance(config, Mapping):
        return
    if isinstance(config.get("model_type"), str) and config["model_type"] in _FOREIGN:
        raise PatchMismatch(f"configuration: a model of type {config['model_type']!r} inside is not run")
    for name, value in config.items():
        if name in _LOADING and value not in (None, False, {}):
            raise PatchMismatch(
                f"configuration: {name!r} lets a model load code or another model; want a configuration that describes "
                "all of it (delete the entry where transformers' own class computes the same)"
            )
        refuse_loading(value)


def _mentions(config_class: type, name: str) -> bool:
    """Whether configurations of this class have this number, under whatever name."""
    return hasattr(config_class, name) or name in getattr(config_class, "attribute_map", {})


@functools.cache
def compared(way: Literal["shares", "token sharding"] = "shares") -> frozenset[str]:
    """Model classes that the project's tests compare with their plaintext selves: no trial before the first use."""
    return frozenset(read_facts("compared.json")[way])


def table(section: str) -> Any:  # noqa: ANN401 - a JSON value
    """A section of replacements.json. positions_by_mask: types that number positions by unmasked tokens by themselves.
    batch_first: encoders whose tensors all have the rows of the batch, or all their tokens, first.
    """
    return read_facts("replacements.json")[section]


def attention_of(model_type: str, cls: type[PreTrainedModel]) -> str:
    """`private_llm`; for families that bypass the attention registry the spelling that our op table serves."""
    usual = "private_llm" if hasattr(sys.modules[cls.__module__], "ALL_ATTENTION_FUNCTIONS") else "eager"
    found: str = table("attention").get(model_type, usual)
    return found


def reads_first_token(model_class: type[PreTrainedModel]) -> bool:
    """Whether a classifier reads the first token even where it is padding, and attention to padding is not defined."""
    classifies = model_class.__name__.endswith("ForSequenceClassification")
    return classifies and getattr(model_class.config_class, "model_type", "") in table("first_token")


@functools.cache
def read_facts(name: str) -> Any:  # noqa: ANN401 - a JSON value
    """A file of facts that lies beside this one. Nobody changes what is returned."""
    return json.loads(resources.files("private_llm_hf").joinpath("models", name).read_text())


# -- which inputs a model class reads, and what to use instead of one whose inputs cannot be shared -------------------
def require_inputs(model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Raise PatchMismatch, with what to use instead, for a class that reads neither one text a row nor one image."""
    name, kind = model_class.__name__, architecture(config).kind
    takes = inspect.signature(model_class.forward).parameters
    said = None
    if model_class.main_input_name not in ("input_ids", "pixel_values"):
        said = f"{model_class.main_input_name} (sound or other signals); run it in the clear before a model of text"
    elif kind == "vision" and "input_ids" in takes:
        said = "texts and images at once; use the class for images alone, such as one for image classification"
    elif name.endswith("ForMultipleChoice"):
        said = (
            "several texts a row; load its weights as ...ForSequenceClassification with num_labels=1, call that with "
            "one row for each choice, and compare the logits"
        )
    elif kind == "encoder-decoder" and name.endswith("ForSequenceClassification"):
        said = (
            "where a text's end token is, which is secret; use an encoder's class (BERT, DeBERTa), or this one's model "
            "without a head and the head in the clear"
        )
    elif name.endswith("ForPreTraining"):
        said = "texts for two heads at once; use a class with one, ...ForMaskedLM or ...ForNextSentencePrediction"
    if said is not None:
        raise PatchMismatch(
            f"{name}: it reads {said}. A private model reads token ids (or embeddings) or images, one input a row"
        )


def shifts_prompts(model_class: type[PreTrainedModel]) -> bool:
    """Whether a decoder that is given nothing reads the encoder's tokens, shifted (BART and its like)."""
    source = inspect.getsource(sys.modules[model_class.__module__])
    return re.search(r"decoder_input_ids = shift_tokens_right\(\s*input_ids", source) is not None
