"""What other systems' GELU and softmax cost on this engine, and what they do to the accuracy of a small classifier.

    python scripts/studies/compare_approximations.py pos.txt neg.txt  both tables (about 12 minutes on one core)
    python scripts/studies/compare_approximations.py pos.txt neg.txt --page docs/studies/approximations.md
    python scripts/studies/compare_approximations.py --costs  the table of costs only
    python scripts/studies/compare_approximations.py --tiny  smallest sizes, made-up sentences

pos.txt and neg.txt hold a sentence a line. A BERT of four layers is trained on four fifths of them in plaintext, and
tested on the others with each system's functions in the place of its own (plaintext emulation in float32). For
MPCFormer and SecFormer it is then distilled, as both papers do: all hidden states towards those of the trained model,
layer by layer, then the logits. Some test sentences also run privately, to see that the emulation is what runs.
"""

import argparse
import json
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import scripts_folder  # noqa: F401 - finds `bench`
import torch
import torch.nn.functional as F
from bench.catalogue import make
from bench.measure import measure
from bench.rows import Row, machine
from private_llm_hf import patch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from private_llm.approximations import emulated
from private_llm.config import PrivateConfig
from private_llm.errors import NeedsDistillation

NAMES = ("ours", "mpcformer", "secformer", "puma")
DISTILLED = ("mpcformer", "secformer")
WORKS = ("gelu", "softmax", "bert-layer", "opt-layer")
TITLES = {"ours": "ours", "mpcformer": "MPCFormer", "secformer": "SecFormer", "puma": "PUMA"}
LABELS = {"gelu": "GELU", "softmax": "softmax", "bert-layer": "BERT-base layer", "opt-layer": "OPT-125M layer"}
PAD, UNKNOWN_WORD, START = 0, 1, 2


@dataclass(frozen=True)
class Sizes:
    """Of the classifier and its training."""

    hidden: int = 128
    layers: int = 4
    words: int = 8000
    length: int = 40
    batch: int = 64
    epochs: int = 4
    distill_hidden: int = 2
    distill_logits: int = 1
    private: int = 32


TINY = Sizes(hidden=16, layers=1, words=40, length=8, batch=8, epochs=2, distill_hidden=1, distill_logits=1, private=4)


@dataclass(frozen=True)
class Sentences:
    """Token ids [n, length] and labels [n]."""

    ids: Tensor
    labels: Tensor

    def batches(self, size: int, seed: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """In order, or shuffled; no longer than their longest sentence."""
        n = len(self.labels)
        order = torch.arange(n)
        if seed is not None:
            order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        for part in order.split(size):
            ids = self.ids[part]
            yield ids[:, : int((ids != PAD).sum(1).max())], self.labels[part]


def read(files: Sequence[Path], sizes: Sizes) -> tuple[Sentences, Sentences]:
    """Sentences to train with, and every fifth to test with; words are those of the first part."""
    texts = [(line, label) for label, file in enumerate(files) for line in file.read_text(errors="replace").split("\n")]
    split = [(line.lower().split(), label) for line, label in texts if line.strip()]
    random.Random(0).shuffle(split)
    test, train = split[::5], [pair for k, pair in enumerate(split) if k % 5]
    common = Counter(word for words, _ in train for word in words).most_common(sizes.words - 3)
    number = {word: k + 3 for k, (word, _) in enumerate(common)}

    def encode(pairs: list[tuple[list[str], int]]) -> Sentences:
        ids = torch.full((len(pairs), sizes.length), PAD)
        for row, (words, _) in enumerate(pairs):
            tokens = [START, *(number.get(word, UNKNOWN_WORD) for word in words)][: sizes.length]
            ids[row, : len(tokens)] = torch.tensor(tokens)
        return Sentences(ids, torch.tensor([label for _, label in pairs]))

    return encode(train), encode(test)


def made_up(folder: Path) -> list[Path]:
    """Two files of sentences for --tiny."""
    words = random.Random(1)
    files = []
    for name, bank in (("pos", ["good", "fine", "warm"]), ("neg", ["bad", "dull", "cold"])):
        lines = [" ".join(words.choices([*bank, "the", "film", "is", "a"], k=6)) for _ in range(40)]
        files.append(folder / f"{name}.txt")
        files[-1].write_text("\n".join(lines))
    return files


def classifier(sizes: Sizes, activation: str = "gelu") -> BertForSequenceClassification:
    """Random weights."""
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=sizes.words, hidden_size=sizes.hidden, num_hidden_layers=sizes.layers,
            num_attention_heads=max(2, sizes.hidden // 32), hidden_act=activation, intermediate_size=4 * sizes.hidden,
            max_position_embeddings=sizes.length, num_labels=2, pad_token_id=PAD, hidden_dropout_prob=0.2,
            attention_probs_dropout_prob=0.1,
        )
    )  # fmt: skip


