"""What the user of share files gets: configuration, generation settings and tokenizer, and no weights."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel

from private_llm_hf.checkpoint.checkpoint import Checkpoint
from private_llm_hf.checkpoint.sentence_vectors import copy_sentence_files
from private_llm_hf.models.architectures import architecture


@contextlib.contextmanager
def made_or_removed(folder: Path) -> Iterator[None]:
    """A folder that is made inside does not stay behind an error; one that was there stays as it is."""
    there = folder.exists()
    try:
        yield
    except BaseException:
        if not there:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def write_client_folder(
    checkpoint: Checkpoint, folder: Path, config: PretrainedConfig, model_class: type[PreTrainedModel],
    download: dict[str, Any],
) -> None:  # fmt: skip
    """Configuration, generation settings and tokenizer for the user of share files, and how vectors are made."""
    source = checkpoint.source
    config.architectures = [model_class.__name__]
    config.save_pretrained(folder)
    generation = generation_config(model_class, source, config, download)
    if generation is not None:
        generation.save_pretrained(folder)
    if architecture(config).kind == "vision":
        with contextlib.suppress(OSError, ValueError):  # plain networks and tests have none
            AutoImageProcessor.from_pretrained(source, **download).save_pretrained(folder)
        return
    copy_sentence_files(source, folder, **download)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.tokenizer_source, **checkpoint.tokenizer_options, **download
        )
    except (OSError, ValueError):
        return  # a checkpoint without tokenizer
    if tokenizer.vocab_size > 0:  # for some families transformers makes up an empty one
        tokenizer.save_pretrained(folder)


def generation_config(
    model_class: type[PreTrainedModel], source: str, config: PretrainedConfig, download: dict[str, Any]
) -> GenerationConfig | None:
    """The checkpoint's generation settings, as from_pretrained finds them."""
    if not model_class.can_generate():
        return None
    try:
        return GenerationConfig.from_pretrained(source, **download)
    except OSError:
        return GenerationConfig.from_model_config(config)
