"""What cache policies do to a plaintext model's answers on long prompts, by budget, and what attention itself shows.

    python scripts/studies/kv_accuracy.py --lengths 1024 2048 --tasks passkey key_value copy text
    python scripts/studies/kv_accuracy.py --parts levels sharing --lengths 2048 --prompts 4
    python scripts/studies/kv_accuracy.py --parts --out ROWS --plot docs/studies/kv-accuracy --page PAGE
    python scripts/studies/kv_accuracy.py --tiny

Rows are added to --out, one JSON object a line. Parts: scores (every policy at every budget), levels (structures of
clusters), sharing (neighbouring layers), observed (which queries decide what stays), likeness (which clusters each
similarity finds), commonality (equation 1 of arXiv 2501.06807). The model is SmolLM2-135M-Instruct or --model.

A score is how many of an answer's tokens, given one by one, the model predicts, without the first, which the prompt
predicts whatever the policy. `whole`: answers of which it predicts every token. Task "text" is a play that goes on:
there `same` is how often the most likely token is that of the full cache.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import scripts_folder  # noqa: F401 - finds `bench`
import torch
from at_budget import levels_text, mpcache_at, policies_at
from bench.rows import commit
from compare_approximations import into_page
from kv_accuracy_plots import draw
from likeness import commonality, coverage
from long_tasks import TASKS, make_prompts
from private_llm_cli.commands.output import progress_bar
from private_llm_hf.models import smollm2
from private_llm_hf.tools.texts import token_ids
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from private_llm.kv_cache.policies.papers import MPCacheConfig
from private_llm.kv_cache.policies.policy import KEEP_ALL, CachePolicy, Level

sys.path.append(str(Path(__file__).resolve().parents[1]))
from long_context.budget import Forced, Prefill, forced, record
from long_context.plain_attention import policy_attention
from long_context.text_windows import text_windows

DEMO = Path(__file__).resolve().parents[2] / "integrations/private_llm_hf/demo_model"
PARTS = ("scores", "levels", "sharing", "observed", "likeness", "commonality")
BUDGETS = (0.05, 0.1, 0.2, 0.3, 0.5)
LEVELS = tuple(((large, first), (16, second)) for large in (32, 64) for first, second in
               ((0.9, 0.22), (0.7, 0.28), (0.5, 0.40), (0.3, 0.67)))  # fmt: skip
"""Those of the paper's table 6: a fifth of the clusters is attended to."""
ALPHAS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0)
CONTINUATION = 48
QUERIES = 32
"""Last queries of a prompt that stand for decode steps."""


@dataclass(frozen=True, eq=False)
class Question:
    """Prompts of one task and length, and the tokens that should follow. counts: bool [B, n], which are scored."""

    task: str
    prefill: Prefill
    answers: Tensor
    counts: Tensor
    cached: list[Forced] = field(default_factory=list)

    def full(self, model: Any) -> Forced:  # noqa: ANN401
        """What the full cache predicts; remembered."""
        if not self.cached:
            self.cached.append(forced(model, self.prefill, KEEP_ALL, self.answers))
        return self.cached[0]


def questions(model: Any, tokenizer: Any, args: argparse.Namespace, length: int) -> Iterator[Question]:  # noqa: ANN401
    """One batch a task."""
    for task in args.tasks:
        if task == "text":
            drawn = text_windows(tokenizer, length, args.continuation, args.prompts)
            prompts, given = [window.prompt for window in drawn], [window.continuation for window in drawn]
        else:
            made = make_prompts(task, tokenizer, length, args.prompts, args.seed)
            prompts, given = [one.ids for one in made], [token_ids(tokenizer, f" {one.answer}") for one in made]
        longest = max(map(len, given))
        answers = torch.tensor([[*one, *(longest - len(one)) * (0,)] for one in given])
        counts = torch.tensor([[0 < at < len(one) for at in range(longest)] for one in given])
        yield Question(task, record(model, input_ids=torch.tensor(prompts)), answers, counts)


def measured(model: Any, question: Question, policies: dict[str, CachePolicy], about: dict[str, Any]) -> Iterator[dict]:  # noqa: ANN401
    """A row for each policy."""
    full = question.full(model)
    for name, policy in policies.items():
        started = time.perf_counter()
        found = full if policy == KEEP_ALL else forced(model, question.prefill, policy, question.answers)
        right, counts = found.best == question.answers, question.counts
        yield {
            **about,
            "task": question.task, "length": question.prefill.length, "prompts": len(right), "policy": name,
            "settings": policy.to_dict(),
            "score": round(float(right[counts].float().mean()), 4),
            "whole": round(float((right | ~counts).all(1).float().mean()), 4),
            "same": round(float((found.best == full.best)[counts].float().mean()), 4),
            "loss": round(found.mean_loss(counts), 4),
            "attended": round(found.attended, 4), "held": round(found.held, 4),
            "seconds": round(time.perf_counter() - started, 2),
        }  # fmt: skip


def variants(budget: float, length: int) -> dict[str, CachePolicy]:
    """MPCache without static eviction; with one decided, as SnapKV's, by the last `QUERIES` queries, smoothed; and with
    the first tokens always attended to.
    """
    base = MPCacheConfig.paper(gamma=MPCacheConfig.gamma, least=40)
    return {
        "mpcache-all-kept": mpcache_at(budget, length, MPCacheConfig.paper(gamma=1)),
        "mpcache-pooled": mpcache_at(budget, length, replace(base, observed=QUERIES, pool=7)),
        "mpcache-first-4": mpcache_at(budget, length, replace(base, first=4)),
    }


