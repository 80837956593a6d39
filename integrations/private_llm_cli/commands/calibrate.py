"""`private-llm calibrate`: the owner's model on a text or images, and the public powers of two that its values need."""

import json
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from private_llm.approximations import OURS
from private_llm.config import VERSION
from private_llm.errors import ConfigError
from private_llm.ranges import UNKNOWN, Ranges
from private_llm_cli import options
from private_llm_cli.commands import models
from private_llm_cli.commands.classify import read_images
from private_llm_cli.commands.output import CONSOLE, emit_json, emit_table, progress_bar, say_first


def calibrate(
    model: Annotated[str, typer.Argument(help="Model folder or hub id.")],
    text: Annotated[Path | None, typer.Option(help="A text like those of your users (default: a bundled one).")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="Images like your users' (default: noise); repeat.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the ranges here, for --ranges.")] = None,
    task: options.Task = "causal-lm",
    ring: options.RingBits = 64,
    frac_bits: options.FracBits = None,
    gguf_file: options.GgufFile = None,
    as_json: options.Json = False,
) -> None:
    """As the model owner: find the range of every module's values (share, generate and patch() do it by themselves)."""
    config = options.config_of("trio", ring, frac_bits=frac_bits)
    if image and text is not None:
        raise ConfigError("calibrate: give a text or images, as the model takes")
    models.want_model(model, gguf_file)
    try:
        words = None if text is None else text.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"text: {text}: {error.strerror}; want a file with a text like those of your users") from None
    except UnicodeDecodeError:
        raise ConfigError(f"text: {text} has bytes that UTF-8 cannot decode; save the text in UTF-8") from None
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"out: there is no folder {out.parent}; want a file in one that there is")
    say_first(f"loading {model}", as_json)
    from private_llm_hf.api import ranges_of_checkpoint
    from private_llm_hf.patch_plan import ranges_table

    from private_llm_cli.commands.parties import auto_class

    models.quiet()
    pixels = read_images(model, models.image_config(model), image).pixels if image else None
    with progress_bar(1, as_json) as step:
        step("running the plaintext model", 0)
        ranges = ranges_of_checkpoint(model, config, auto_class(task), words, pixels, **models.gguf_options(gguf_file))
        step("running the plaintext model")
    if not ranges.modules:
        raise ConfigError(
            f"calibrate: found no ranges to measure in {model!r}; want a model of text in the 64-bit ring, or a model "
            "of images that says what shape it takes (or give --image)"
        )
    if out is not None:
        out.write_text(json.dumps({"version": VERSION, "modules": ranges.to_dict()}, indent=1), "utf-8")
    if as_json:
        emit_json({"name": "calibrate", "model": model, "modules": ranges.to_dict()})
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
        raise ConfigError(f"ranges: {path}: {error.strerror}; want what `private-llm calibrate --out` wrote") from None
    except UnicodeDecodeError:
        raise ConfigError(f"ranges: cannot decode {path}; want what `private-llm calibrate --out` wrote") from None
    except ConfigError as error:
        raise ConfigError(f"{error}; got {path}, want what `private-llm calibrate --out` wrote") from None


# -- `private-llm diff`: which module does an error come from, and does any value leave the ring? ---------------------
def diff(
    model: Annotated[str, typer.Argument(help="Model folder or hub id (default: the bundled model).")] = "",
    prompt: options.Prompt = "",
    ring: options.RingBits = 64,
    frac_bits: options.FracBits = None,
    everything: Annotated[bool, typer.Option("--all", help="Every module, not only layers.")] = False,
    as_json: options.Json = False,
    image: Annotated[Path | None, typer.Option(help="For a classifier of images: the image file.")] = None,
    ranges: options.RangesFile = None,
    approximations: options.ApproximationsOption = OURS,
) -> None:
    """Layer by layer against plaintext (with the same functions): errors, and values that leave the ring."""
    say_first(f"loading {model or 'the demo model'}", as_json)
    from private_llm_hf.api import ranges_of_checkpoint
    from private_llm_hf.tools.compare import compare

    config = options.config_of("plain", ring, approximations=approximations, frac_bits=frac_bits)
    source, known = model or models.demo_model(), ranges_from(ranges)
    if image is None:
        plain = models.plaintext_model(source)
        given = models.tokenizer_of(source)(prompt or models.DEMO_PROMPT, return_tensors="pt")["input_ids"]
    else:
        plain = models.plaintext_model(source, "AutoModelForImageClassification")
        given = read_images(source, plain.config, [image]).pixels
    with progress_bar(1, as_json) as step:
        step("comparing", 0)
        if known is None:
            known = UNKNOWN if image is not None else ranges_of_checkpoint(source, config)
        found = compare(plain, given, config, known)
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
