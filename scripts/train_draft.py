"""Train a draft for speculative decoding: a model of few layers that says what a larger one would say next.

    python scripts/train_draft.py --model MODEL --out draft --minutes 25            a chat model asks its own questions
    python scripts/train_draft.py --model MODEL --out draft --text a.txt b.txt      prompts are pieces of texts
    python scripts/train_draft.py --tiny --out tiny_draft                           in seconds, from the bundled model

1. The target, in plaintext, writes texts: half of them greedily, half sampled. Prompts are pieces of the given texts
   or, without any, user's turns that the target itself makes up from its chat template (as Magpie, arXiv 2406.08464).
2. The draft starts as the target without the layers that it misses least: in rounds, those without which the target's
   predictions change least (cross-entropy over four of the texts).
3. Its layers learn the target's probabilities at every word of the texts (Kim and Rush 2016; the likeliest 16 words).
   Embeddings and head stay as they are.

It is saved as an ordinary model folder, for `SpeculationConfig(draft=...)` or `generate(assistant_model=...)`. At the
end the held-out prompts (`--test`, one a line) tell how often the target's greedy word is the draft's first, or among
its first 2, 3, 4 and 8. A draft holds layers and embeddings of its target: whoever may not see the target's weights
may not see it either. `--minutes` counts texts and training; it needs no packages beyond the library's own.
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from private_llm_cli.commands.models import demo_model, quiet, smollm2_model
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)  # fmt: skip

DATA = Path(__file__).resolve().parent.parent / "integrations/private_llm_hf/data"
LIKELIEST = 16
CHOOSING = 4
"""Texts that layers are chosen by: the order in which one text misses them is that text's own."""
RANKS = (1, 2, 3, 4, 8)
_MARK = "PLACE OF THE QUESTION"
TINY: dict[str, Any] = {
    "minutes": 0.1, "layers": 2, "new": 16, "rows": 8, "text": [DATA / "shakespeare.txt"], "tests": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Told:
    """A text of the target. ids: int64 [n]. start: of its first own token. likeliest, chances: [n - start, 16]."""

    ids: Tensor
    start: int
    likeliest: Tensor
    chances: Tensor


class Remember(LogitsProcessor):  # type: ignore[misc]
    """Changes nothing; keeps the likeliest words of every step."""

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [B, V] as they are."""
        best = scores.float().log_softmax(-1).topk(min(LIKELIEST, scores.shape[-1]))
        self.steps.append((best.indices, best.values.exp()))
        return scores


class Clock:
    """A bar on the error stream that fills with time."""

    def __init__(self, what: str, seconds: float) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._began, self._seconds = time.monotonic(), seconds
        self._task = self._bar.add_task(what, total=1.0)
        self._what, self._told = what, 0.0

    def __enter__(self) -> "Clock":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def part(self, note: str = "") -> float:
        """Share of the time that is over."""
        done = (time.monotonic() - self._began) / self._seconds
        self._bar.update(self._task, completed=min(done, 1.0), description=f"{self._what} {note}")
        if not self._bar.console.is_terminal and done >= self._told:
            self._bar.console.print(f"{self._what} {note}")
            self._told = done + 0.1
        return done


# -- 1: texts --------------------------------------------------------------------------------------------------
def chat_ends(tokenizer: Any) -> tuple[str, str]:  # noqa: ANN401 - transformers' own types
    """What the chat template puts before and after a user's turn."""
    turn = [{"role": "user", "content": _MARK}]
    before, after = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).split(_MARK)
    return before, after


def questions(model: PreTrainedModel, tokenizer: Any, rows: int) -> list[str]:  # noqa: ANN401
    """User's turns that the model makes up, sampled."""
    before, after = chat_ends(tokenizer)
    ids = tokenizer(before, return_tensors="pt", add_special_tokens=False)["input_ids"].expand(rows, -1)
    ends = tokenizer(after, add_special_tokens=False)["input_ids"][0]
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=48, eos_token_id=ends
    )[:, ids.shape[1] :]
    texts = (tokenizer.decode(row.tolist(), skip_special_tokens=True).strip() for row in made)
    return [text for text in texts if text]


def prompts(model: PreTrainedModel, tokenizer: Any, args: argparse.Namespace, chance: random.Random) -> list[str]:  # noqa: ANN401
    """As many prompts as rows, or a few less."""
    if not args.text:
        return [as_prompt(tokenizer, question) for question in questions(model, tokenizer, args.rows)]
    words = [word for path in args.text for word in Path(path).read_text(encoding="utf-8").split(" ")]
    starts = (chance.randrange(max(1, len(words) - 16)) for _ in range(args.rows))
    return [" ".join(words[start : start + 16]) for start in starts]


