"""Calibration runs: which models are calibrated, and on what: text and tokens of every kind, or pictures of noise."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from private_llm.approximations import emulated
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TightRange
from private_llm.ranges import UNKNOWN, Ranges
from private_llm_hf.checkpoint.calibration import calibrate
from private_llm_hf.checkpoint.checkpoint import Checkpoint
from private_llm_hf.checkpoint.sample_inputs import check_images, fitting_inputs, pictures
from private_llm_hf.checkpoint.weights import AS_GIVEN
from private_llm_hf.client.inputs import max_positions
from private_llm_hf.models.architectures import architecture
from private_llm_hf.vision.network import Network

LENGTH = 128
"""Tokens of a row."""

ROWS = 2
"""Rows of text."""

_PRIME = 7919

_LARGEST, _SMALLEST = 32, 8
"""Tokens with the largest and the smallest rows of embeddings that are tried, whatever the text."""


def can_calibrate(config: PretrainedConfig, private_config: PrivateConfig) -> bool:
    """Whether calibration is wanted and has something to say: models of images, and of text in the 64-bit ring."""
    if not private_config.calibrate or private_config.protocol == "cascade":
        return False
    return private_config.ring == 64 or architecture(config).kind == "vision"


def checkpoint_ranges(
    checkpoint: Checkpoint, model_class: type[PreTrainedModel], config: PretrainedConfig,
    private_config: PrivateConfig, hf: dict[str, Any], text: str | None = None, images: Tensor | None = None,
) -> Ranges:  # fmt: skip
    """Calibrate a checkpoint on `text` (default: the bundled one); nothing is known of what cannot be calibrated.

    images: for models of images, instead of pictures of noise.

    hf: where it lies and how it is loaded, as for `Checkpoint.load`. The whole plaintext model is in memory meanwhile.
    """
    if not can_calibrate(config, private_config):
        return UNKNOWN
    if images is not None:
        images = check_images(model_class, config, images)
    model = checkpoint.load(model_class, config, **hf)
    with emulated(private_config.approximations, model):
        if architecture(config).kind == "vision":
            return _seen(model, private_config, images)
        return calibrate(model, private_config, batches(model, _tokenizer(checkpoint, hf), text))


def _tokenizer(checkpoint: Checkpoint, hf: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer; None without one (transformers makes up an empty one for some)."""
    try:
        found = AutoTokenizer.from_pretrained(checkpoint.tokenizer_source, **checkpoint.tokenizer_options, **hf)
    except (OSError, ValueError, KeyError):
        return None
    return found if found.vocab_size > 0 else None


def loaded_ranges(model: nn.Module, private_config: PrivateConfig, images: Tensor | None = None) -> Ranges:
    """Calibrate a model in memory; its mode stays as it was.

    On the bundled text if it was loaded from a folder with a tokenizer, and on tokens from all over its vocabulary; a
    model of images on `images`, or on pictures of noise if it says what shape it takes.
    """
    if not isinstance(model, PreTrainedModel) or not can_calibrate(model.config, private_config):
        return UNKNOWN
    with AS_GIVEN:
        training = model.training
        try:
            with emulated(private_config.approximations, model):
                if architecture(model.config).kind == "vision":
                    return _seen(model.eval(), private_config, images)
                return calibrate(model.eval(), private_config, batches(model, _tokenizer_beside(model)))
        finally:
            model.train(training)


def _tokenizer_beside(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the folder that a model was loaded from."""
    folder = str(getattr(model.config, "_name_or_path", "") or "")
    if not folder or not Path(folder).is_dir():
        return None
    found = _tokenizer(Checkpoint(folder, {}, {}), {"local_files_only": True})
    return found if found is not None and len(found) <= model.get_input_embeddings().weight.shape[0] else None


def check_ranges(model: nn.Module, ranges: Ranges) -> None:
    """Raises ConfigError for ranges of modules that the model does not have."""
    strange = sorted(set(ranges.modules) - {name for name, _ in model.named_modules()})
    if strange:
        raise ConfigError(
            f"ranges: {len(strange)} module(s) are none of this {type(model).__name__}, such as {strange[0]!r}; "
            "calibrate this very model (private-llm calibrate)"
        )


def bundled_text() -> str:
    """The text that comes with the package: encyclopaedic sentences, prompts and verse."""
    folder = resources.files("private_llm_hf").joinpath("data")
    return "\n".join(folder.joinpath(name).read_text("utf-8") for name in ("sentences.txt", "heldout.txt"))


def batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, text: str | None = None
) -> list[Callable[[nn.Module], object]]:
    """Calls of the model: text (with a tokenizer), and tokens of every kind, those with the largest embeddings first.

    Raises ConfigError for a text without a tokenizer to read it, or of less than two tokens.
    """
    if text is not None and tokenizer is None:
        raise ConfigError("calibration text: the checkpoint has no tokenizer to read it; leave the text out")
    length = min(LENGTH, max_positions(model.config.get_text_config()) or LENGTH)
    length -= min(length // 2, 4)  # some families number positions from 2, or add tokens of their own
    rows = list(_every_kind(model, length).split(length))[:ROWS]
    rows = [row.view(1, -1) for row in rows]
    if tokenizer is not None:
        ids = tokenizer(bundled_text() if text is None else text, return_tensors="pt", verbose=False)["input_ids"][0]
        if len(ids) < 2 and text is not None:
            raise ConfigError(f"calibration text: got {len(ids)} token(s); want a text of some sentences")
        ids = ids[: ROWS * length]
        rows += [row.view(1, -1) for row in ids.split(length) if len(row) > 1]
    kind = architecture(model.config).kind
    return [functools.partial(_run, ids=row, kind=kind) for row in rows]


def _seen(model: PreTrainedModel, private_config: PrivateConfig, images: Tensor | None) -> Ranges:
    """Calibrate a model of images."""
    if images is None:
        if isinstance(model, Network) and model.config.image_shape is None:
            if private_config.ring == 64:
                return UNKNOWN
            images = fitting_inputs(model)
            if images is None and private_config.guard:
                warnings.warn(
                    "this network does not say what images it takes, and none of the usual sizes fits, so it was not "
                    "calibrated, and without that a 32-bit ring has no check of ranges: patch(model, config, "
                    "images=some_images) gives both",
                    TightRange,
                    stacklevel=5,
                )
            if images is None:
                return UNKNOWN
        else:
            images = pictures(model.config)
    shown = images

    def look(model: nn.Module) -> object:
        return model(shown.to(next(model.parameters(), shown)))

    return calibrate(model, private_config, [look])


def _every_kind(model: PreTrainedModel, length: int) -> Tensor:
    """Token ids for ROWS rows: those with the largest and smallest embeddings, then from all over the vocabulary."""
    table = model.get_input_embeddings().weight
    vocabulary = table.shape[0]
    sizes = table.detach().float().norm(dim=1).cpu()
    largest = sizes.topk(min(_LARGEST, length // 2, vocabulary)).indices
    there = torch.where(sizes > 0, sizes, torch.inf)
    smallest = there.topk(min(_SMALLEST, length // 4, vocabulary), largest=False).indices
    smallest = smallest[there[smallest].isfinite()]
    return torch.cat([largest, smallest, (torch.arange(ROWS * length) * _PRIME) % vocabulary])[: ROWS * length]


def _run(model: nn.Module, ids: Tensor, kind: str) -> object:
    ids = ids.to(next(model.parameters()).device)
    given: dict[str, Any] = {"input_ids": ids}
    if kind == "encoder-decoder":
        given["decoder_input_ids"] = ids
    if kind != "encoder":
        given["use_cache"] = False
    return model(**given)
