"""`private-llm classify`: images through a private classifier, beside the plaintext model's answers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from private_llm.errors import ConfigError
from private_llm_cli import options
from private_llm_cli.commands.models import image_config, loading, plaintext_model
from private_llm_cli.commands.output import CONSOLE, duration, emit_json, emit_table, note_sparsity, progress_bar, size

if TYPE_CHECKING:
    from torch import Tensor

_SHOWN = 10
"""Rows of the table for people; JSON has all."""


@dataclass(frozen=True)
class Examples:
    """Images with names, and what they show if that is known."""

    names: list[str]
    pixels: "Tensor"
    labels: "Tensor | None"


@dataclass(frozen=True)
class ClassifierRun(options.RemoteRun):
    """How a classifier runs: as its layers need it."""

    ring: Annotated[int, typer.Option("--ring", help="Bits of the ring; layer norms and GELU need 64.")] = 32
    reveal: Annotated[str, typer.Option(help="What the client opens: 'class' or 'logits'.")] = "class"
    frac_bits: Annotated[int | None, typer.Option(help="Fractional bits (default: 10 in 32 bits, else 18).")] = None


@options.grouped
def classify(
    run: ClassifierRun,
    model: Annotated[str, typer.Argument(help="Model folder or hub id (default: the bundled network).")] = "",
    images: Annotated[list[Path] | None, typer.Argument(help="Image files (default: digits never trained on).")] = None,
    count: Annotated[int, typer.Option(help="How many of the bundled digits.")] = 100,
    as_json: options.Json = False,
) -> None:
    """Private image classification, beside the plaintext model's answers."""
    if run.ring == 32 and run.frac_bits is None:
        run = replace(run, frac_bits=10)
    config = run.config()
    if bool(model) != bool(images):
        raise ConfigError("classify: give a model and image files, or neither (the bundled network and its digits)")
    loading(config, model, as_json)

    import torch
    from private_llm_hf import AutoPrivateModelForImageClassification
    from private_llm_hf.vision.network import NetworkConfig
    from private_llm_hf.vision.networks import digits_model

    source = model or digits_model()
    known = image_config(source)
    plain = None if config.hosts else plaintext_model(source, "AutoModelForImageClassification")
    batch = read_images(source, known, images) if images else _digits(count)
    with progress_bar(2, quiet=as_json) as step, torch.no_grad():
        step("calling the parties" if config.hosts else "sharing the weights", 0)
        with AutoPrivateModelForImageClassification.from_pretrained(source, config) as private:
            note_sparsity(private, 0, 0, len(batch.pixels))
            step("classifying")
            started = time.perf_counter()
            found = _classes(private(batch.pixels))
            seconds = time.perf_counter() - started
            costs = private.cost()
        step("comparing")
        wanted = None if plain is None else _classes(plain(batch.pixels))
    facts: dict[str, Any] = {
        "name": "classify", "model": source, "protocol": config.protocol, "ring": config.ring,
        "images": len(batch.names), "seconds": seconds, **costs.to_dict(),
    }  # fmt: skip
    # who asks parties on other hosts has no weights
    if wanted is not None:
        facts["equal"] = int((found == wanted).sum())
    if batch.labels is not None:
        answers = {"accuracy_private": found, **({} if wanted is None else {"accuracy_plain": wanted})}
        facts |= {name: 100.0 * float((made == batch.labels).double().mean()) for name, made in answers.items()}
    labels = {} if isinstance(known, NetworkConfig) else known.id2label
    made = {"classes": found, **({} if wanted is None else {"classes_plain": wanted})}
    if as_json:
        told = {name: dict(zip(batch.names, answers.tolist(), strict=True)) for name, answers in made.items()}
        emit_json({**facts, **told})
        return
    columns = [[str(labels.get(index, index)) for index in answers.tolist()] for answers in made.values()]
    _table(batch, columns, facts)


def _table(batch: Examples, columns: list[list[str]], facts: dict[str, Any]) -> None:
    """columns: private classes, and the plaintext model's where there is one."""
    rows = list(zip(batch.names, *columns, strict=True))
    emit_table("private classes", ("image", "private", "plaintext")[: 1 + len(columns)], rows[:_SHOWN])
    count = facts["images"]
    if "equal" in facts:
        CONSOLE.print(f"{facts['equal']} of {count} as in plaintext", highlight=False)
    if "accuracy_plain" in facts:
        accuracy = f"{facts['accuracy_private']:.2f} % right; plaintext {facts['accuracy_plain']:.2f} %"
        CONSOLE.print(accuracy, highlight=False)
    each = f"{duration(facts['seconds'])}, {size(facts['bytes_total'])}, {facts['rounds']} rounds for {count} images"
    CONSOLE.print(each, style="dim", highlight=False)


def _classes(output: Any) -> "Tensor":  # noqa: ANN401 - logits, or a transformers output that holds them
    logits: Tensor = getattr(output, "logits", output)
    return logits.argmax(-1)


def _digits(count: int) -> Examples:
    from private_llm_hf.vision.networks import digits

    pixels, labels = (part[:count] for part in digits(held_out=True))
    if count < 1:
        raise ConfigError(f"count: got {count}; want at least 1")
    return Examples([f"digit {index}, a {label}" for index, label in enumerate(labels.tolist())], pixels, labels)


def read_images(source: str, config: Any, files: Sequence[Path]) -> Examples:  # noqa: ANN401 - a transformers configuration
    """Image files as the model's own processor prepares them; a plain network gets values from 0 to 1."""
    import numpy as np
    import torch
    from PIL import Image, UnidentifiedImageError
    from private_llm_hf.models.inputs import image_shape
    from private_llm_hf.vision.network import NetworkConfig

    try:
        pictures = [Image.open(path) for path in files]
    except (OSError, UnidentifiedImageError) as error:
        raise ConfigError(f"images: {error}") from None
    names = [path.name for path in files]
    if not isinstance(config, NetworkConfig):
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(source)
        prepared = processor(images=[picture.convert("RGB") for picture in pictures], return_tensors="pt")
        return Examples(names, prepared["pixel_values"], None)
    channels, height, width = image_shape(config)
    mode = {1: "L", 3: "RGB"}.get(channels)
    if mode is None:
        raise ConfigError(f"images: this network takes {channels} channels; files have 1 or 3")
    values = [np.array(picture.convert(mode).resize((width, height)), dtype=np.float32) / 255 for picture in pictures]
    pixels = torch.from_numpy(np.stack(values)).reshape(-1, height, width, channels).permute(0, 3, 1, 2)
    return Examples(names, pixels, None)
