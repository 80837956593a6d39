"""What leaving out predicted neurons and heads does to answers: perplexity of a text, and accuracy of a classifier.

    python scripts/studies/sparse_accuracy.py --model MODEL --predictors FOLDER --text unseen.txt
    python scripts/studies/sparse_accuracy.py --sentences pos.txt neg.txt --block 16
    python scripts/studies/sparse_accuracy.py ... --page docs/studies/predictors.md --plot PICTURE
    python scripts/studies/sparse_accuracy.py --tiny

Each line is one threshold of the predictors (Table 4 of Comet): the share of units that is left out, what the plaintext
model answers that computes the others alone, and the bytes of a real private run under trio that opens predictions
(kept orders, open levels), beside the dense one. Text: perplexity, and how often the most likely next token is the
dense model's. Sentences: pos.txt and neg.txt hold a sentence a line; a BERT with ReLU is trained on four fifths of
them, its predictors on what it does with these, and both are tested on the others.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from compare_approximations import PAD, Sentences, Sizes, classifier, into_page, made_up, read, train
from private_llm_cli.commands.plot import load_pyplot
from private_llm_hf import patch
from private_llm_hf.sparsity.predictor_run import load_model, predicted_only, train_set
from private_llm_hf.sparsity.predictor_set import PredictorSet
from private_llm_hf.sparsity.recordings import record
from private_llm_hf.sparsity.settings import PredictorConfig, TrainingConfig
from private_llm_hf.sparsity.sites import find_sites
from private_llm_hf.tools.texts import encode, first_token, windows
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.sparsity_config import CometConfig

INTEGRATION = Path(__file__).resolve().parents[2] / "integrations/private_llm_hf"
THRESHOLDS = (0.0, 0.1, 0.3, 0.5, 0.7, 1.5, 3.0)
TINY = Sizes(hidden=16, layers=1, words=40, length=8, batch=8, epochs=2, private=4)
FAIR = 1.5
"""Percentage points of accuracy that may be lost (the paper's)."""


@dataclass(frozen=True)
class Line:
    """One threshold, None for the dense model. left_out: share of units. figures: by name. megabytes: of a run."""

    threshold: float | None
    left_out: float
    figures: dict[str, float]
    megabytes: float


def at_threshold(found: PredictorSet, threshold: float) -> PredictorSet:
    """The same predictors with another threshold and no budget."""
    members = []
    for member in found:
        config = replace(member.predictor.config, threshold=threshold, budget=None)
        members.append(replace(member, predictor=member.predictor.with_config(config).eval()))
    return PredictorSet(found.model, members)


@contextmanager
def counted(found: PredictorSet) -> Iterator[list[float]]:
    """Shares of units that are left out, one for each call of a predictor inside."""
    shares: list[float] = []
    with ExitStack() as stack:
        for member in found:
            select = member.predictor.select

            def note(_: nn.Module, __: Any, scores: Tensor, select: Callable[[Tensor], Tensor] = select) -> None:  # noqa: ANN401
                shares.append(1 - float(select(scores).float().mean()))

            stack.callback(member.predictor.register_forward_hook(note).remove)
        yield shares


def traffic(model: PreTrainedModel, given: dict[str, Tensor], found: PredictorSet | None) -> float:
    """MB of one private call under trio over all links."""
    with tempfile.TemporaryDirectory() as folder:
        sparsity = None
        if found is not None:
            found.save_pretrained(folder)
            kinds = {member.site.kind for member in found}
            sparsity = CometConfig(folder, "ffn" in kinds, "heads" in kinds, orders="kept", levels="open")
        with torch.no_grad(), patch(model, PrivateConfig(sparsity=sparsity)) as private:
            private(**given)
            return float(private.cost().bytes_total) / 1e6


def swept(
    model: PreTrainedModel, found: PredictorSet, thresholds: Sequence[float], given: dict[str, Tensor],
    figures: Callable[[], dict[str, float]],
) -> list[Line]:  # fmt: skip
    """The dense model, and one line a threshold. given: arguments of the private call. figures: of the plain model."""
    lines = [Line(None, 0.0, figures(), traffic(model, given, None))]
    for threshold in thresholds:
        part = at_threshold(found, threshold)
        with predicted_only(model, part), counted(part) as shares:
            made = figures()
        lines.append(Line(threshold, sum(shares) / len(shares), made, traffic(model, given, part)))
        print(json.dumps(vars(lines[-1])), flush=True)
    return lines


def of_text(
    model: PreTrainedModel, found: PredictorSet, ids: Tensor, bos: int, length: int, thresholds: Sequence[float]
) -> list[Line]:
    """Perplexity and agreement with the dense model on a text."""
    rows = windows(ids, length, bos)
    dense: list[Tensor] = []

    @torch.no_grad()
    def figures() -> dict[str, float]:
        best: list[Tensor] = []
        loss = 0.0
        for part in rows.split(8):
            logits = model(input_ids=part, use_cache=False).logits.float()[:, :-1]
            best.append(logits.argmax(-1))
            loss += float(nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
        if not dense:
            dense.extend(best)
        same = torch.cat(best) == torch.cat(dense)
        return {
            "perplexity": math.exp(loss / rows[:, 1:].numel()),
            "same next token, %": 100 * float(same.float().mean()),
        }

    return swept(model, found, thresholds, {"input_ids": rows[:1]}, figures)


def of_sentences(
    files: Sequence[Path], sizes: Sizes, config: PredictorConfig, epochs: int, thresholds: Sequence[float]
) -> tuple[list[Line], str]:
    """Accuracy of a ReLU classifier on sentences that it was not trained on, and a line about it."""
    data, test = read(files, sizes)
    model = classifier(sizes, "relu")
    train(model, data, sizes)
    model.eval()
    with tempfile.TemporaryDirectory() as folder:
        sites = find_sites(model, {"input_ids": data.ids[:1, :4]}, ("ffn",))
        record(model, sites, by_length(data), Path(folder))
        found = train_set(model, Path(folder), {"ffn": config}, TrainingConfig(epochs=epochs), name="classifier")

    @torch.no_grad()
    def figures() -> dict[str, float]:
        right = 0
        for ids, labels in test.batches(sizes.batch):
            answer = model(input_ids=ids, attention_mask=(ids != PAD).long()).logits.argmax(-1)
            right += int((answer == labels).sum())
        return {"accuracy, %": 100 * right / len(test.labels)}

    ids = max((given["input_ids"] for given in by_length(test)), key=len)[: sizes.private // 4]
    lines = swept(model, found, thresholds, {"input_ids": ids}, figures)
    about = (
        f"A BERT with ReLU, {sizes.layers} layers of {sizes.hidden}: {len(data.labels)} sentences to train with, "
        f"{len(test.labels)} to test with; bytes of {len(ids)} sentences of {ids.shape[1]} words at once."
    )
    return lines, about


def by_length(data: Sentences) -> Iterator[dict[str, Tensor]]:
    """Batches of sentences of one length, without padding, in a fixed order."""
    lengths = (data.ids != PAD).sum(1)
    for length in lengths.unique().tolist():
        if length > 1:
            for part in data.ids[lengths == length].split(64):
                yield {"input_ids": part[:, :length]}


def table(lines: Sequence[Line]) -> str:
    """Markdown."""
    names = list(lines[0].figures)
    heads = ("threshold", "left out", *names, "MB under trio")
    made = [f"| {' | '.join(heads)} |", f"|---{'|--:' * (len(heads) - 1)}|"]
    for line in lines:
        first = ["dense", "-"] if line.threshold is None else [f"{line.threshold:g}", f"{100 * line.left_out:.1f} %"]
        cells = [*first, *(f"{line.figures[name]:.2f}" for name in names), f"{line.megabytes:.1f}"]
        made.append(f"| {' | '.join(cells)} |")
    return "\n".join(made)


def plot(parts: dict[str, list[Line]], path: Path) -> None:
    """For each part the first figure, and the bytes, by threshold; the dense model as broken lines."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(1, len(parts), figsize=(5.5 * len(parts), 3.4), squeeze=False)
    for (title, lines), panel in zip(parts.items(), axes[0], strict=True):
        dense, rest = lines[0], lines[1:]
        name = next(iter(dense.figures))
        places = [line.threshold for line in rest]
        panel.plot(places, [line.figures[name] for line in rest], "o-", color="#4c72b0")
        panel.axhline(dense.figures[name], linestyle="--", color="#4c72b0")
        panel.set(xlabel="threshold", ylabel=name, title=title)
        panel.yaxis.label.set_color("#4c72b0")
        other = panel.twinx()
        other.plot(places, [line.megabytes for line in rest], "s-", color="#dd8452")
        other.axhline(dense.megabytes, linestyle="--", color="#dd8452")
        other.set(ylabel="MB under trio", ylim=(0, None))
        other.yaxis.label.set_color("#dd8452")
    figure.tight_layout()
    figure.savefig(path)


def tiny_predictors(model: PreTrainedModel, rows: Tensor) -> PredictorSet:
    """For the bundled model, from a few rows."""
    with tempfile.TemporaryDirectory() as folder:
        sites = find_sites(model, {"input_ids": rows[:1, :4]}, ("ffn",))
        record(model, sites, [{"input_ids": rows, "use_cache": False}], Path(folder))
        return train_set(model, Path(folder), {"ffn": PredictorConfig(rank=8, block=8)}, TrainingConfig(epochs=0))


def main() -> None:
    """The tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(INTEGRATION / "demo_model"), help="a decoder's folder or name (default: bundled)")
    add("--predictors", type=Path, help="what `private-llm predictors train` wrote for it")
    add("--text", type=Path, help="unseen text")
    add("--tokens", type=int, default=20_000, help="of the text")
    add("--length", type=int, default=128, help="tokens in a row, one of which runs privately")
    add("--sentences", type=Path, nargs=2, metavar="FILE", help="sentences of the one kind, and of the other")
    add("--rank", type=int, default=16, help="of the classifier's predictors")
    add("--block", type=int, default=16, help="neurons that the classifier's predictors predict together")
    add("--epochs", type=int, default=5, help="of the classifier's predictors")
    add("--thresholds", type=float, nargs="+", default=list(THRESHOLDS))
    add("--page", type=Path, help="a page whose marked parts become these tables")
    add("--plot", type=Path, metavar="PICTURE", help="draw both")
    add("--tiny", action="store_true", help="smallest sizes, on bundled text and made-up sentences")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes, thresholds = TINY if args.tiny else Sizes(), args.thresholds
    if args.tiny:
        thresholds, args.tokens, args.length = thresholds[:2], 300, 24
        args.text = args.text or INTEGRATION / "data/heldout.txt"
        args.sentences = args.sentences or made_up(Path(tempfile.mkdtemp()))
    if args.text is None and args.sentences is None:
        parser.error("want --text with --model and --predictors, --sentences, or --tiny")
    parts: dict[str, list[Line]] = {}
    shown: dict[str, str] = {}
    if args.text is not None:
        model = load_model(args.model)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        ids = encode(tokenizer, args.text.read_text(encoding="utf-8"))[: args.tokens]
        bos = first_token(tokenizer)
        if args.predictors is None and not args.tiny:
            parser.error("--text: want --predictors as well")
        found = (
            tiny_predictors(model, windows(ids, args.length, bos))
            if args.predictors is None
            else PredictorSet.from_pretrained(args.predictors)
        )
        parts["text"] = of_text(model, found, ids, bos, args.length, thresholds)
        shown["text"] = table(parts["text"])
    if args.sentences is not None:
        block = 8 if args.tiny else args.block
        config = PredictorConfig(rank=min(args.rank, sizes.hidden), block=block)
        lines, about = of_sentences(args.sentences, sizes, config, 0 if args.tiny else args.epochs, thresholds)
        parts["sentences"] = lines
        lost = lines[0].figures["accuracy, %"] - lines[1].figures["accuracy, %"]
        verdict = f"At threshold {lines[1].threshold:g} {lost:.2f} points of accuracy are lost; at most {FAIR} may be."
        shown["sentences"] = f"{about}\n{verdict}\n\n{table(lines)}"
    for title, text in shown.items():
        print(f"\n{text}")
        if args.page is not None:
            args.page.write_text(into_page(args.page.read_text(), title, text))
    if args.plot is not None:
        plot(parts, args.plot)


if __name__ == "__main__":
    main()
