"""Tokens a second when parties are far apart: by circuits, by comparison keys where they pay, with looked-up drafts.

python scripts/studies/bench_distance.py --latency 1 20           the bundled model, parties as processes
python scripts/studies/bench_distance.py --model smollm2 --new 8  SmolLM2-135M-Instruct (real_model.py installs it)
python scripts/studies/bench_distance.py --model smollm2 --draft my_draft --ways keys trained --prompt "What is a lake?"
python scripts/studies/bench_distance.py --assisted --latency 20  between client and servers, which are threads
python scripts/studies/bench_distance.py --tiny                   in seconds

One JSON row for each latency (milliseconds one way between parties; the client is near) and way: "circuits" is
adder="prefix", "keys" is adder="auto" with the stated network, "drafts" is that with prompt_lookup_num_tokens,
"trained" (with --draft, a folder that scripts/train_draft.py made) that with speculation by this model and look-ups, in
`--paths` paths of `--length`. With --assisted they are "alone", "looked up" and "trained", each with as many rows in
every pass. Every way continues the same prompt, greedily; its text is compared with the plaintext
model's. Tokens a second count those that came after the prompt's pass, which with drafts may give several; `first_s`
is the time to the first. `ratio` is to the first way at the same latency; `rounds_per_token` counts what the whole text
took more than its first token alone, over all other tokens.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import scripts_folder  # noqa: F401 - finds `bench`
import torch
from bench.link import LinkSpeed, SlowMesh
from bench.rows import provenance
from delayed_links import parties_apart
from private_llm_cli.commands.models import demo_model, quiet, smollm2_model
from private_llm_hf import AutoPrivateModelForCausalLM, SpeculationConfig, patch
from private_llm_hf.api import share_checkpoint
from private_llm_hf.models import smollm2
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from private_llm.config import PrivateConfig
from private_llm.kernels.parallel import threads_per_party
from private_llm.protocol_facts import ASSISTED

PROMPT = (
    "First Citizen : Before we proceed any further , hear me speak . All : Speak , speak . First Citizen : You are all "
    "resolved rather to die than to famish ? All : Resolved . resolved . First Citizen :"
)
QUESTION = "Repeat these words: the quick brown fox jumps over the lazy dog, and the lazy dog sleeps on."
MBIT = 1000.0
DRAFT = 4
WAYS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("circuits", {"adder": "prefix"}, {}),
    ("keys", {"adder": "auto", "bandwidth_mbit": MBIT}, {}),
    ("drafts", {"adder": "auto", "bandwidth_mbit": MBIT}, {"prompt_lookup_num_tokens": DRAFT}),
)
_ASSISTED: dict[str, Any] = {"protocol": ASSISTED, "party_mode": "threads", "latency_ms": 0.05}


@dataclass
class Clock(BaseStreamer):
    """When each token came."""

    times: list[float] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """One or more tokens; the first call brings the prompt."""
        self.times += [time.perf_counter()] * (1 if not self.times else value.numel())

    def end(self) -> None:
        """Nothing to do."""

    def speed(self) -> float:
        """Tokens a second after those of the prompt's pass, which come within milliseconds of the first."""
        later = [at for at in self.times[1:] if at > self.times[1] + 0.02]
        return len(later) / (later[-1] - self.times[1]) if later else float("inf")


def asked(name: str, prompt: str) -> tuple[str, Any]:
    """The model's folder and the prompt's ids [1, n]."""
    if name == "smollm2":
        folder = str(smollm2_model())
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return folder, smollm2.chat(tokenizer, [prompt or QUESTION])["input_ids"]
    folder = name or demo_model()
    return folder, AutoTokenizer.from_pretrained(folder)(prompt or PROMPT, return_tensors="pt")["input_ids"]


