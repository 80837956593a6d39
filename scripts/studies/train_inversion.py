"""Train the learned attack on a sharding plan and say how much of unseen texts it recovers.

The attacker has the public model, knows the plan and sees what some nodes see of one or several layers. It starts
from the model itself, made to look in both directions, and learns to write the whole text (Cascade, sections 6.1,
6.2 and 6.4). Give it text of the kind that your users write, and a plan that you think of using::

    python scripts/studies/train_inversion.py --plan 8,8,2 --text a.txt b.txt --test unseen.txt --minutes 15
    python scripts/studies/train_inversion.py --model facebook/opt-125m --dataset NAME [CONFIG] --plan 8,8,2 4,4,1
    python scripts/studies/train_inversion.py --node attn --layer 3 ...     # any AttnNode, states after three layers
    python scripts/studies/train_inversion.py --node 0 1 2,5 --layer 0 ...  # CompNodes 0 and 1, AttnNode (2, 5)
    python scripts/studies/train_inversion.py --plot rows.jsonl rows.png    # draw what --out has collected
    python scripts/studies/train_inversion.py --tiny                        # a few seconds, from bundled text

With several plans one attacker is trained on all of them and tested on each. `--save` and `--start` hand an attacker
on to the next run, be it for another layer. One JSON row for each plan is printed and appended to `--out`.
It needs ``pip install private-llm[train]``.
"""

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import scripts_folder  # noqa: F401 - finds `bench`
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from attacks.inversion import Inverter, Observers, any_attn, any_comp, colluding, draw, guess, loss_of, recovery
from attacks.inversion_model import SeenRows, reader, reader_of
from bench.rows import provenance
from private_llm_cli.commands.plot import load_pyplot
from private_llm_hf.tools.texts import encode, load_texts, windows
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor
from train_demo_model import batches, divide
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from private_llm.token_sharding import ShardingPlan

Rows = Sequence[dict[str, Any]]

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52")
SCORES = (("rouge_l", "ROUGE-L, whole text"), ("unheld_exact", "exact tokens where not held"))
INTEGRATION = Path(__file__).resolve().parents[2] / "integrations/private_llm_hf"
TINY = {
    "text": [INTEGRATION / "data/shakespeare.txt"], "test": INTEGRATION / "data/heldout.txt", "steps": 8, "texts": 4,
    "length": 64, "batch": 4, "precision": "no", "plan": ["4,2,1", "8,8,2"], "threads": 1,
}  # fmt: skip


def observers_of(plan: str, nodes: list[str], front: int | None = None) -> Observers:
    """The command line's plan (alpha,c,m and the length of the first block's surplus) and nodes."""
    try:
        alpha, c, m = (int(part) for part in plan.split(","))
    except ValueError:
        raise SystemExit(f"--plan {plan}: want alpha,c,m such as 8,8,2") from None
    found = ShardingPlan(alpha, c, m, front=front, accept_weak_plan=True)
    if nodes in (["comp"], ["attn"]):
        return any_comp(found) if nodes == ["comp"] else any_attn(found)
    endpoints = []
    for node in nodes:
        try:
            numbers = [int(part) for part in node.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) == 1 and 0 <= numbers[0] < alpha:
            endpoints.append(numbers[0])
        elif len(numbers) == 2 and all(0 <= shard < found.beta for shard in numbers):
            endpoints.append(found.attn_endpoint(*numbers))
        else:
            raise SystemExit(
                f"--node {node}: want comp, attn, CompNodes 0 to {alpha - 1} of plan {plan}, or AttnNodes as j,k "
                f"with shards 0 to {found.beta - 1}"
            )
    return colluding(found, endpoints)


