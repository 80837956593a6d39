"""`private-llm predictors train` and `show`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from private_llm.errors import ConfigError
from private_llm_cli.commands.classify import read_images
from private_llm_cli.commands.models import image_config, quiet
from private_llm_cli.commands.output import CONSOLE, emit_json
from private_llm_cli.commands.plot import check_name, load_pyplot

if TYPE_CHECKING:
    from private_llm_hf.sparsity.predictor_run import Images, PredictorRun
    from private_llm_hf.sparsity.predictor_set import PredictorSet
    from torch import Tensor

_WIDE = 150
"""Columns of the table where the terminal does not tell."""


def train(settings: PredictorRun, plot: Path | None, threads: int | None, as_json: bool) -> None:
    """Train a set, and print it and a line of figures."""
    import torch
    from private_llm_hf.sparsity.predictor_run import run

    _refuse_picture(plot)
    quiet()
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads: got {threads}; want at least 1")
        torch.set_num_threads(threads)
    found, row = run(settings)
    if not as_json:
        _print(found)
    if plot is not None:
        draw(found, plot)
    emit_json(row)


def show(folder: Path, plot: Path | None, as_json: bool) -> None:
    """Print a stored set."""
    from private_llm_hf.sparsity.predictor_set import PredictorSet

    _refuse_picture(plot)
    found = PredictorSet.from_pretrained(folder)
    if plot is not None:
        draw(found, plot)
    if not as_json:
        _print(found)
        return
    for member in found:
        config, units = member.predictor.config, member.predictor.units
        emit_json({
            "site": member.site.name, "kind": config.kind, "rank": config.rank, "block": config.block, "units": units,
            "grouped": member.predictor.grouping is not None, "threshold": config.threshold,
            "budget": None if config.budget is None else member.predictor.most,
            "measures": {data: measures.to_dict() for data, measures in member.measures.items()},
        })  # fmt: skip


def images_of(model: str, folder: Path | None, batch: int) -> Images | None:
    """The images of a folder, in order of names, as the model's processor prepares them; `batch` at a time.

    Raises ConfigError for a folder without files.
    """
    if folder is None:
        return None
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    if not files:
        raise ConfigError(f"images: {folder} is no folder of images")

    def read() -> Iterator[Tensor]:
        known = image_config(model)
        for start in range(0, len(files), max(1, batch)):
            yield read_images(model, known, files[start : start + max(1, batch)]).pixels

    return read


def draw(found: PredictorSet, path: Path) -> None:
    """By layer, one column for each kind: recall and precision above, levels (active, predicted, budget) below."""
    from private_llm_hf.sparsity.predictor_run import latest
    from private_llm_hf.sparsity.settings import KINDS

    pyplot = load_pyplot()
    kinds = [kind for kind in KINDS if any(member.site.kind == kind for member in found)]
    figure, axes = pyplot.subplots(2, len(kinds), figsize=(6 * len(kinds), 6), squeeze=False)
    for column, kind in enumerate(kinds):
        members = [member for member in found if member.site.kind == kind]
        data = [latest(member.measures) for member in members]
        of_budget = [member.predictor.most / member.predictor.units for member in members]
        panels = (
            [("precision", [m.precision for m in data]), ("recall", [m.recall for m in data])],
            [
                ("active", [m.activity for m in data]),
                ("predicted", [m.predicted for m in data]),
                ("budget", of_budget),
            ],
        )
        for panel, bars in zip(axes[:, column], panels, strict=True):
            width = 0.8 / len(bars)
            for number, (label, values) in enumerate(bars):
                places = [place + (number - (len(bars) - 1) / 2) * width for place in range(len(members))]
                panel.bar(places, [100 * value for value in values], width, label=label)
            panel.set(xlabel="layer", ylabel="%", ylim=(0, 125), yticks=range(0, 101, 20))
            panel.set_xticks(range(len(members)))
            panel.legend(loc="upper center", ncols=len(bars))
        each = members[0].predictor.config.block
        name = "heads" if kind == "heads" else "neurons" if each == 1 else f"blocks of {each} neurons"
        axes[0, column].set_title(name)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _refuse_picture(plot: Path | None) -> None:
    """Before any work."""
    if plot is not None:
        check_name(plot)
        load_pyplot()


def _print(found: PredictorSet) -> None:
    (CONSOLE if CONSOLE.width >= _WIDE or CONSOLE.is_terminal else Console(width=_WIDE)).print(found)
