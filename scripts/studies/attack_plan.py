"""Attack a sharding plan as its nodes could: what do some of them learn of a text, by which attack, at what cost?

Any causal model and text; by default the bundled model, whose every token takes seconds on one core::

    python scripts/studies/attack_plan.py --plan 4,8,2 --nodes 1  # one CompNode: all attacks
    python scripts/studies/attack_plan.py --partials open --nodes 2 --attacks algebra  # as in the paper
    python scripts/studies/attack_plan.py --partials open --plan 4,4,2 --nodes 1 --attacks results --budget 2e7
    python scripts/studies/attack_plan.py --partials open --plan 4,2,1 --nodes 0,6  # two nodes together
    python scripts/studies/attack_plan.py --partials open --plan 4,8,2 --nodes 1 --split 3  # after secret layers
    python scripts/studies/attack_plan.py --attacks likelihood --plan 4,4,1 --nodes 2 --split 1  # by other texts
    python scripts/studies/attack_plan.py --attacks likelihood --encoder --model FOLDER --plan 4,4,1 --nodes 2 --split 1
    python scripts/studies/attack_plan.py --states all --layer 3  # vocab-matching on all hidden states
    python scripts/studies/attack_plan.py --states permuted --layer 3 --tokens 8  # on permuted ones
    python scripts/studies/attack_plan.py --plan 4,1,1 --nodes 5 --attacks rows,states --prior 200 --budget 1e6

Prints what each attack costs at most before it starts. `--prior K` tries the K tokens that the model itself expects
most; `--known-prefix N` gives the attacker the first N tokens. `likelihood` prints where the true token stands among
all candidates, of a causal model after the true text so far; its texts are `--corpus`, by default the bundled one.
`--encoder --tiny` attacks a small encoder with random weights on random tokens.
"""

import argparse
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attacks.attacked import RowsAt, likely_tokens
from attacks.collusion import ATTACKS, Loot, bounds, collude
from attacks.likelihood import rank_anywhere, rank_next
from attacks.row_matching import flat
from attacks.scores import bleu, exact, rouge_l
from attacks.view import view_of
from attacks.vocab_matching import CHUNK, match_permuted, match_states
from private_llm_cli.commands.models import demo_model, plaintext_model, tokenizer_of
from private_llm_cli.commands.output import CONSOLE, NOTES, duration, emit_json, progress_bar
from torch import Tensor
from transformers import AutoModel, BertConfig

from private_llm.errors import ConfigError, PrivateLLMError
from private_llm.token_sharding import ShardingPlan

TEXT = (
    "The letter was written in the summer of the year before the war, and nobody had read it since. The old bridge "
    "over the river was built of stone, and the people of the town paid a toll to cross it every morning."
)


CORPUS = Path(str(resources.files("private_llm_hf").joinpath("data", "shakespeare.txt")))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="model folder or hub id (default: the bundled model)")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of the text that are used")
    parser.add_argument("--states", choices=("plan", "all", "permuted"), default="plan", help="what is seen")
    parser.add_argument("--plan", default="8,8,2", help="alpha,c,m[,rho]")
    parser.add_argument("--wire", choices=("float32", "float16"), default="float32")
    parser.add_argument("--partials", choices=("masked", "open"), default="masked")
    parser.add_argument("--nodes", default="0", help="endpoint numbers of nodes that share what they see: 0,1")
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--layer", type=int, default=1, help="whose rows are matched (from 0)")
    parser.add_argument("--split", type=int, default=0, help="nodes see nothing before this layer")
    parser.add_argument("--budget", type=float, default=1e5, help="candidates for each gap of a search at most")
    parser.add_argument("--prior", type=int, default=0, help="try only so many likely tokens (0: all)")
    parser.add_argument("--known-prefix", type=int, default=0, help="tokens that the attacker knows")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="likelihood: the attacker's own texts")
    parser.add_argument("--texts", type=int, default=800, help="likelihood: pieces of the corpus that it uses at most")
    parser.add_argument("--positions", type=int, default=6, help="likelihood: how many tokens it looks for")
    parser.add_argument("--encoder", action="store_true", help="likelihood: the model sees both directions")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few tokens and candidates: does it run?")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    """`0,1` to [0, 1]."""
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise ConfigError(f"got {text!r}; want numbers joined by commas")
    return [int(part) for part in text.split(",")]


def rate(model: RowsAt, vocabulary: Tensor, known: int) -> float:
    """Candidates a second of vocab-matching: one measured call after `known` tokens."""
    tails = vocabulary[:CHUNK].unsqueeze(1)
    model.rows([0] * known, tails[:8])
    start = time.perf_counter()
    made = flat(model.rows([0] * known, tails))
    (made - made[0]).abs().sum(-1).argmin()
    return len(tails) / (time.perf_counter() - start)


def whole(args: argparse.Namespace, model: RowsAt, ids: Tensor, vocabulary: Tensor) -> tuple[Loot, float]:
    """Vocab-matching on all states of a layer, in order or not."""
    rows = flat(model.of(ids))
    total = len(ids) * len(vocabulary)
    announce(
        {"states": [len(vocabulary)] * len(ids)}, int(args.budget), rate(model, vocabulary, len(ids) // 2), args.json
    )
    start = time.perf_counter()
    with progress_bar(total, quiet=args.json) as step:

        def advance(count: int) -> None:
            step("matching", advance=count)

        def states(text: Any, tails: Tensor) -> Tensor:  # noqa: ANN401 - a sequence of tokens
            return flat(model.rows(text, tails))

        if args.states == "permuted":
            order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
            found = match_permuted(rows[order], states, vocabulary, advance)
        else:
            found = match_states(dict(enumerate(rows)), states, vocabulary, int(args.budget), progress=advance)
    loot = Loot()
    loot.add(dict(enumerate(found.tokens)), "states", found.candidates)
    return loot, time.perf_counter() - start


def random_encoder() -> Any:  # noqa: ANN401 - a transformers model
    """A small BERT with random weights, whose values differ much from token to token."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, initializer_range=0.15,
    )  # fmt: skip
    return AutoModel.from_config(config).eval()


