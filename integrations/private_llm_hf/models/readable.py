"""Which inputs a model class reads, and what to use instead of one whose inputs a client cannot share."""

from __future__ import annotations

import inspect
import re
import sys

from transformers import PretrainedConfig, PreTrainedModel

from private_llm.errors import PatchMismatch
from private_llm_hf.models.architectures import architecture

_READ = ("input_ids", "pixel_values")


def require_inputs(model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Raise PatchMismatch, with what to use instead, for a class that reads neither one text a row nor one image."""
    name, kind = model_class.__name__, architecture(config).kind
    takes = inspect.signature(model_class.forward).parameters
    said = None
    if model_class.main_input_name not in _READ:
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