def as_prompt(tokenizer: Any, question: str) -> str:  # noqa: ANN401
    """A question as the model wants to be asked."""
    if tokenizer.chat_template is None:
        return question
    before, after = chat_ends(tokenizer)
    return f"{before}{question}{after}"


def told(model: PreTrainedModel, tokenizer: Any, asked: list[str], new: int, sample: bool) -> list[Told]:  # noqa: ANN401
    """What the model says to these prompts."""
    special = tokenizer.chat_template is None
    batch = tokenizer(asked, return_tensors="pt", padding=True, add_special_tokens=special)
    memory = Remember()
    how = {"do_sample": True, "temperature": 0.8, "top_k": 0} if sample else {"do_sample": False}
    made = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=new,
        logits_processor=LogitsProcessorList([memory]), pad_token_id=tokenizer.pad_token_id or 0, **how,
    )  # fmt: skip
    width = batch["input_ids"].shape[1]
    best = torch.stack([ids for ids, _ in memory.steps], 1)
    chances = torch.stack([values for _, values in memory.steps], 1)
    ends = model.generation_config.eos_token_id
    ends = torch.tensor(ends if isinstance(ends, list) else [] if ends is None else [ends])
    found = []
    for row in range(len(asked)):
        pads = int((batch["attention_mask"][row] == 0).sum())
        over = torch.isin(made[row, width:], ends).nonzero()
        count = int(over[0]) + 1 if len(over) else made.shape[1] - width
        ids = made[row, pads : width + count]
        found.append(Told(ids, width - pads, best[row, :count], chances[row, :count]))
    return found


# -- 2: which layers -------------------------------------------------------------------------------------------
def padded(texts: list[Told]) -> tuple[Tensor, Tensor]:
    """Token ids [B, L], padded on the right (no word sees what follows it), where own words are predicted [B, L]."""
    ids = nn.utils.rnn.pad_sequence([each.ids for each in texts], batch_first=True)
    predicted = torch.zeros_like(ids, dtype=torch.bool)
    for row, each in enumerate(texts):
        predicted[row, each.start - 1 : len(each.ids) - 1] = True
    return ids, predicted


def loss_of(model: PreTrainedModel, texts: list[Told]) -> Tensor:
    """Cross-entropy with the target's chances of its likeliest words, among all words likely anywhere in the batch."""
    ids, predicted = padded(texts)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[predicted]
    likeliest = torch.cat([each.likeliest for each in texts])
    chances = torch.cat([each.chances for each in texts])
    words, places = torch.unique(likeliest, return_inverse=True)
    head = model.get_output_embeddings()
    bias = None if head.bias is None else head.bias[words]
    logits = F.linear(hidden, head.weight[words], bias).float()
    return -(logits.log_softmax(-1).gather(1, places) * chances).sum(-1).mean()


