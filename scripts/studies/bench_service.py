"""Tokens a second of a party service that serves 1, 2, 4 and 8 sessions at a time, whose steps share their passes.

python scripts/studies/bench_service.py --latency 1  the bundled model, parties as processes, 1 ms between them
python scripts/studies/bench_service.py --model FOLDER --new 8  another model
python scripts/studies/bench_service.py --planned --sessions 1  each text prepared before it is asked for
python scripts/studies/bench_service.py --tiny                  in seconds

Every session generates the same number of tokens, with a prompt of its own; tokens a second count all sessions, from
the first request to the last answer, prompts included. One JSON row for each number of sessions; `ratio` is to one. A
message between parties leaves `--latency` later than it was sent; clients are as near as this machine allows. With
`--planned` the helping party's part is done before the clock starts (`seconds_preprocessing`, `stored_bytes`).
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import scripts_folder  # noqa: F401 - finds `bench`
from bench.rows import provenance
from delayed_links import parties_apart
from private_llm_cli.commands.models import demo_model, quiet
from private_llm_hf import AutoPrivateModelForCausalLM, GeneratePlan
from private_llm_hf.api import share_checkpoint
from rich.console import Console
from rich.progress import track
from transformers import AutoTokenizer

from private_llm.config import PrivateConfig
from private_llm.kernels.parallel import threads_per_party

PROMPTS = (
    "The river runs along the valley and", "Once upon a time there was a king who", "A law is a rule that the",
    "She said that the answer was", "In the year of the great war the", "The second film of the series was",
    "Water boils at a temperature of", "The city lies on the coast of",
)  # fmt: skip


def generate(model: Any, prompt: str, tokenizer: Any, new: int) -> None:  # noqa: ANN401 - transformers' objects
    """Continue a prompt."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)


def together(models: Sequence[Any], tokenizer: Any, new: int) -> float:  # noqa: ANN401 - as above
    """Seconds until all have generated, each its own text."""
    threads = [
        threading.Thread(target=generate, args=(model, PROMPTS[number % len(PROMPTS)], tokenizer, new))
        for number, model in enumerate(models)
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def plan(models: Sequence[Any], tokenizer: Any, new: int) -> tuple[float, int]:  # noqa: ANN401 - as above
    """Prepare all texts: seconds, and bytes stored."""
    began, stored = time.perf_counter(), 0
    for number, model in enumerate(models):
        ids = tokenizer(PROMPTS[number % len(PROMPTS)], return_tensors="pt")["input_ids"]
        stored += model.preprocess(GeneratePlan(prompt=ids.shape[1], new_tokens=new)).stored_bytes
    return time.perf_counter() - began, stored


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows, one for each number of sessions."""
    config = PrivateConfig(protocol=args.protocol, timeout_s=120)
    source = args.model or demo_model()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        share_checkpoint(source, folder, config)
        client = str(Path(folder) / "client")
        tokenizer = AutoTokenizer.from_pretrained(client)
        with parties_apart(config, {"model": folder}, args.latency) as parties:
            first = AutoPrivateModelForCausalLM.from_pretrained(client, parties.config)
            models = [first, *(first.open_session() for _ in range(max(args.sessions) - 1))]
            together(models[:1], tokenizer, args.new)  # compiles kernels
            for count in track(args.sessions, "sessions", console=Console(stderr=True)):
                times, prepared = [], []
                for _ in range(args.repeat):
                    if args.planned:
                        prepared.append(plan(models[:count], tokenizer, args.new))
                    times.append(together(models[:count], tokenizer, args.new))
                planned = {}
                if prepared:
                    seconds, stored = min(prepared)
                    planned = {"preprocess": True, "seconds_preprocessing": seconds, "stored_bytes": stored}
                speed = count * args.new / statistics.median(times)
                rows.append(
                    {
                        "name": "service",
                        "protocol": config.protocol,
                        "ring": config.ring,
                        "sessions": count,
                        "shape": [count, args.new],
                        "parties": config.parties,
                        "model": Path(source).name,
                        "seconds": {"min": min(times), "median": statistics.median(times), "max": max(times)},
                        "tokens_per_s": speed,
                        "latency_ms": args.latency,
                        "party_mode": "processes",
                        "ratio": speed / rows[0]["tokens_per_s"] if rows else 1.0,
                        **planned,
                        "repeat": args.repeat,
                        "threads": threads_per_party(config.parties),
                        **provenance(),
                    }
                )
            for model in models:
                model.close()
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder of a model (default: the bundled one)")
    parser.add_argument("--protocol", default="trio")
    parser.add_argument("--latency", type=float, default=1.0, help="milliseconds between parties, one way")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--new", type=int, default=32, help="tokens of each session")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--planned", action="store_true", help="prepare every text before it is asked for")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.sessions, args.new, args.repeat = [1, 2], 3, 1
    quiet()
    for row in measure(args):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