def fit(
    args: argparse.Namespace, accelerator: Accelerator, attacker: Inverter, seen: SeenRows, groups: list[Observers],
    source: Iterator[Tensor],
) -> tuple[int, float]:  # fmt: skip
    """Train for the asked steps or minutes; returns steps and the seconds spent in them."""
    optimizer = torch.optim.AdamW(attacker.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=args.decay)
    attacker, optimizer = accelerator.prepare(attacker, optimizer)
    chance = torch.Generator().manual_seed(args.seed)
    masks = [observers.masks(args.length) for observers in groups]
    step, seconds, budget, typical = 0, 0.0, 60 * args.minutes, math.inf
    with Progress(*COLUMNS, console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=1.0)
        while (part := step / args.steps if args.steps else seconds / budget) < 1:
            started = time.monotonic()
            for group in optimizer.param_groups:
                group["lr"] = args.rate * min(1.0, (part + 1e-3) / 0.03) * (1 - part)
            ids = next(source).to(accelerator.device)
            loss = loss_of(attacker(seen(ids), draw(masks, len(ids), chance).to(accelerator.device)), ids)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(attacker.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            # The cap keeps the time that the process was stopped in mid-step out of the schedule.
            spent = min(time.monotonic() - started, 4 * typical)
            typical = spent if math.isinf(typical) else 0.9 * typical + 0.1 * spent
            step, seconds = step + 1, seconds + spent
            bar.update(task, completed=part, description=f"step {step} loss {loss.item():.3f}")
    return step, seconds


@torch.no_grad()
def test(
    args: argparse.Namespace, attacker: Inverter, rows: Tensor, ids: Tensor, observers: Observers, common: int
) -> dict[str, Any]:
    """Scores of one plan: the sets of nodes take turns over the texts; the start token is not counted."""
    sets = observers.masks(args.length)
    order = torch.randperm(len(sets), generator=torch.Generator().manual_seed(args.seed))
    held = sets[order[torch.arange(len(ids)) % len(sets)]].to(ids.device)
    found = torch.cat([attacker(r, h).argmax(-1) for r, h in zip(rows.split(8), held.split(8), strict=True)])
    truth, held = ids[:, 1:], held[:, 1:]
    return {
        "held": round(float(held.double().mean()), 4),
        "attack": recovery(found[:, 1:], truth, held).to_dict(),
        "floor": recovery(guess(truth, held, common), truth, held).to_dict(),
    }


def starting_point(args: argparse.Namespace, model: PreTrainedModel, texts: Tensor) -> tuple[Inverter, SeenRows]:
    """The attacker before training: the model itself or --start, with an adapter for the asked layers."""
    attacker, before, after = reader(model), SeenRows(model, [0]), SeenRows(model, args.layer)
    if args.start:
        with safe_open(args.start, "pt") as file:
            layers = json.loads(file.metadata()["layers"])
        if layers != [0]:
            before = SeenRows(model, layers)
            attacker = reader_of(attacker, SeenRows(model, [0]), before, texts[:1])
        load_model(attacker, args.start)
    if after.layers != before.layers:
        attacker = reader_of(attacker, before, after, texts)
    return attacker, after


def plot(rows: Rows, path: Path) -> None:
    """Four columns: c and alpha at layer 0 and layer 1, layers, AttnNodes by m. Dashed: the guess without learning."""
    pyplot = load_pyplot()
    # The picture is of attackers that were trained on several plans at once; a note marks rows of another kind.
    rows = [row for row in rows if row["name"] == "inversion" and not row["note"]]
    comp = [row for row in rows if row["node"] == "any CompNode"]
    panels: list[tuple[str, Rows, Callable[[Any], Any], Callable[[Any], str], str]] = [
        (f"CompNode, layer {layer}", [r for r in comp if r["layers"] == [layer]], _of("alpha"), _named("c"), "alpha")
        for layer in (0, 1)
    ]
    # The paper's Table 9 has plans with c = alpha.
    square = sorted(
        (r for r in comp if r["plan"]["c"] == r["plan"]["alpha"]), key=lambda r: (len(r["layers"]), r["layers"])
    )
    panels.append(("CompNode, by layer", square, _layers, _named("alpha", "c"), "layer"))
    attn = [r for r in rows if r["node"] == "any AttnNode"]
    panels.append(("AttnNode, by m", attn, _of("m"), _named("alpha", "c"), "m"))
    figure, axes = pyplot.subplots(2, 4, figsize=(13, 6), sharey="row", layout="constrained", squeeze=False)
    for line, (score, label) in enumerate(SCORES):
        for place, (title, chosen, across, name, unit) in zip(axes[line], panels, strict=True):
            _panel(place, chosen, across, name, score)
            place.set_title(title if line == 0 else "")
            place.set_xlabel(unit)
            place.set_ylim(bottom=0)
        axes[line][0].set_ylabel(label)
    figure.supxlabel("points: the learned attack; dashed: held tokens, elsewhere the commonest token", fontsize=9)
    figure.savefig(path, dpi=75)
    pyplot.close(figure)


def _panel(axes: Any, rows: Rows, across: Callable[[Any], Any], name: Callable[[Any], str], score: str) -> None:  # noqa: ANN401 - matplotlib is not typed
    for colour, line in zip(COLOURS, sorted({name(row) for row in rows}), strict=False):
        chosen = [row for row in rows if name(row) == line]
        if not isinstance(across(chosen[0]), str):
            chosen.sort(key=across)
        places = [across(row) for row in chosen]
        axes.plot(places, [row["attack"][score] for row in chosen], "o-", color=colour, label=line)
        axes.plot(places, [row["floor"][score] for row in chosen], "--", color=colour, linewidth=1)
    if rows:
        axes.set_xticks(list(dict.fromkeys(across(row) for row in rows)))
        axes.legend(fontsize=8)


def _of(key: str) -> Callable[[Any], Any]:
    return lambda row: row["plan"][key]


def _layers(row: Any) -> str:  # noqa: ANN401 - a row of JSON
    return "+".join(str(layer) for layer in row["layers"])


def _named(*keys: str) -> Callable[[Any], str]:
    return lambda row: ", ".join(f"{key} = {row['plan'][key]}" for key in keys)


def main(args: argparse.Namespace) -> None:
    """Train and test as the command line asks."""
    if args.plot:
        plot([json.loads(line) for line in args.plot[0].read_text().splitlines()], args.plot[1])
        print(f"Wrote {args.plot[1]}.")
        return
    if not args.text and not args.dataset:
        raise SystemExit("No text to train on: give --text FILE ..., --dataset NAME, or --tiny.")
    groups = [observers_of(plan, args.node, args.front) for plan in args.plan]
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    set_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.precision)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval().to(accelerator.device)
    bos = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    texts = [encode(tokenizer, text) for text in load_texts(args.text, args.dataset)["text"]]
    train_ids, held_out = divide(texts, tokenizer.eos_token_id)
    if args.test:
        held_out = encode(tokenizer, args.test.read_text(encoding="utf-8"))
    tests = windows(held_out, args.length, bos)[: args.texts].to(accelerator.device)
    if len(tests) < args.texts:
        raise SystemExit(f"{len(tests)} unseen texts of {args.length} tokens; want {args.texts}: give a longer --test.")
    source = batches(train_ids, args.length, args.batch, bos, args.seed)
    fitting = torch.cat([next(source) for _ in range(max(1, 64 // args.batch))]).to(accelerator.device)
    attacker, seen = starting_point(args, model, fitting)
    print(f"{len(train_ids)} training tokens; {len(tests)} unseen texts of {args.length} tokens")
    steps, seconds = fit(args, accelerator, attacker, seen, groups, source) if args.steps != 0 else (0, 0.0)
    if args.save:
        save_model(attacker, str(args.save), metadata={"layers": json.dumps(seen.layers)})
    rows, common = seen(tests), Counter(train_ids.tolist()).most_common(1)[0][0]
    for observers in groups:
        line = json.dumps({
            "name": "inversion", "model": Path(args.model).name, "layers": seen.layers, "node": observers.name,
            "plan": {key: asdict(observers.plan)[key] for key in ("alpha", "c", "m", "front")}, "length": args.length,
            "texts": args.texts, **test(args, attacker, rows, tests, observers, common), "note": args.note,
            "trained_on": len(groups), "started_from": args.start and args.start.stem, "steps": steps,
            "batch": args.batch, "seconds": round(seconds), "seed": args.seed, "threads": torch.get_num_threads(),
            **provenance(),
        })  # fmt: skip
        print(line, flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


COLUMNS = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--model", default=str(INTEGRATION / "demo_model"), help="a causal model's folder or name (default: bundled)")
    add("--plan", nargs="+", default=["8,8,2"], metavar="ALPHA,C,M", help="plans to train on and to test")
    add("--front", type=int, help="positions that the first block has more (default: the plan's own; the paper: 0)")
    add("--node", nargs="+", default=["comp"], help="comp (any CompNode), attn (any AttnNode), or nodes that collude")
    add("--layer", type=int, nargs="+", default=[1], help="states after this many layers; 0: tokens; several: together")
    add("--text", type=Path, nargs="+", metavar="FILE", help="text files; one listed twice counts twice")
    add("--dataset", nargs="+", metavar="NAME", help="a `datasets` name, and maybe the configuration's")
    add("--test", type=Path, metavar="FILE", help="unseen text (default: every 32nd piece of the training text)")
    add("--texts", type=int, default=96, help="how many unseen texts are attacked")
    add("--minutes", type=float, default=15.0, help="time to spend inside training steps")
    add("--steps", type=int, help="steps instead of minutes; 0: test only")
    add("--start", type=Path, metavar="FILE", help="go on from a saved attacker, of whatever layer")
    add("--save", type=Path, metavar="FILE", help="where the trained attacker goes (safetensors)")
    add("--out", type=Path, metavar="FILE", help="append the rows to this file")
    add("--note", default="", help="a remark for the rows")
    add("--plot", type=Path, nargs=2, metavar=("ROWS", "PICTURE"), help="draw rows instead")
    add("--tiny", action="store_true", help="a few steps on bundled text")
    add("--cpu", action="store_true", help="do not use an accelerator")
    add("--precision", default="bf16", choices=["no", "bf16"], help="autocast of the matrix products")
    add("--threads", type=int, help="torch threads (default: torch's own choice)")
    add("--rate", type=float, default=1.5e-3, help="peak learning rate (the default suits the bundled model)")
    for name, default in {"length": 256, "batch": 8, "decay": 0.01, "seed": 0}.items():
        add(f"--{name}", type=type(default), default=default)
    if parser.parse_args(argv).tiny:
        parser.set_defaults(**TINY)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
