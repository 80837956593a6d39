"""How many tokens a pass gives with different drafts, in plaintext: no parties, the same loop at the client.

    python scripts/studies/compare_drafts.py --model smollm2 --draft my_draft  (scripts/train_draft.py makes drafts)
    python scripts/studies/compare_drafts.py --tiny                            in seconds, with the bundled model

One JSON row for each way: what drafts, paths, drafted tokens, greedy or sampled at temperature 1; tokens a pass
(the prompt's pass counted), tokens read in each further pass, and for fixed counts the share of texts that ended early.
Prompts are those of the bundled `prompts.txt` or of `--prompts`, one a line, none of which a draft was trained on; chat
models are asked them as a user's turn.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from private_llm_cli.commands.models import demo_model, quiet, smollm2_model
from private_llm_hf import FixedCounts, SpeculationConfig
from private_llm_hf.client.speculative_loop import decoding
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

DATA = Path(__file__).resolve().parents[2] / "integrations/private_llm_hf/data"
SHAPES = ((1, 4), (1, 2), (1, 6), (1, 8), (2, 4), (2, 6), (4, 4), (4, 6), (8, 6))
FIXED = (FixedCounts(2, 12, 4), FixedCounts(2, 16, 8), FixedCounts(3, 16, 8))


def shape(text: str) -> tuple[int, int]:
    """Paths and drafted tokens of `4x6`."""
    paths, length = text.split("x")
    return int(paths), int(length)


def ways(
    draft: str | None, wanted: list[str], shapes: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, SpeculationConfig, bool]]:
    """(name of the draft, settings, whether to sample)."""
    sources: dict[str, dict[str, Any]] = {"lookup": {}}
    if draft is not None:
        sources |= {"model": {"draft": draft, "look_up": False}, "both": {"draft": draft}}
    for name, source in sources.items():
        if name not in wanted:
            continue
        for paths, length in shapes:
            yield name, SpeculationConfig(**source, paths=paths, length=length), False
        yield name, SpeculationConfig(**source, paths=shapes[0][0], length=shapes[0][1]), True
        for counts in FIXED:
            yield name, SpeculationConfig(**source, fixed_counts=counts), False


def asked(tokenizer: Any, path: Path, count: int) -> list[Tensor]:  # noqa: ANN401 - transformers' own types
    """Prompts as ids [1, n]."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines()[:count]:
        if tokenizer.chat_template is None:
            found.append(tokenizer(line, return_tensors="pt")["input_ids"])
        else:
            turn = [{"role": "user", "content": line}]
            given = tokenizer.apply_chat_template(
                turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            found.append(given["input_ids"])
    return found


class Counted:
    """Calls of a model while this is entered."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.passes = self.read = 0
        self._handle = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: object, __: object, given: dict[str, Any]) -> None:
        self.passes += 1
        self.read += given["input_ids"].numel()

    def __enter__(self) -> "Counted":
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows, one for each way."""
    folder = smollm2_model() if args.model == "smollm2" else args.model or demo_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = asked(tokenizer, args.prompts, args.count)
    limits = {"max_new_tokens": args.new, "pad_token_id": 0}
    greedy = [model.generate(ids, do_sample=False, **limits) for ids in prompts]
    every = list(ways(args.draft, args.drafts, args.shapes))
    for name, config, sample in track(every[:: args.step], "ways", console=Console(stderr=True)):
        torch.manual_seed(0)
        new, short, equal = 0, 0, True
        with Counted(model) as counted:
            for ids, want in zip(prompts, greedy, strict=True):
                how = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
                made = model.generate(ids, custom_generate=decoding(config, None), **how, **limits)
                new += made.shape[1] - ids.shape[1]
                short += made.shape[1] < want.shape[1]
                equal = equal and torch.equal(made, want[:, : made.shape[1]])
        counts = config.fixed_counts
        yield {
            "name": "drafts", "model": args.model or "demo", "draft": name, "sampled": sample, "paths": config.paths,
            "length": config.length, "advance": None if counts is None else counts.advance,
            "window": None if counts is None else counts.window, "reserve": None if counts is None else counts.reserve,
            "prompts": len(prompts), "new_tokens": new, "passes": counted.passes,
            "tokens_per_pass": round(new / counted.passes, 3),
            "tokens_read": round((counted.read - sum(ids.shape[1] for ids in prompts)) / counted.passes, 1),
            "ended_early": None if counts is None else short / len(prompts), "equal": None if sample else equal,
        }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, print; 1 if a greedy text is not the plaintext model's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder of a model, or smollm2 (default: the bundled one)")
    parser.add_argument("--draft", default=None, help="folder of a draft (default: look-ups only)")
    parser.add_argument("--prompts", type=Path, default=DATA / "prompts.txt")
    parser.add_argument("--count", type=int, default=20, help="prompts")
    parser.add_argument("--new", type=int, default=64, help="tokens of each text, at most")
    parser.add_argument("--drafts", nargs="+", default=["lookup", "model", "both"], help="of these three")
    parser.add_argument("--shapes", nargs="+", type=shape, default=SHAPES, help="paths x drafted tokens, such as 4x6")
    parser.add_argument("--step", type=int, default=1, help="only every so many ways")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    if args.tiny:
        args.count, args.new, args.step = 2, 8, 6
    quiet()
    logging.set_verbosity_error()
    rows = []
    for row in measure(args):
        print(json.dumps(row), flush=True)
        rows.append(row)
    return 0 if all(row["equal"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
