"""Train predictors of activation sparsity for a model that makes zeros (ReLU and its relatives).

For each layer, a small network foretells from the input of the feed-forward block which neurons will be active, and
from the input of attention which heads (Comet, section 4.1). Give it text of the kind that your users write::

    python scripts/train_predictors.py --model facebook/opt-125m --text a.txt b.txt --test unseen.txt --out predictors
    python scripts/train_predictors.py --model MODEL --dataset NAME [CONFIGURATION] --out predictors
    python scripts/train_predictors.py ... --resume            # go on where an interrupted run stopped
    python scripts/train_predictors.py ... --plot picture.png  # precision and recall by layer (Figure 17)
    python scripts/train_predictors.py --tiny                  # a few seconds, with the bundled model and text

The model runs over the text once; what it does is kept in `--recordings` (2 bytes for each input and 1 bit for each
neuron, position and layer), and every layer is trained from there. `predictors.json` and `predictors.safetensors` are
written to `--out`; what is in them tells `private_llm_hf/sparsity/predictor_set.py`. It needs ``pip install
private-llm[train]``, and ``[plot]`` for pictures.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import Accelerator
from private_llm_cli.commands.pyplot import load_pyplot
from private_llm_hf.checkpoint.model_spec import model_class
from private_llm_hf.models.architectures import architecture
from private_llm_hf.sparsity.apply import predicted_only
from private_llm_hf.sparsity.collect import record
from private_llm_hf.sparsity.predictor_set import PredictorSet
from private_llm_hf.sparsity.recordings import recordings
from private_llm_hf.sparsity.relufy import FACTS, load_relufied
from private_llm_hf.sparsity.settings import KINDS, PredictorConfig, TrainingConfig
from private_llm_hf.sparsity.sites import Site, find_sites
from private_llm_hf.sparsity.train_set import train_set
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from train_demo_model import encode, load_texts, total_nll, windows
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from private_llm.errors import ConfigError

INTEGRATION = Path(__file__).resolve().parent.parent / "integrations/private_llm_hf"
TINY = {
    "text": [INTEGRATION / "data/shakespeare.txt"], "test": INTEGRATION / "data/heldout.txt", "rows": 4096,
    "test_rows": 2048, "length": 64, "batch": 16, "epochs": 1, "rank": 16, "threads": 1,
}  # fmt: skip
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


def load_model(source: str) -> PreTrainedModel:
    """A model as the class that its configuration names, float32; what scripts/relufy.py wrote as it says."""
    if (Path(source) / FACTS).is_file():
        return load_relufied(source)
    names = AutoConfig.from_pretrained(source).architectures or []
    if len(names) != 1:
        raise SystemExit(f"--model {source}: its configuration names the classes {names}; want one")
    model: PreTrainedModel = model_class(names[0]).from_pretrained(source, dtype=torch.float32)
    return model.eval()


def first_token(tokenizer: Any) -> int:  # noqa: ANN401 - transformers is not typed
    """What every row begins with."""
    for found in (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id):
        if found is not None:
            return int(found)
    raise SystemExit("the tokenizer has no start token (bos, cls or eos)")


def batches(model: PreTrainedModel, rows: Tensor, size: int) -> Iterator[dict[str, Tensor]]:
    """Arguments of calls; an encoder-decoder reads the first half of each row and writes the second."""
    kind = architecture(model.config).kind
    if kind == "vision":
        raise SystemExit(f"{type(model).__name__} takes images: call `record` with batches of your own")
    for part in rows.split(size):
        if kind == "encoder-decoder":
            source, target = part.chunk(2, dim=1)
            yield {"input_ids": source, "decoder_input_ids": target}
        else:
            yield {"input_ids": part} if kind == "encoder" else {"input_ids": part, "use_cache": False}


def record_text(args: argparse.Namespace, model: PreTrainedModel, texts: list[str], folder: Path, most: int) -> None:
    """Run the model over texts, cut into rows of `--length` tokens, and record `most` positions."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = torch.cat([encode(tokenizer, text) for text in texts])
    rows = windows(ids, args.length, first_token(tokenizer))
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and args.length > limit:
        raise SystemExit(f"--length {args.length}: {args.model} has {limit} positions; want at most that.")
    if not len(rows):
        raise SystemExit(f"The text has {len(ids)} tokens; want at least {args.length}: give more, or lower --length.")
    sites = find_sites(model, next(batches(model, rows[:1], 1)), tuple(args.kinds))
    with Progress(*COLUMNS, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"recording {folder.name}", total=min(most, rows.numel()))
        record(
            model, sites, batches(model, rows, args.batch), folder, args.tolerance, most,
            lambda done: bar.update(task, completed=done),
        )  # fmt: skip