def likelihood(args: argparse.Namespace) -> None:
    """Rank the true token of some positions that a CompNode does not hold, after `--split` layers."""
    plan = ShardingPlan(*numbers(args.plan), accept_weak_plan=True, wire=args.wire)
    nodes, length = numbers(args.nodes), 16 if args.tiny else args.tokens
    if max(nodes) >= plan.alpha or args.partials != "masked":
        raise ConfigError(f"likelihood: want CompNodes, 0 to {plan.alpha - 1}, and masked results")
    count = min(args.texts, 300) if args.tiny else args.texts
    if args.encoder and args.tiny and not args.model:
        source = random_encoder()
        pieces = torch.from_numpy(np.random.default_rng(5).integers(5, 200, (count + 1, length)))
        ids, texts = pieces[0], pieces[1:]
    else:
        folder = args.model or demo_model()
        tokenizer = tokenizer_of(folder)
        source = (
            AutoModel.from_pretrained(folder, dtype=torch.float32).eval() if args.encoder else plaintext_model(folder)
        )
        ids = tokenizer(args.text, return_tensors="pt")["input_ids"][0][:length]
        corpus = args.corpus.read_text(encoding="utf-8")[: 8 * count * length]
        other = torch.tensor(tokenizer(corpus, add_special_tokens=False, verbose=False)["input_ids"])
        width = len(ids) - 1
        texts = other[: len(other) // width * width].view(-1, width)[:count]
        texts = torch.cat([ids[:1].expand(len(texts), 1), texts], 1)  # the token that every text begins with
    model = RowsAt(source, args.split)
    view = view_of(plan, nodes, model.call, model.layer, ids, model.of(ids))
    if args.encoder:
        vocabulary = torch.cat([texts.flatten(), ids]).unique()
        wanted = [p for p in range(1, len(ids)) if p not in view.rows]
    else:
        vocabulary = torch.arange(source.config.get_text_config().vocab_size)
        wanted = [p for p in range(1, max(view.rows)) if p not in view.rows]
    if args.prior or args.tiny:  # the true tokens are always candidates: ranks count those before them
        vocabulary = torch.cat([vocabulary[-(args.prior or 200) :], ids]).unique()
    ranks, start = {}, time.perf_counter()
    chosen = wanted[: 2 if args.tiny else args.positions]
    with progress_bar(len(chosen), quiet=args.json) as step:
        for position in chosen:
            if args.encoder:
                ranked = rank_anywhere(view, model, position, vocabulary, texts)
            else:
                ranked = rank_next(view, model, ids[:position].tolist(), vocabulary, texts)
            ranks[position] = 1 + ranked.tolist().index(int(ids[position]))
            step(f"position {position}")
    row = {
        "name": "likelihood", "plan": args.plan, "nodes": args.nodes, "split": args.split, "encoder": args.encoder,
        "tokens": len(ids), "vocabulary": len(vocabulary), "texts": len(texts),
        "unknown": sum(p not in view.rows for p in range(len(ids))), "rows": len({row for row, _ in view.results}),
        "ranks": ranks, "seconds": round(time.perf_counter() - start, 2),
    }  # fmt: skip
    if args.json:
        emit_json(row)
        return
    told = ", ".join(f"{rank} at {position}" for position, rank in ranks.items())
    CONSOLE.print(
        f"{row['rows']} rows, {row['unknown']} unknown tokens; rank of the true one among {len(vocabulary)}: {told}; "
        f"{duration(row['seconds'])}", highlight=False, markup=False,
    )  # fmt: skip


def announce(costs: dict[str, list[int]], budget: int, speed: float, quiet: bool) -> int:
    """Print what each attack needs before it starts; candidates within the budget."""
    within = 0
    for name, needed in costs.items():
        free = name in ("rows", "algebra", "totals")
        possible = [count for count in needed if free or count <= budget]
        within += sum(possible)
        if not quiet and needed:
            line = f"  {name}: {len(needed)} searches, {sum(needed):.3g} candidates in all, dearest {max(needed):.3g}"
            line += "" if len(possible) == len(needed) else f"; {len(needed) - len(possible)} beyond the budget"
            if name == "states":
                line += f"; about {duration(sum(possible) / speed)} for the rest ({speed:.0f} candidates a second)"
            CONSOLE.print(line, highlight=False, markup=False)
    return within


def sharded(args: argparse.Namespace, source: Any, ids: Tensor, vocabulary: Tensor) -> tuple[Loot, float]:  # noqa: ANN401
    """What nodes of a plan learn together."""
    plan = ShardingPlan(*numbers(args.plan), accept_weak_plan=True, wire=args.wire, partials=args.partials)
    nodes, attacks = numbers(args.nodes), args.attacks.split(",")
    if max(nodes) >= plan.nodes or not set(attacks) <= set(ATTACKS):
        raise ConfigError(f"want nodes from 0 to {plan.nodes - 1} and attacks among {', '.join(ATTACKS)}")
    layers = [args.split] if args.split else [0, args.layer]
    models = [RowsAt(source, layer) for layer in layers]
    known = {p: int(ids[p]) for p in range(args.known_prefix)}
    costs = bounds(plan, nodes, models[-1].call, len(ids), len(vocabulary), layers[0], sorted(known))
    if not args.json:
        names = " + ".join(plan.describe(node) for node in nodes)
        CONSOLE.print(
            f"{names} of plan {args.plan}, {len(ids)} tokens, V = {len(vocabulary)}; at most:", highlight=False
        )
    speed = rate(models[-1], vocabulary, len(ids) // 2)
    chosen = {name: costs[name] for name in attacks if name in costs}
    within = announce(chosen, int(args.budget), speed, args.json)
    start = time.perf_counter()
    with progress_bar(within, quiet=args.json) as step:
        seen = [(view_of(plan, nodes, model.call, model.layer, ids, model.of(ids)), model) for model in models]
        loot = collude(
            seen, vocabulary, int(args.budget), attacks, known, lambda count: step("trying candidates", advance=count)
        )
    return loot, time.perf_counter() - start


def main() -> None:
    """Run one attack and show what it found beside the truth."""
    args = parse()
    if args.attacks == "likelihood":
        likelihood(args)
        return
    if args.encoder:
        raise ConfigError("--encoder: searches need a causal model; want --attacks likelihood")
    folder = args.model or demo_model()
    source, tokenizer = plaintext_model(folder), tokenizer_of(folder)
    ids = tokenizer(args.text, return_tensors="pt")["input_ids"][0][: 6 if args.tiny else args.tokens]
    count = source.config.get_text_config().vocab_size
    wanted = 200 if args.tiny else args.prior
    vocabulary = likely_tokens(source, wanted) if wanted else torch.arange(count)
    if args.states == "plan":
        loot, seconds = sharded(args, source, ids, vocabulary)
    else:
        loot, seconds = whole(args, RowsAt(source, args.layer), ids, vocabulary)
    truth = ids.tolist()
    found = loot.text(len(truth), -1)
    words, guessed = ([tokenizer.decode([t]) if t >= 0 else "_" for t in text] for text in (truth, found))
    gained = [p for p in loot.tokens if loot.how[p] not in ("held", "known")]
    row = {
        "name": "attack", "states": args.states, "plan": args.plan, "nodes": args.nodes, "wire": args.wire,
        "partials": args.partials,
        "layer": args.layer, "split": args.split, "tokens": len(truth), "vocabulary": len(vocabulary),
        "budget": int(args.budget), "candidates": loot.candidates, "seconds": round(seconds, 2),
        "candidates_per_second": round(sum(loot.candidates.values()) / max(seconds, 1e-9)),
        "known_or_held": len(loot.tokens) - len(gained), "gained": len(gained),
        "exact": round(exact(found, truth), 4), "rouge_l": round(rouge_l(guessed, words), 4),
        "bleu": round(bleu(guessed, words), 4), "text": "".join(guessed),
    }  # fmt: skip
    if args.json:
        emit_json(row)
        return
    CONSOLE.print(f"true:  {''.join(words)}", highlight=False, markup=False)
    CONSOLE.print(f"found: {''.join(guessed)}", highlight=False, markup=False)
    CONSOLE.print(
        f"{row['known_or_held']} tokens held or known, {len(gained)} gained of {len(truth)}: exact {row['exact']:.2f}, "
        f"ROUGE-L {row['rouge_l']:.2f}, BLEU {row['bleu']:.2f}; {loot.candidates} candidates in {duration(seconds)}",
        highlight=False, markup=False,
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except PrivateLLMError as error:
        NOTES.print(f"attack_plan: {error}", highlight=False, markup=False)
        sys.exit(2)
