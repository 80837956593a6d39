"""`private-llm calibrate`: the owner's model on a text or images, and the public powers of two that its values need."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from private_llm.config import VERSION, PrivateConfig
from private_llm.errors import ConfigError
from private_llm.ranges import UNKNOWN, Ranges
from private_llm_cli.commands.classify import read_images
from private_llm_cli.commands.models import (
    gguf_options,
    image_config,
    image_model,
    plaintext_model,
    quiet,
    tokenizer_of,
)
from private_llm_cli.commands.output import CONSOLE, emit_json, emit_table, progress_bar


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


# -- `private-llm diff`: which module does an error come from, and does any value leave the ring? ---------------------
def diff(
    source: str, prompt: str, config: PrivateConfig, everything: bool, as_json: bool, image: Path | None = None,
    ranges: Path | None = None,
) -> None:  # fmt: skip
    """Compare module by module on a text or an image; by default only whole layers and what lies outside them.

    ranges: a file of `calibrate`; by default the model is calibrated first, as `share` and `from_pretrained` do.
    """
    from private_llm_hf.api import ranges_of_checkpoint
    from private_llm_hf.tools.compare import compare

    known = ranges_from(ranges)

    if image is None:
        model = plaintext_model(source)
        given = tokenizer_of(source)(prompt, return_tensors="pt")["input_ids"]
    else:
        model = image_model(source)
        given = read_images(source, model.config, [image]).pixels
    with progress_bar(1, as_json) as step:
        step("comparing", 0)
        if known is None:
            known = UNKNOWN if image is not None else ranges_of_checkpoint(source, config)
        found = compare(model, given, config, known)
        step("comparing")
    rows = [row for row in found.modules if everything or not re.search(r"\.\d+\.", row.name)]
    if as_json:
        for row in rows:
            emit_json(
                {
                    "module": row.name, "class": row.kind, "largest": row.largest, "error_max": row.error_max,
                    "error_mean": row.error_mean,
                }
            )  # fmt: skip
        emit_json({"name": "diff", "model": source, "stopped": found.stopped})
        return
    cells = [
        (row.name, row.kind, f"{row.largest:.3g}", f"{row.error_max:.1e}", f"{row.error_mean:.1e}") for row in rows
    ]
    headings = ("module", "class", "largest value", "largest error", "mean error")
    emit_table(f"{source}: {config.ring}-bit ring, {config.frac_bits} fractional bits", headings, cells)
    if found.stopped is not None:
        CONSOLE.print(f"[red]stopped:[/] {escape(found.stopped)}", highlight=False)
    else:
        CONSOLE.print("no value left its range", highlight=False)