def stack_of(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """The module that holds the decoder layers, and their name in it. Raises SystemExit for a model without."""
    for module in model.base_model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers:
                return module, name
    raise SystemExit(f"{type(model).__name__}: no list of {model.config.num_hidden_layers} layers found")


def thinned(target: PreTrainedModel, count: int, texts: list[Told]) -> list[int]:
    """The numbers of the `count` layers that stay.

    In rounds: each layer is left out in turn, then the third of those too many that is missed least goes.
    """
    home, name = stack_of(target)
    layers = list(getattr(home, name))
    stay = list(range(len(layers)))

    def loss_with(numbers: list[int]) -> float:
        setattr(home, name, nn.ModuleList(layers[number] for number in numbers))
        return loss_of(target, texts).item()

    with torch.no_grad(), Clock("choosing layers", 1.0) as clock:
        while len(stay) > count:
            # the first layer makes sense of embeddings; it always stays
            losses = {without: loss_with([number for number in stay if number != without]) for without in stay[1:]}
            gone = sorted(losses, key=lambda number: losses[number])[: -(-(len(stay) - count) // 3)]
            stay = [number for number in stay if number not in gone]
            clock.part(f"({len(stay)} left)")
    setattr(home, name, nn.ModuleList(layers))
    return stay


def draft_of(target: PreTrainedModel, stay: list[int]) -> PreTrainedModel:
    """A model of these layers of the target, float32; embeddings, head and last norm are the target's."""
    config = type(target.config).from_dict(target.config.to_dict())
    config.num_hidden_layers = len(stay)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [kinds[number] for number in stay]
    draft = type(target)(config).float()
    (home, name), (other, _) = stack_of(draft), stack_of(target)
    whole, kept = getattr(other, name), nn.ModuleList(getattr(other, name)[number] for number in stay)
    setattr(other, name, kept)
    draft.load_state_dict(target.state_dict())
    setattr(other, name, whole)
    draft.generation_config = target.generation_config
    draft.requires_grad_(False)
    getattr(home, name).requires_grad_(True)
    return draft


# -- 3: training -----------------------------------------------------------------------------------------------
def batches(texts: list[Told], rows: int, chance: random.Random) -> Iterator[list[Told]]:
    """For ever: texts of like lengths together, in an order by chance."""
    while True:
        ranked = sorted(texts, key=lambda each: len(each.ids) + chance.random() * 16)
        groups = [ranked[at : at + rows] for at in range(0, len(ranked), rows)]
        chance.shuffle(groups)
        yield from groups


def train(draft: PreTrainedModel, texts: list[Told], args: argparse.Namespace, seconds: float) -> dict[str, float]:
    """AdamW with a rate that rises for a tenth of the time and falls to zero as a cosine."""
    trained = [weight for weight in draft.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    chance, steps, mean, saved = random.Random(args.seed), 0, 0.0, 0.0
    draft.train()
    with Clock("training", seconds) as clock:
        for batch in batches(texts, args.batch, chance):
            done = clock.part(f"(step {steps}, loss {mean:.3f})")
            if done >= 1.0 and steps:
                break
            rate = args.rate * min(1.0, done * 10 + 0.01) * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(draft, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            steps += 1
            if done >= saved + 0.1:  # what is cut short leaves something
                draft.save_pretrained(args.out)
                saved = done
            now = loss.item()
            mean = now if steps == 1 else 0.95 * mean + 0.05 * now
    draft.eval()
    return {"steps": steps, "loss": mean}


@torch.no_grad()
def hits(draft: PreTrainedModel, texts: list[Told]) -> dict[str, float]:
    """How often the target's word is among the first 1, 2, 3, 4, 8 of the draft's, over all words of greedy texts."""
    found: list[Tensor] = []
    for each in texts:
        logits = draft(each.ids[None, :-1]).logits[0, each.start - 1 :]
        best = logits.topk(max(RANKS)).indices
        found.append(best == each.ids[each.start :, None])
    every = torch.cat(found).float()
    return {f"top{rank}": round(float(every[:, :rank].sum(-1).mean()), 4) for rank in RANKS}


def main(argv: list[str] | None = None) -> int:
    """Write texts, choose layers, train, save, tell the hits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder or hub id of the target, or smollm2 (default: bundled)")
    parser.add_argument("--out", type=Path, default=Path("draft"), help="folder of the draft")
    parser.add_argument("--text", type=Path, nargs="+", help="texts whose pieces are prompts (default: made up)")
    parser.add_argument("--test", type=Path, default=DATA / "prompts.txt", help="held-out prompts, one a line")
    parser.add_argument("--tests", type=int, default=20, help="of them so many")
    parser.add_argument("--layers", type=int, default=8, help="of the draft")
    parser.add_argument("--minutes", type=float, default=25.0, help="for texts and training")
    parser.add_argument("--writing", type=float, default=0.4, help="share of them for texts")
    parser.add_argument("--new", type=int, default=128, help="tokens of a text")
    parser.add_argument("--rows", type=int, default=64, help="texts written at a time")
    parser.add_argument("--batch", type=int, default=16, help="texts in a training step")
    parser.add_argument("--rate", type=float, default=6e-4, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="seconds, for tests")
    args = parser.parse_args(argv)
    if args.tiny:
        vars(args).update(TINY)
    quiet()
    torch.manual_seed(args.seed)
    folder = smollm2_model() if args.model == "smollm2" else args.model or demo_model()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    if tokenizer.chat_template is None and not args.text:
        raise SystemExit(f"{folder}: no chat template, so it cannot make up questions; give it --text")
    if not 1 <= args.layers < target.config.num_hidden_layers:
        raise SystemExit(f"--layers: got {args.layers}; want 1 to {target.config.num_hidden_layers - 1}")
    seconds, chance, texts = 60.0 * args.minutes, random.Random(args.seed), list[Told]()
    with Clock("writing", seconds * args.writing) as clock:
        while clock.part(f"({len(texts)} texts)") < 1.0 or not texts:
            asked = prompts(target, tokenizer, args, chance)
            texts += told(target, tokenizer, asked, args.new, sample=len(texts) // args.rows % 2 == 1)
    stay = thinned(target, args.layers, texts[:CHOOSING])
    del target
    draft = draft_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), stay)
    tokenizer.save_pretrained(args.out)
    facts: dict[str, Any] = {"layers": stay, "texts": len(texts)}
    facts["words"] = sum(len(text.ids) - text.start for text in texts)
    facts |= train(draft, texts, args, seconds * (1.0 - args.writing))
    draft.save_pretrained(args.out)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lines = args.test.read_text(encoding="utf-8").splitlines()[: args.tests]
    unseen = [told(exact, tokenizer, [as_prompt(tokenizer, line)], args.new, sample=False)[0] for line in lines]
    print(json.dumps({"name": "train_draft", **facts, **hits(draft, unseen)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
