"""Figures of the attacks on the bundled model: cost against gap, shares against c and alpha, rounding.

    python scripts/studies/attack_figures.py --rows docs/studies/cascade-attacks-search.jsonl  # measure (minutes)
    python scripts/studies/attack_figures.py --rows docs/studies/cascade-attacks-search.jsonl --plot picture.png
    python scripts/studies/attack_figures.py --tiny --rows rows.jsonl                  # does it run?

Searches beyond the limit are not run: their rows have the seconds that the measured rate predicts (`run` is false).
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import scripts_folder  # noqa: F401 - finds `bench`
import torch
from attacks.attacked import RowsAt
from attacks.collusion import collude
from attacks.row_matching import flat
from attacks.scores import exact
from attacks.view import view_of
from attacks.vocab_matching import CHUNK, match_states
from bench.rows import commit
from private_llm_cli.commands.models import demo_model, plaintext_model, tokenizer_of
from private_llm_cli.commands.output import emit_json, progress_bar
from private_llm_cli.commands.plot import load_pyplot
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.token_sharding import ShardingPlan

TEXT = (
    "The letter was written in the summer of the year before the war, and nobody had read it since. The old bridge "
    "over the river was built of stone, and the people of the town paid a toll to cross it every morning."
)
Row = dict[str, Any]


def prior_of(ids: Tensor, count: int) -> Tensor:
    """`count` tokens with those of the text among them: an attacker whose prior is right."""
    have = sorted(set(ids.tolist()))
    others = [t for t in range(4096) if t not in set(have)]
    return torch.tensor(sorted([*have, *others[: count - len(have)]]))


def open_plan(alpha: int, c: int) -> ShardingPlan:
    """Blocks of c tokens, partial results of each shard."""
    return ShardingPlan(alpha, c, 1, accept_weak_plan=True, partials="open")


def gaps(models: dict[int, RowsAt], ids: Tensor, most: float) -> Iterator[Row]:
    """One gap of each length, for rows of layer 1 and for the theorem's partial results."""
    for vocabulary in (64, 512, 4096):
        prior = prior_of(ids[:12], vocabulary)
        for attack in ("states", "results"):
            rate = 0.0
            for gap in (1, 2, 3, 4):
                count = vocabulary**gap
                row = {"name": "gap", "attack": attack, "vocabulary": vocabulary, "gap": gap, "candidates": count}
                limit = most if attack == "results" else most / 1000
                if gap > 1 and count > limit:
                    yield {**row, "run": False, "seconds": count / rate}
                    continue
                start = time.perf_counter()
                found = search(models, ids, gap, prior, attack)
                seconds = time.perf_counter() - start
                rate = count / seconds
                yield {**row, "run": True, "seconds": seconds, "right": found == ids[:gap].tolist()}


def search(models: dict[int, RowsAt], ids: Tensor, gap: int, prior: Tensor, attack: str) -> list[int]:
    """The first `gap` tokens from what the next position has."""
    text = ids[: gap + 1]
    if attack == "states":
        row = flat(models[1].of(text))[gap]
        got = match_states(
            {gap: row}, lambda known, tails: flat(models[1].rows(known, tails)), prior, len(prior) ** gap,
            {gap: int(ids[gap])},
        )  # fmt: skip
        return list(got.tokens[:gap])
    plan = open_plan(2, gap)
    view = view_of(plan, [1], models[0].call, 0, text, models[0].of(text))
    loot = collude([(view, models[0])], prior, len(prior) ** gap, ["results"])
    return loot.text(gap, -1)


def shares(models: dict[int, RowsAt], ids: Tensor, budget: int) -> Iterator[Row]:
    """What the last CompNode knows of the text after searches within a budget, and after linear algebra."""
    everything = torch.arange(4096)
    for alpha in (2, 4, 8):
        for c in (1, 2, 4):
            plan = open_plan(alpha, c)
            view = view_of(plan, [alpha - 1], models[0].call, 0, ids, models[0].of(ids))
            held = len(view.tokens) / len(ids)
            for attack in ("results", "algebra"):
                start = time.perf_counter()
                loot = collude([(view, models[0])], everything, budget, [attack])
                yield {
                    "name": "share", "attack": attack, "alpha": alpha, "c": c, "tokens": len(ids), "budget": budget,
                    "held": held, "exact": exact(loot.text(len(ids), -1), ids.tolist()),
                    "candidates": loot.candidates.get(attack, 0), "seconds": time.perf_counter() - start,
                }  # fmt: skip


def noise(models: dict[int, RowsAt], ids: Tensor, count: int) -> Iterator[Row]:
    """Tokens that vocab-matching finds in rounded rows, each after the true text."""
    everything = torch.arange(4096)
    for layer in (1, 3, 5):
        rows = flat(models[layer].of(ids))
        right = dict.fromkeys(FORMATS, 0)
        for position in range(1, count + 1):
            seen = {form: rounded(rows[position : position + 1], form) for form in FORMATS}
            best = {form: (float("inf"), -1) for form in FORMATS}
            for tails in everything.split(CHUNK):
                made = flat(models[layer].rows(ids[:position].tolist(), tails.unsqueeze(1)))
                for form, row in seen.items():
                    distance = (made - row).abs_().sum(-1)
                    place = int(distance.argmin())
                    best[form] = min(best[form], (float(distance[place]), int(tails[place])))
            for form, (_, token) in best.items():
                right[form] += token == int(ids[position])
        for form in FORMATS:
            yield {"name": "rounding", "layer": layer, "format": form, "tokens": count, "right": right[form]}