def train(
    args: argparse.Namespace, model: PreTrainedModel, accelerator: Accelerator, test: Path | None
) -> PredictorSet:
    """All predictors, with a bar that counts epochs."""
    training = TrainingConfig(
        epochs=args.epochs, rate=args.rate, patience=args.patience, seed=args.seed, group=args.group
    )  # fmt: skip
    shared = {"threshold": args.threshold, "target_recall": args.recall, "tolerance": args.tolerance}
    settings = {
        "ffn": PredictorConfig(rank=args.rank, block=args.block, budget=args.budget, **shared),
        "heads": PredictorConfig(rank=args.heads_rank or args.rank, kind="heads", **shared),
    }
    count = sum(found.site.kind in args.kinds for found in recordings(args.recordings / "train"))
    with Progress(*COLUMNS, console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=count * (args.epochs + 1))
        started: list[str] = []

        def step(site: Site, epoch: int, f1: float) -> None:
            if site.name not in started:
                started.append(site.name)
            done = (len(started) - 1) * (args.epochs + 1) + epoch + 1
            bar.update(task, completed=done, description=f"{site.name}: F1 {f1:.3f}")

        return train_set(
            model, args.recordings / "train", {kind: settings[kind] for kind in args.kinds}, training,
            args.out / "checkpoints", test, args.budget_share, Path(args.model).name, accelerator, step,
        )  # fmt: skip


def perplexities(args: argparse.Namespace, model: PreTrainedModel, found: PredictorSet) -> dict[str, float]:
    """Of a decoder on the test text: the model, and what is left of it if it computes only what is predicted."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = encode(tokenizer, args.test.read_text(encoding="utf-8"))[: args.test_rows]

    def perplexity() -> float:
        return round(math.exp(total_nll(model, ids, args.length, first_token(tokenizer)) / len(ids)), 3)

    rows = {"model": perplexity()}
    for kind in args.kinds:
        part = PredictorSet(found.model, [member for member in found if member.site.kind == kind])
        with predicted_only(model, part):
            rows[f"predicted {kind} only"] = perplexity()
    return rows


def plot(found: PredictorSet, path: Path) -> None:
    """Precision and recall of each layer at the predictors' threshold, one panel for each kind."""
    pyplot = load_pyplot()
    kinds = [kind for kind in KINDS if any(member.site.kind == kind for member in found)]
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(6 * len(kinds), 3.2), squeeze=False)
    for kind, panel in zip(kinds, axes[0], strict=True):
        members = [member for member in found if member.site.kind == kind]
        data = [member.measures.get("test", member.measures["validation"]) for member in members]
        places = torch.arange(len(members))
        panel.bar(places - 0.2, [100 * m.precision for m in data], 0.4, label="precision", color="#4c72b0")
        panel.bar(places + 0.2, [100 * m.recall for m in data], 0.4, label="recall", color="#dd8452")
        panel.set(xlabel="block", ylabel="%", ylim=(0, 100), title={"ffn": "neurons", "heads": "heads"}[kind])
        panel.set_xticks(places, [str(place) for place in places.tolist()])
        panel.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


def summary(found: PredictorSet) -> dict[str, Any]:
    """Means over the layers of each kind, on the test text if there is one."""
    rows: dict[str, Any] = {}
    for kind in KINDS:
        members = [member for member in found if member.site.kind == kind]
        data = [member.measures.get("test", member.measures["validation"]) for member in members]
        names = ("recall", "precision", "activity", "predicted")
        if members:
            rows[kind] = {n: round(sum(getattr(m, n) for m in data) / len(data), 4) for n in names}
            rows[kind]["rank"] = members[0].predictor.config.rank
    return rows


