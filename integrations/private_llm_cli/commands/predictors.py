"""`private-llm predictors`: owners of sparse models train predictors of activity, and look at them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from private_llm.errors import ConfigError
from private_llm_cli.commands.classify import read_images
from private_llm_cli.commands.models import demo_model, image_config, quiet
from private_llm_cli.commands.output import CONSOLE, emit_json, say_first
from private_llm_cli.help_pages import Command, Group
from private_llm_cli.options import Json

if TYPE_CHECKING:
    from private_llm_hf.sparsity.predictor_run import Images
    from private_llm_hf.sparsity.predictor_set import PredictorSet
    from torch import Tensor

_WIDE = 150
"""Columns of the table where the terminal does not tell."""

predictors = typer.Typer(
    cls=Group,
    name="predictors",
    help="As the model owner: predictors of active neurons and heads.",
    no_args_is_help=True,
)
UnitKind = StrEnum("UnitKind", ["FFN", "HEADS"])


@predictors.command(cls=Command)
def train(
    model: Annotated[str, typer.Option(help="Model folder or hub id (default: the bundled model).")] = "",
    text: Annotated[list[Path] | None, typer.Option(help="A text file to record; repeat.")] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="A `datasets` name; repeat for its configuration.")] = None,
    test: Annotated[Path | None, typer.Option(help="Unseen text to measure on.")] = None,
    images: Annotated[Path | None, typer.Option(help="A folder of images, for models of images.")] = None,
    test_images: Annotated[Path | None, typer.Option(help="Unseen images to measure on.")] = None,
    out: Annotated[str, typer.Option("--out", help="Folder for the predictors.")] = "predictors",
    recordings: Annotated[Path | None, typer.Option(help="For what the model did (default: OUT/recordings).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")] = False,
    kinds: Annotated[list[UnitKind] | None, typer.Option(help="What to predict; repeat (default: both).")] = None,
    rank: Annotated[int, typer.Option(help="Rank of the predictors; at most the model's width.")] = 32,
    heads_rank: Annotated[int | None, typer.Option(help="Rank of the heads' predictors (default: the same).")] = None,
    threshold: Annotated[float, typer.Option(help="Score above which a unit is predicted active.")] = 0.0,
    recall: Annotated[float, typer.Option(help="Recall that threshold 0 has at least on validation text.")] = 0.95,
    block: Annotated[int, typer.Option(help="Neurons that are predicted together.")] = 1,
    group: Annotated[bool, typer.Option(help="Blocks of neurons that are active together; else of neighbours.")] = True,
    budget: Annotated[float | None, typer.Option(help="Largest share of units predicted at a position.")] = None,
    budget_share: Annotated[
        float | None, typer.Option(help="Give each layer the budget that this share of positions keeps to.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="What attention may lose of its norm with inactive heads.")] = 0.1,
    rows: Annotated[int, typer.Option(help="Positions to record.")] = 200_000,
    test_rows: Annotated[int, typer.Option(help="Positions to measure on.")] = 50_000,
    length: Annotated[int, typer.Option(help="Tokens in a row.")] = 256,
    batch: Annotated[int, typer.Option(help="Rows in a call of the model.")] = 8,
    epochs: Annotated[int, typer.Option(help="Most passes over the recording.")] = 12,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    patience: Annotated[int, typer.Option(help="Epochs without a better F1 before a layer ends.")] = 3,
    plot: Annotated[Path | None, typer.Option(help="Draw recall and levels by layer (.png, .svg).")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of torch (default: its own choice).")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Do not use an accelerator.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights and of the order of positions.")] = 0,
    as_json: Json = False,
) -> None:
    """Train predictors on a text: the model runs over it once, then each layer's predictor learns from that."""
    say_first(f"loading {model or 'the demo model'}", as_json)
    import torch
    from private_llm_hf.sparsity.predictor_run import PredictorRun, run
    from private_llm_hf.sparsity.settings import PredictorConfig, TrainingConfig

    _refuse_picture(plot)
    quiet()
    neurons = PredictorConfig(rank, threshold, block, target_recall=recall, budget=budget, tolerance=tolerance)
    heads = replace(neurons, kind="heads", rank=rank if heads_rank is None else heads_rank, block=1, budget=None)
    settings = {"ffn": neurons, "heads": heads}
    wanted = [kind.value for kind in kinds or UnitKind]
    training = TrainingConfig(epochs=epochs, rate=rate, patience=patience, seed=seed, group=group)
    made = PredictorRun(
        model or demo_model(), tuple(settings[kind] for kind in wanted), training, tuple(text or ()),
        tuple(dataset or ()), test, images_of(model, images, batch),
        images_of(model, test_images, batch), Path(out), recordings, resume, budget_share, rows,
        test_rows, length, batch,
        cpu,
    )  # fmt: skip
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads: got {threads}; want at least 1")
        torch.set_num_threads(threads)
    found, row = run(made)
    if not as_json:
        _print(found)
    if plot is not None:
        draw(found, plot)
    emit_json(row)


@predictors.command(cls=Command)
def show(
    folder: Annotated[Path, typer.Argument(help="A folder that training wrote.")],
    plot: Annotated[Path | None, typer.Option(help="Draw recall and levels by layer (.png, .svg).")] = None,
    as_json: Json = False,
) -> None:
    """Print what predictors there are: recall, precision, how much they predict, and their budgets."""
    say_first(f"reading {folder}", as_json)
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
    """Images of a folder, by name, as the processor prepares them, `batch` at a time. Raises ConfigError for none."""
    if folder is None:
        return None
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    if not files:
        raise ConfigError(f"images: found no files in {folder}; want a folder of images")

    def read() -> Iterator[Tensor]:
        known = image_config(model)
        for start in range(0, len(files), max(1, batch)):
            yield read_images(model, known, files[start : start + max(1, batch)]).pixels

    return read


def draw(found: PredictorSet, path: Path) -> None:
    """By layer, one column for each kind: recall and precision above, levels (active, predicted, budget) below."""
    from private_llm_hf.sparsity.predictor_run import latest
    from private_llm_hf.sparsity.settings import KINDS

    from private_llm_cli.commands.plot import load_pyplot

    pyplot = load_pyplot()
    kinds = [kind for kind in KINDS if any(member.site.kind == kind for member in found)]
    figure, axes = pyplot.subplots(2, len(kinds), figsize=(6 * len(kinds), 6), squeeze=False)
    for column, kind in enumerate(kinds):
        members = [member for member in found if member.site.kind == kind]
        data = [latest(member.measures) for member in members]
        of_budget = [member.predictor.most / member.predictor.units for member in members]
        panels = (
            [("precision", [m.precision for m in data]), ("recall", [m.recall for m in data])],
            [("active", [m.activity for m in data]), ("predicted", [m.predicted for m in data]), ("budget", of_budget)],
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
        from private_llm_cli.commands.plot import check_name

        check_name(plot)


def _print(found: PredictorSet) -> None:
    from rich.console import Console

    (CONSOLE if CONSOLE.width >= _WIDE or CONSOLE.is_terminal else Console(width=_WIDE)).print(found)
