"""`private-llm diff`: which module does an error come from, and does any value leave the ring?"""

from __future__ import annotations

import re
from pathlib import Path

from rich.markup import escape

from private_llm.config import PrivateConfig
from private_llm.ranges import UNKNOWN
from private_llm_cli.commands.calibrate import ranges_from
from private_llm_cli.commands.classify import read_images
from private_llm_cli.commands.models import image_model, plaintext_model, tokenizer_of
from private_llm_cli.commands.output import CONSOLE, emit_json, emit_table, progress_bar


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
