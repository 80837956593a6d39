"""`private-llm calibrate`: the owner's model on a text or images, and the public powers of two that its values need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from private_llm.config import VERSION, PrivateConfig
from private_llm.errors import ConfigError
from private_llm.ranges import Ranges
from private_llm_cli.commands.classify import read_images
from private_llm_cli.commands.models import gguf_options, image_config, quiet
from private_llm_cli.commands.output import CONSOLE, emit_json, progress_bar


def calibrate(
    source: str, config: PrivateConfig, task: str, text: Path | None, out: Path | None, as_json: bool,
    gguf_file: str | None = None, images: Sequence[Path] = (),
) -> None:  # fmt: skip
    """Print the ranges of a checkpoint, and write them for `share --ranges` if `out` is given."""
    from private_llm_hf.api import ranges_of_checkpoint
    from private_llm_hf.patch_plan import ranges_table

    from private_llm_cli.commands.parties import auto_class

    quiet()
    if images and text is not None:
        raise ConfigError("calibrate: give a text or images, as the model takes")
    try:
        words = None if text is None else text.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"text: {text} is no text in UTF-8") from None
    pixels = read_images(source, image_config(source), images).pixels if images else None
    with progress_bar(1, as_json) as step:
        step("running the plaintext model", 0)
        ranges = ranges_of_checkpoint(source, config, auto_class(task), words, pixels, **gguf_options(gguf_file))
        step("running the plaintext model")
    if not ranges.modules:
        raise ConfigError(
            f"calibrate: nothing to say of {source!r}; ranges are measured for models of text in the 64-bit ring, "
            "and for models of images that say what shape they take (or give --image)"
        )
    if out is not None:
        out.write_text(json.dumps({"version": VERSION, "modules": ranges.to_dict()}, indent=1), "utf-8")
    if as_json:
        emit_json({"name": "calibrate", "model": source, "modules": ranges.to_dict()})
        return
    CONSOLE.print(ranges_table(ranges))
    if out is not None:
        CONSOLE.print(f"written to {out}; use it with --ranges {out}", highlight=False, markup=False)


def ranges_from(path: Path | None) -> Ranges | None:
    """Ranges of a file of `private-llm calibrate`, None without one. Raises ConfigError for another file."""
    if path is None:
        return None
    try:
        return Ranges.from_json(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"ranges: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"ranges: {path} is no file of `private-llm calibrate --out`") from None
