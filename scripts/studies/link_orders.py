"""What an adversary learns from opened patterns of active neurons, in one secret order and in fresh ones.

    python scripts/studies/link_orders.py                      # the bundled model, all layers: a table
    python scripts/studies/link_orders.py --plot picture.png   # and a picture: neurons identified against known inputs
    python scripts/studies/link_orders.py --json               # rows
    python scripts/studies/link_orders.py --tiny               # a few seconds

The adversary sees what is opened and knows the first inputs, an input being one position of a text (one pattern a
layer). Then other texts come, of which it guesses the activity and tells which of two was run. With `fresh` orders it
forces a match, because no column fits. Orders are drawn here; that the protocols open just these bits is shown in
`tests/system/test_linked_orders.py`. The attack: `linked_orders.py`.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from linked_orders import (
    UNKNOWN,
    count_differences,
    match_positions,
    pattern_differences,
    read_patterns,
    told,
    within_budget,
)
from private_llm_cli.commands.models import demo_model, plaintext_model, tokenizer_of
from private_llm_cli.commands.output import emit_json, emit_table
from private_llm_cli.commands.plot import load_pyplot
from private_llm_hf.sparsity.sites import Site, find_sites
from private_llm_hf.tools.texts import windows
from torch import Tensor

DATA = Path(__file__).resolve().parents[2] / "integrations/private_llm_hf/data"
LENGTH = 64
"""Positions of a text; the start token comes before them and is no input."""
KNOWN = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Row:
    """One layer after so many known inputs.

    order: one for all inputs, or a fresh one for each. opened: active neurons, or a budget (as many neurons for every
    input as the busiest one needs). identified: share of neurons whose position is found, and rightly. wrong: found,
    but another's. named: share of the set bits of unknown texts that are read as set; false: share of those read as
    set that are not. told: share of pairs of texts told apart by their patterns, a tie counted as half; by_count: by
    numbers of set bits alone.
    """

    layer: int
    order: str
    opened: str
    known: int
    identified: float
    wrong: float
    named: float
    false: float
    told: float
    by_count: float


def before_activation(model: Any, sites: Sequence[Site], rows: Tensor) -> dict[int, Tensor]:  # noqa: ANN401 - a transformers model
    """By layer, what the activation receives for rows [N, T] that begin with a start token: [N (T - 1), neurons]."""
    seen: dict[int, list[Tensor]] = {site.layer: [] for site in sites}
    with ExitStack() as stack, torch.no_grad():
        for site in sites:

            def keep(_: Any, __: Any, made: Tensor, to: list[Tensor] = seen[site.layer]) -> None:  # noqa: ANN401 - a hook
                to.append(made.view(-1, rows.shape[1], made.shape[-1])[:, 1:].flatten(0, 1))

            stack.callback(model.get_submodule(site.readers[0]).register_forward_hook(keep).remove)
        for some in rows.split(16):
            model(input_ids=some)
    return {layer: torch.cat(parts) for layer, parts in seen.items()}


def bundled(length: int = LENGTH) -> tuple[Any, list[Site], Tensor, Tensor]:
    """The bundled model, its feed-forward blocks, and rows of two texts: those known to the adversary, and others."""
    model, tokenizer = plaintext_model(demo_model()), tokenizer_of(demo_model())
    texts = [(DATA / name).read_text(encoding="utf-8") for name in ("shakespeare.txt", "heldout.txt")]
    ids = [torch.tensor(tokenizer(t, add_special_tokens=False, verbose=False)["input_ids"]) for t in texts]
    known, unknown = (windows(i, length + 1, tokenizer.bos_token_id) for i in ids)
    return model, find_sites(model, {"input_ids": known[:1, :4]}, ("ffn",)), known, unknown


def shuffled(active: Tensor, fresh: bool, chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Patterns as they are opened, and the neuron at each position: in one order for all, or in one for each."""
    count = active.shape[1]
    if not fresh:
        order = torch.randperm(count, generator=chance)
        return active[:, order], order
    orders = torch.stack([torch.randperm(count, generator=chance) for _ in range(len(active))])
    return active.gather(1, orders), orders[-1]


