"""What owners of sparse models type: training predictors of activity, and looking at them.

Each function parses the options of the command of its name, and imports what runs it (`commands/`) when it is called.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from private_llm_cli.commands.models import demo_model
from private_llm_cli.help_pages import Command, Group
from private_llm_cli.options import Json

predictors = typer.Typer(
    cls=Group,
    name="predictors",
    help="As the model owner: predictors of active neurons and heads.",
    no_args_is_help=True,
)


class UnitKind(StrEnum):
    """What is predicted."""

    FFN = "ffn"
    HEADS = "heads"


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
    from private_llm_hf.sparsity.predictor_run import PredictorRun
    from private_llm_hf.sparsity.settings import PredictorConfig, TrainingConfig

    from private_llm_cli.commands.predictors import images_of
    from private_llm_cli.commands.predictors import train as run

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
    run(made, plot, threads, as_json)


@predictors.command(cls=Command)
def show(
    folder: Annotated[Path, typer.Argument(help="A folder that training wrote.")],
    plot: Annotated[Path | None, typer.Option(help="Draw recall and levels by layer (.png, .svg).")] = None,
    as_json: Json = False,
) -> None:
    """Print what predictors there are: recall, precision, how much they predict, and their budgets."""
    from private_llm_cli.commands.predictors import show as run

    run(folder, plot, as_json)