def optimise(model: BertForSequenceClassification, losses: Iterator[Tensor], steps: int, rate: float) -> None:
    """AdamW with a tenth of the steps to warm up, then linearly down; every loss is one step."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda k: min((k + 1) / warm, max(0.0, (steps - k) / max(1, steps - warm)))
    )
    for loss in losses:
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()


def train(model: BertForSequenceClassification, data: Sentences, sizes: Sizes) -> None:
    """In plaintext with the model's own functions."""

    def losses() -> Iterator[Tensor]:
        for epoch in range(sizes.epochs):
            for ids, labels in data.batches(sizes.batch, epoch):
                yield F.cross_entropy(model(input_ids=ids, attention_mask=(ids != PAD).long()).logits, labels)

    model.train()
    optimise(model, losses(), sizes.epochs * -(-len(data.labels) // sizes.batch), 5e-4)


def distilled(
    teacher: BertForSequenceClassification, name: str, data: Sentences, sizes: Sizes
) -> BertForSequenceClassification:
    """A copy of `teacher` that computes with the functions of `name`: first its hidden states, then its logits."""
    student = classifier(sizes)
    student.load_state_dict(teacher.state_dict())
    teacher.eval()
    student.eval()  # without dropout: the aim is to compute the same

    def losses(epochs: int, logits: bool) -> Iterator[Tensor]:
        for epoch in range(epochs):
            for ids, _ in data.batches(sizes.batch, 100 + epoch):
                given = {"input_ids": ids, "attention_mask": (ids != PAD).long(), "output_hidden_states": True}
                with torch.no_grad():
                    aim = teacher(**given)
                with emulated(name, student):
                    made = student(**given)
                seen = ids != PAD
                if logits:
                    yield F.cross_entropy(made.logits, aim.logits.softmax(-1))
                else:
                    pairs = zip(made.hidden_states, aim.hidden_states, strict=True)
                    yield torch.stack([F.mse_loss(a[seen], b[seen]) for a, b in pairs]).sum()

    steps = -(-len(data.labels) // sizes.batch)
    optimise(student, losses(sizes.distill_hidden, logits=False), sizes.distill_hidden * steps, 5e-4)
    optimise(student, losses(sizes.distill_logits, logits=True), sizes.distill_logits * steps, 1e-4)
    return student


def answers(model: BertForSequenceClassification, name: str, data: Sentences) -> Tensor:
    """The class of every sentence with the functions of `name`."""
    model.eval()
    with torch.no_grad(), emulated(name, model):
        made = [model(input_ids=ids, attention_mask=(ids != PAD).long()).logits for ids, _ in data.batches(128)]
    return torch.cat(made).argmax(-1)


def rates(found: Tensor, own: Tensor, labels: Tensor) -> list[str]:
    """Shares of right answers, and of answers that are the trained model's."""
    return [f"{100 * float((found == right).float().mean()):.1f} %" for right in (labels, own)]


def private_error(model: BertForSequenceClassification, name: str, data: Sentences, count: int, protocol: str) -> float:
    """Largest difference of logits between a private run and the emulation, over `count` sentences."""
    ids = data.ids[:count]
    mask = (ids != PAD).long()
    config = PrivateConfig(protocol=protocol, approximations=name, party_mode="threads", plugins=("rivals",))
    with torch.no_grad(), emulated(name, model):
        wanted = model(input_ids=ids, attention_mask=mask).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeedsDistillation)
        with patch(model, config) as private, torch.no_grad():
            found = private(input_ids=ids, attention_mask=mask).logits
    return float((found - wanted).abs().max())


def compare_accuracy(files: Sequence[Path], sizes: Sizes, protocol: str) -> str:
    """Train, test, distil, test; the table."""
    data, test = read(files, sizes)
    model = classifier(sizes)
    clock = time.perf_counter()
    train(model, data, sizes)
    taken = time.perf_counter() - clock
    own = answers(model, "ours", test)
    columns = ("functions", "as trained", "same answers", "distilled", "same answers", "private - emulated, logits")
    lines = [f"| {' | '.join(columns)} |", "|---|--:|--:|--:|--:|--:|"]
    slowest = 0.0
    for name in NAMES:
        shown = rates(answers(model, name, test), own, test.labels)
        student = model
        if name in DISTILLED:
            clock = time.perf_counter()
            student = distilled(model, name, data, sizes)
            slowest = max(slowest, time.perf_counter() - clock)
            shown += rates(answers(student, name, test), own, test.labels)
        else:
            shown += ["-", "-"]
        error = private_error(student, name, test, sizes.private, protocol)
        lines.append(f"| {TITLES[name]} | {' | '.join(shown)} | {error:.1e} |")
        print(lines[-1], flush=True)
    return "\n".join([
        f"A BERT of {sizes.layers} layers of {sizes.hidden}, {len(data.labels)} sentences to train with,"
        f" {len(test.labels)} to test with; {taken:.0f} s of training, distillation up to {slowest:.0f} s;",
        f"{machine()}.", "", *lines,
    ])  # fmt: skip


def compare_costs(protocol: str, repeat: int, tiny: bool) -> str:
    """Measure every work under every name; the table."""
    config = PrivateConfig(protocol=protocol, plugins=("rivals",))
    cells: dict[str, list[Row]] = {}
    for work in WORKS:
        for name in NAMES:
            row = measure(make(work, tiny=tiny), replace(config, approximations=name), repeat)
            cells.setdefault(work, []).append(row)
            print(json.dumps(row.to_dict()), flush=True)
    lines = [
        f"| {protocol}: MB, rounds, seconds | {' | '.join(TITLES[name] for name in NAMES)} |",
        "|---|--:|--:|--:|--:|",
    ]
    for work, rows in cells.items():
        shown = [f"{row.bytes_total / 1e6:.1f}, {row.rounds}, {row.seconds['median']:.2f}" for row in rows]
        lines.append(f"| {LABELS[work]}, {'x'.join(map(str, rows[0].shape))} | {' | '.join(shown)} |")
    about = f"Parties as threads of one process, median of {repeat}; {machine()}."
    return "\n".join([about, "", *lines])


def into_page(page: str, title: str, table: str) -> str:
    """The page with `table` between its marks `<!-- title -->` and `<!-- /title -->`."""
    first, last = f"<!-- {title} -->", f"<!-- /{title} -->"
    before, _, rest = page.partition(first)
    _, found, after = rest.partition(last)
    if not found:
        raise SystemExit(f"the page has no part marked {first} ... {last}")
    return f"{before}{first}\n{table}\n{last}{after}"


def main() -> int:
    """Both tables, or the one that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="sentences of the one kind, and of the other")
    parser.add_argument("--costs", action="store_true", help="leave out accuracy")
    parser.add_argument("--accuracy", action="store_true", help="leave out costs")
    parser.add_argument("--protocol", default="trio")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--page", type=Path, help="a page whose marked parts become these tables")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    files = args.files
    if args.tiny and not files:
        files = made_up(Path.cwd())
    if not args.costs and len(files) != 2:
        parser.error("want two files of sentences, or --costs")
    made = {}
    if not args.accuracy:
        made["costs"] = compare_costs(args.protocol, 1 if args.tiny else args.repeat, args.tiny)
    if not args.costs:
        made["accuracy"] = compare_accuracy(files, TINY if args.tiny else Sizes(), args.protocol)
    for title, text in made.items():
        print(f"\n{text}")
        if args.page is not None:
            args.page.write_text(into_page(args.page.read_text(), title, text))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