def ways(args: argparse.Namespace) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, settings of the parties, settings of generate) of what is measured."""
    every = list(WAYS)
    if args.assisted:
        drafts = {"looked up": SpeculationConfig()} | ({"trained": SpeculationConfig(args.draft)} if args.draft else {})
        every = [("alone", _ASSISTED, {}), *((way, _ASSISTED, {"speculation": each}) for way, each in drafts.items())]
    elif args.draft:
        config = SpeculationConfig(args.draft, paths=args.paths, length=args.length, open_counts=True)
        every.append(("trained", WAYS[1][1], {"speculation": config}))
    return [way for way in every if way[0] in args.ways] if args.ways else every


@contextmanager
def opened(folder: str, plain: PreTrainedModel, config: PrivateConfig, latency: float) -> Iterator[Any]:
    """The private model, with its parties so far apart."""
    if config.protocol == ASSISTED:
        mesh = SlowMesh(config.parties, config.timeout_s, LinkSpeed(MBIT, latency), instant="control")
        with patch(plain, config, mesh) as model:
            yield model
        return
    with tempfile.TemporaryDirectory() as shares:
        share_checkpoint(folder, shares, config)
        with (
            parties_apart(config, {"model": shares}, latency) as parties,
            AutoPrivateModelForCausalLM.from_pretrained(f"{shares}/client", parties.config) as model,
        ):
            yield model


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows, one for each latency and way."""
    folder, ids = asked(args.model, args.prompt)
    mask = torch.ones_like(ids)
    limits = {"max_new_tokens": args.new, "min_new_tokens": args.new, "do_sample": False, "pad_token_id": 0}
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    want = plain.generate(ids, attention_mask=mask, **limits)
    for latency in track(args.latency, "latencies", console=Console(stderr=True)):
        first = 0.0
        for way, settings, more in ways(args):
            config = PrivateConfig.from_dict({"timeout_s": 120, "latency_ms": latency, **settings})
            with opened(folder, plain, config, latency) as model:
                model.cost(reset=True)
                model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)  # compiles kernels
                prompt = model.cost(reset=True)
                model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
                model.cost(reset=True)
                clock, began = Clock(), time.perf_counter()
                made = model.generate(ids, attention_mask=mask, streamer=clock, **limits, **more)
                cost = model.cost()
            speed = clock.speed()
            first = first or speed
            yield {
                "name": "distance", "way": way, "protocol": config.protocol, "latency_ms": latency,
                "bandwidth_mbit": MBIT if args.assisted else config.bandwidth_mbit,
                "shape": [1, ids.shape[1], args.new], "model": args.model or "demo",
                "tokens_per_s": speed, "ratio": speed / first, "first_s": clock.times[1] - began,
                "equal": bool(torch.equal(made, want)), "bytes_total": cost.bytes_total, "rounds": cost.rounds,
                "rounds_per_token": round((cost.rounds - prompt.rounds) / (args.new - 1), 1),
                "parties": config.parties, "party_mode": "threads" if args.assisted else "processes",
                "load": os.getloadavg()[0], "threads": threads_per_party(config.parties),
                **provenance(),
            }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, print; 1 if a text is not the plaintext model's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder of a model, or smollm2 (default: the bundled one)")
    parser.add_argument("--latency", type=float, nargs="+", default=[0.2, 1.0, 20.0])
    parser.add_argument("--new", type=int, default=24, help="tokens of each text")
    parser.add_argument("--prompt", default="", help="another prompt; SmolLM2 is asked it as a user's turn")
    parser.add_argument("--ways", nargs="+", help="of circuits, keys, drafts and trained (default: all there are)")
    parser.add_argument("--draft", default="", help="folder of a draft model")
    parser.add_argument("--paths", type=int, default=1, help="ways to go on that a pass checks, with --draft")
    parser.add_argument("--length", type=int, default=6, help="drafted tokens in each, with --draft")
    parser.add_argument("--assisted", action="store_true", help="protocol 'assisted'")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    if args.tiny:
        args.latency, args.new, args.ways = [0.2], 4, ["drafts", "looked up"]
    quiet()
    rows = []
    for row in measure(args):
        print(json.dumps(row), flush=True)
        rows.append(row)
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