def main(args: argparse.Namespace) -> None:
    """Record, train, test, save, show."""
    if args.plot:
        load_pyplot()  # refuse before any work
    if not args.text and not args.dataset:
        raise SystemExit("No text to train on: give --text FILE ..., --dataset NAME, or --tiny.")
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    args.recordings = args.recordings or args.out / "recordings"
    if not args.resume and (args.out / "checkpoints").exists():
        raise SystemExit(f"{args.out} holds checkpoints of an earlier run: add --resume, or give another --out.")
    accelerator = Accelerator(cpu=args.cpu)
    model = load_model(args.model).to(accelerator.device)
    parts = {"train": args.rows, **({"test": args.test_rows} if args.test else {})}
    for part, most in parts.items():
        folder = args.recordings / part
        if args.resume and (folder / "order.json").exists():
            continue
        texts = (
            [args.test.read_text(encoding="utf-8")] if part == "test" else load_texts(args.text, args.dataset)["text"]
        )
        record_text(args, model, texts, folder, most)
    found = train(args, model, accelerator, args.recordings / "test" if args.test else None)
    found.save_pretrained(args.out)
    Console(width=140).print(found)
    if args.plot:
        plot(found, args.plot)
    row = {"model": Path(args.model).name, **summary(found), "out": str(args.out)}
    if args.test and architecture(model.config).kind == "decoder":
        row["perplexity"] = perplexities(args, model, found)
    print(json.dumps(row))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--model", default=str(INTEGRATION / "demo_model"), help="a model's folder or name (default: bundled)")
    add("--text", type=Path, nargs="+", metavar="FILE", help="text files to record")
    add("--dataset", nargs="+", metavar="NAME", help="a `datasets` name, and maybe the configuration's")
    add("--test", type=Path, metavar="FILE", help="unseen text to measure on")
    add("--out", type=Path, default=Path("predictors"), help="folder for the predictors")
    add("--recordings", type=Path, help="folder for what the model did (default: OUT/recordings)")
    add("--resume", action="store_true", help="use complete recordings, and go on from the checkpoints")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="what to predict (default: both)")
    add("--rank", type=int, default=32, help="rank of the predictors; at most the model's width")
    add("--heads-rank", type=int, help="rank of the heads' predictors (default: the same)")
    add("--threshold", type=float, default=0.0, help="score above which a unit is predicted active")
    add("--recall", type=float, default=0.95, help="recall that threshold 0 gets at least on validation text")
    add("--block", type=int, default=1, help="neurons that are predicted together")
    add(
        "--group", action=argparse.BooleanOptionalAction, default=True,
        help="with --block: neurons that are active together share a block; else neighbours do",
    )  # fmt: skip
    add("--budget", type=float, help="largest share of neurons that may be predicted active at a position")
    add("--budget-share", type=float, help="give each layer the budget that this share of positions keeps to")
    add("--tolerance", type=float, default=0.1, help="what attention may lose of its norm without inactive heads")
    add("--rows", type=int, default=200_000, help="positions to record")
    add("--test-rows", type=int, default=50_000, help="positions to measure on")
    add("--length", type=int, default=256, help="tokens in a row")
    add("--batch", type=int, default=8, help="rows in a call of the model")
    add("--epochs", type=int, default=12, help="most passes over the recording")
    add("--rate", type=float, default=2e-3, help="peak learning rate")
    add("--patience", type=int, default=3, help="epochs without a better F1 before a layer ends")
    add("--plot", type=Path, metavar="PICTURE", help="draw precision and recall by layer")
    add("--threads", type=int, help="torch threads (default: torch's own choice)")
    add("--cpu", action="store_true", help="do not use an accelerator")
    add("--seed", type=int, default=0)
    add("--tiny", action="store_true", help="a few seconds, on bundled text")
    if parser.parse_args(argv).tiny:
        parser.set_defaults(**TINY)
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main(parse_args())
    except ConfigError as error:
        raise SystemExit(str(error)) from None