def measure(path: Path, tiny: bool) -> None:
    """All rows, written as they come."""
    torch.set_num_threads(1)
    folder = demo_model()
    source = plaintext_model(folder)
    ids = tokenizer_of(folder)(TEXT, return_tensors="pt")["input_ids"][0][: 8 if tiny else 32]
    models = {layer: RowsAt(source, layer) for layer in (0, 1, 3, 5)}
    jobs = (
        gaps(models, ids, 5e3 if tiny else 2e8), shares(models, ids, 4096 if tiny else 4096**2),
        noise(models, ids, 1 if tiny else 12),
    )  # fmt: skip
    with progress_bar() as step, path.open("w") as file:
        for job in jobs:
            for row in job:
                row = {key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in row.items()}
                row["commit"] = commit()
                file.write(json.dumps(row) + "\n")
                file.flush()
                emit_json(row)
                step(str(row["name"]))


def plot(rows: list[Row], path: Path) -> None:
    """Left: seconds against gap. Middle: shares against c. Right: tokens found in rounded rows."""
    pyplot = load_pyplot()
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    colours = {64: "#55a868", 512: "#dd8452", 4096: "#4c72b0"}
    for (attack, line), (vocabulary, colour) in (
        (a, b) for a in (("states", "-"), ("results", "--")) for b in colours.items()
    ):
        points = [r for r in rows if (r["name"], r.get("attack"), r.get("vocabulary")) == ("gap", attack, vocabulary)]
        left.plot([r["gap"] for r in points], [r["seconds"] for r in points], line, color=colour)
        for run, face in ((True, colour), (False, "white")):
            some = [r for r in points if r["run"] is run]
            left.scatter([r["gap"] for r in some], [r["seconds"] for r in some], color=colour, facecolor=face, zorder=3)
        left.plot([], [], line, color=colour, label=f"{attack}, V = {vocabulary}")
    left.set(yscale="log", xlabel="unknown tokens in a gap", ylabel="seconds on one core", xticks=[1, 2, 3, 4])
    left.set_title("a search (hollow: not run, predicted)")
    left.legend(fontsize=7)
    for alpha, colour in zip((2, 4, 8), colours.values(), strict=True):
        for attack, line in (("results", "--"), ("algebra", "-")):
            points = [r for r in rows if (r["name"], r.get("attack"), r.get("alpha")) == ("share", attack, alpha)]
            middle.plot([r["c"] for r in points], [r["exact"] for r in points], line, marker="o", color=colour,
                        label=f"alpha = {alpha}, {'search' if attack == 'results' else 'algebra'}")  # fmt: skip
        points = [r for r in rows if (r["name"], r.get("attack"), r.get("alpha")) == ("share", "algebra", alpha)]
        middle.plot([r["c"] for r in points], [r["held"] for r in points], ":", color=colour)
    middle.set(ylim=(0, 1.05), xlabel="c (m = 1)", ylabel="tokens known to one CompNode", xticks=[1, 2, 4])
    middle.set_title("open results, V^2 a gap (dotted: held)")
    middle.legend(fontsize=7)
    for layer, colour in zip((1, 3, 5), colours.values(), strict=True):
        points = [r for r in rows if r["name"] == "rounding" and r["layer"] == layer]
        shown = [r["right"] / r["tokens"] for r in points]
        right.plot([r["format"] for r in points], shown, marker="o", color=colour, label=f"layer {layer}")
    right.set(ylim=(0, 1.05), ylabel="tokens found, V candidates each")
    right.tick_params(axis="x", rotation=60)
    right.set_title("vocab-matching of rounded rows")
    right.legend(fontsize=7)
    figure.savefig(path, dpi=75)
    pyplot.close(figure)


def main() -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=Path("cascade-attacks-search.jsonl"), help="JSON lines")
    parser.add_argument("--plot", type=Path, help="draw these rows instead of measuring")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.plot is None:
        measure(args.rows, args.tiny)
    else:
        plot([json.loads(line) for line in args.rows.read_text().splitlines()], args.plot)


FORMATS = ("float32", "float16", "bfloat16", "8 bits", "6 bits", "4 bits", "3 bits", "2 bits")
"""Number formats; those of some bits are integers scaled by each row's largest number."""


def rounded(rows: Tensor, form: str) -> Tensor:
    """`rows` [n, numbers] in one of `FORMATS`, as float32 again. Raises DomainError for another format."""
    if form not in FORMATS:
        raise DomainError(f"number format: got {form!r}; want {', '.join(FORMATS)}")
    if form.endswith("bits"):
        steps = 2 ** (int(form.split()[0]) - 1) - 1
        unit: Tensor = rows.abs().amax(-1, keepdim=True).clamp_min(1e-12) / steps
        return torch.round(rows / unit) * unit
    kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return rows.to(kinds[form]).float()


if __name__ == "__main__":
    main()