def share_told(differences: Sequence[Sequence[int]]) -> float:
    """How often the first of two candidates is told to be the one that was run; a tie counts as half."""
    names = [told(pair) for pair in differences]
    return sum(0.5 if name is None else float(name == 0) for name in names) / len(names)


def attack(
    layer: int, kind: str, known: Tensor, texts: Sequence[Tensor], counts: Sequence[int], fresh: bool
) -> list[Row]:
    """One row for each number of known inputs: what is opened of these, bool [inputs, n], and of unknown texts."""
    chance = torch.Generator().manual_seed(layer)
    opened, order = shuffled(torch.cat([known, *texts]), fresh, chance)
    later = opened[len(known) :].split([len(text) for text in texts])
    pairs = [(i, [texts[i], texts[j]]) for i in range(len(texts)) for j in range(len(texts)) if i != j]
    truth = torch.cat(list(texts))
    by_count = share_told([count_differences(later[i], two) for i, two in pairs])
    found = []
    for count in counts:
        places = match_positions(known[:count], opened[:count], slack=count if fresh else 0)
        right, matched = places == order, places != UNKNOWN
        usual = known[:count].float().mean(0) > 0.5
        read = torch.cat([read_patterns(places, bits, usual) for bits in later])
        found.append(Row(
            layer, "fresh" if fresh else "one", kind, count, float(right.float().mean()),
            float((matched & ~right).float().mean()), float((read & truth).sum() / truth.sum()),
            float((read & ~truth).sum() / read.sum().clamp(min=1)),
            share_told([pattern_differences(places, later[i], two) for i, two in pairs]), by_count,
        ))  # fmt: skip
    return found


def attacks(layer: int, known: Tensor, texts: Sequence[Tensor], counts: Sequence[int]) -> list[Row]:
    """All rows of a layer, from values before the activation: of known inputs, [inputs, n], and of each text."""
    budget = max(int((values > 0).sum(1).max()) for values in (known, *texts))
    rows = []
    for fresh in (False, True):
        rows += attack(layer, "active", known > 0, [text > 0 for text in texts], counts, fresh)
        level = [within_budget(values, budget) for values in (known, *texts)]
        rows += attack(layer, "budget", level[0], level[1:], counts[-1:], fresh)
    return rows


def plot(rows: Sequence[Row], path: Path) -> None:
    """Neurons identified against known inputs, a line for each layer; dashed: in fresh orders."""
    pyplot = load_pyplot()
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for layer in sorted({row.layer for row in rows}):
        for order, line in (("one", "o-"), ("fresh", "--")):
            points = [row for row in rows if (row.layer, row.order, row.opened) == (layer, order, "active")]
            label = f"layer {layer}" if order == "one" else None
            shares = [100 * row.identified for row in points]
            axes.plot([row.known for row in points], shares, line, color=f"C{layer}", label=label, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="known inputs (positions of a text)", ylabel="neurons identified, %", ylim=(-2, 102))
    axes.set_title("one secret order (dashed: a fresh one for each)", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main() -> None:
    """Run the attack on every layer of the bundled model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=16, help="unknown texts of 64 positions (default 16)")
    parser.add_argument("--plot", type=Path, help="write a picture here")
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    parser.add_argument("--tiny", action="store_true", help="two layers, few inputs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, sites, known, unknown = bundled()
    if options.tiny:
        sites, known, unknown = sites[:2], known[:4], unknown[:3]
    unknown = unknown[: options.texts]
    before, after = before_activation(model, sites, known), before_activation(model, sites, unknown)
    rows = []
    for site in sites:
        values, texts = before[site.layer], after[site.layer].split(LENGTH)
        rows += attacks(site.layer, values, texts, [count for count in KNOWN if count <= len(values)])
    if options.json:
        for row in rows:
            emit_json(asdict(row))
    else:
        shares = ("identified", "wrong", "named", "false", "told", "by_count")
        cells = [
            [f"{r.layer}, {r.order}, {r.opened}", r.known, *(f"{100 * getattr(r, s):.1f}" for s in shares)]
            for r in rows
        ]
        emit_table("Linked orders, shares in %", ["layer, order, opened", "known", *shares], cells)
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