def swept(part: str, length: int, budgets: Sequence[float]) -> Iterator[tuple[dict[str, Any], dict[str, CachePolicy]]]:
    """What a part compares: facts of its rows, and policies by name."""
    if part == "scores":
        yield {"budget": 1.0}, {"full": KEEP_ALL}
        for budget in budgets:
            if budget * length > 41:
                yield {"budget": budget}, {**policies_at(budget, length), **variants(budget, length)}
    if part == "levels":
        for levels in LEVELS:
            made = MPCacheConfig.paper(gamma=0.6, levels=tuple(Level(*level) for level in levels))
            yield {"levels": levels_text(made.selection)}, {"mpcache": made}
        yield {"levels": "-"}, {"mpcache": MPCacheConfig.paper(gamma=0.6, levels=())}
    if part == "sharing":
        for layers in (1, 2, 3, 4, 6):
            both = mpcache_at(0.2, length)
            static = MPCacheConfig.paper(gamma=0.2, levels=())
            dynamic = mpcache_at(0.2, length, MPCacheConfig.paper(gamma=1, levels=()))
            found = {"both": both, "entries": static, "clusters": dynamic}
            shared = {name: replace(policy, shared_layers=layers) for name, policy in found.items()}
            yield {"layers": layers}, dict(shared)
    if part == "observed":
        for observed in (0.5, 0.2, 0.1, 0.05, 0.02, 0.01):
            for pool in (1, 7):
                made = MPCacheConfig.paper(gamma=0.3, observed=observed, pool=pool, levels=(), shared_layers=1)
                yield {"observed": observed, "pool": pool}, {"static": made}


def seen(part: str, question: Question, about: dict[str, Any], size: int) -> Iterator[dict]:
    """Rows about attention itself."""
    about = {**about, "task": question.task, "length": question.prefill.length}
    queries = min(QUERIES, question.prefill.length)
    if part == "likeness":
        for kept in (0.1, 0.2):
            by_layer = [coverage(call, queries, size, kept, ALPHAS) for call in question.prefill.calls]
            for name in by_layer[0]:
                values = [round(one[name], 4) for one in by_layer]
                yield {**about, "size": size, "kept": kept, "similarity": name, "coverage": values}
    if part == "commonality":
        for neighbours in range(1, min(6, len(question.prefill.calls))):
            found = commonality(question.prefill, queries, 0.2, neighbours)
            values = [[round(float(head), 4) for head in layer] for layer in found]
            yield {**about, "kept": 0.2, "neighbours": neighbours, "by_layer_and_head": values}


def run(args: argparse.Namespace) -> None:
    """All rows that were asked for, written as they come."""
    folder = DEMO if args.tiny else (args.model or smollm2.folder())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval()
    name = args.model or ("demo" if args.tiny else smollm2.NAME)
    about = {"model": str(name), "dtype": args.dtype, "seed": args.seed}
    total = len(args.lengths) * len(args.tasks) * (len(args.parts) + 1)
    with policy_attention(model), args.out.open("a") as out, progress_bar(total) as advance:
        for length in args.lengths:
            for question in questions(model, tokenizer, args, length):
                advance()
                for part in args.parts:
                    facts = {**about, "part": part, "commit": commit()}
                    for more, found in swept(part, length, args.budgets):
                        policies = {name: one for name, one in found.items() if name not in args.without}
                        for row in measured(model, question, policies, {**facts, **more}):
                            print(json.dumps(row), file=out, flush=True)
                    for row in seen(part, question, facts, 16 if length >= 512 else 4):
                        print(json.dumps(row), file=out, flush=True)
                    advance()


def main() -> None:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=["scores"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048])
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, "text"], default=[*TASKS, "text"])
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS)
    parser.add_argument("--without", nargs="*", default=[], help="policies to leave out: h2o counts all attention")
    parser.add_argument("--prompts", type=int, default=6, help="of each task and length, read in one batch")
    parser.add_argument("--continuation", type=int, default=CONTINUATION, help="tokens of the task text")
    parser.add_argument("--model", help="a folder; default SmolLM2-135M-Instruct from its package")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("kv-accuracy.jsonl"))
    parser.add_argument("--plot", type=Path, help="PREFIX-*.png of all rows in --out, and tables on stdout")
    parser.add_argument("--page", type=Path, help="with --plot: a page whose marked part becomes the table of scores")
    parser.add_argument(
        "--tiny", action="store_true", help="the bundled demo model, prompts of 200 tokens: does it run?"
    )
    args = parser.parse_args()
    if args.tiny:
        args.parts, args.lengths, args.tasks, args.prompts = PARTS, [200], ["text"], 2
        args.budgets, args.continuation, args.dtype, args.plot = [0.3], 4, "float32", args.plot or Path("tiny")
    if args.parts:
        run(args)
    if args.plot:
        tables = draw(args.out, args.plot)
        if args.page:
            args.page.write_text(into_page(args.page.read_text(), "tables", tables["scores"].rstrip("\n")))
        sys.stdout.write("\n".join(tables.values()))
    else:
        print(f"rows in {args.out}")


if __name__ == "__main__":
    main()
