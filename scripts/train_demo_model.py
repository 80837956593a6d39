"""Train the small OPT (ReLU) language model that is bundled as a demo.

The script trains a byte-level BPE tokenizer and an ``OPTForCausalLM`` from scratch on plain text for a given
number of minutes, and writes a directory that ``AutoModelForCausalLM.from_pretrained`` and
``AutoTokenizer.from_pretrained`` load::

    python scripts/train_demo_model.py --text a.txt b.txt --test unseen.txt --minutes 60 --out demo_model
    python scripts/train_demo_model.py --dataset NAME [CONFIGURATION] --out demo_model
    python scripts/train_demo_model.py --tiny --out tiny_model    # a toy model in seconds, from bundled text

Only time inside training steps counts, and the learning rate falls to zero with it: a run on a busy
machine, or one that was stopped (SIGSTOP) or killed and continued (``--resume``), still ends annealed.
It needs ``pip install private-llm[train]`` and a torch that has ``torch.optim.Muon`` (2.9 or later).
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from private_llm_hf.tools.texts import encode, load_texts, loss_of, total_nll, windows
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

TINY_TEXT = Path(__file__).resolve().parent.parent / "integrations/private_llm_hf/data/shakespeare.txt"
TINY = {
    "text": [TINY_TEXT], "minutes": 0.1, "save_seconds": 3.0, "vocab": 512, "layers": 2, "width": 64,
    "head_dim": 32, "length": 64, "batch": 16, "dropout": 0.0, "precision": "no",
}  # fmt: skip
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
CARD = """---
license: {licence}
language: en
library_name: transformers
pipeline_tag: text-generation
---
# Demo language model (OPT architecture, ReLU)

A small English language model for trying out and testing private inference, trained from scratch:
{layers} decoder layers, width {width}, {heads} heads, ReLU feed-forward of {ffn}, {positions} positions, tied
embeddings, and a byte-level BPE tokenizer of {vocab} tokens; {parameters:.1f} M parameters in fp16.

## Training data and licences

{data}

## Training

`scripts/train_demo_model.py`: {steps} steps of {batch} x {positions} tokens ({tokens:.1f} M tokens,
{epochs:.1f} passes over the text) in {minutes:.0f} minutes, {precision}; Muon for the layers' matrices and
AdamW for the rest, peak learning rate {rate:g} with a linear decay to zero, weight decay {decay:g},
dropout {dropout:g}.

## Perplexity

Of the stored fp16 weights, computed in fp32, in disjoint windows of {positions} tokens that begin with `<s>`
(which is not counted). Words are what white space separates.

| text | per token | per byte | per word |
|---|---|---|---|
{results}

## Limits

A model of this size, trained on this little text, writes fluent phrases but knows no facts, and repeats the
biases of its sources. It is meant for tests and measurements, not for answers. {remark}
"""


@dataclass
class Done:
    """How far a run has got; kept beside each checkpoint as JSON."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def train_tokenizer(texts: list[str], vocab: int, length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that puts the start token before each text, as OPT's own does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[PAD, BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=length,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def divide(documents: list[Tensor], eos: int, piece: int = 2048, every: int = 32) -> tuple[Tensor, Tensor]:
    """Hold out every 32nd piece of each document; a document listed twice loses the same pieces twice."""
    train: list[Tensor] = []
    held_out: list[Tensor] = []
    for ids in documents:
        for i, part in enumerate(torch.split(ids, min(piece, max(1, len(ids) // every)))):
            (held_out if i % every == every // 2 else train).append(part)
        train.append(torch.tensor([eos]))
    return torch.cat(train), torch.cat(held_out)


def batches(ids: Tensor, length: int, batch: int, bos: int, seed: int) -> Iterator[Tensor]:
    """Yield shuffled batches for ever; each epoch cuts the text at other places."""
    if len(ids) < (batch + 1) * length:
        raise SystemExit(
            f"The text has {len(ids)} tokens, a batch of {batch} x {length} needs {(batch + 1) * length}: "
            "give more text, or lower --batch or --length."
        )
    chance = random.Random(seed)
    while True:
        rows = windows(ids[chance.randrange(length - 1) :], length, bos)
        order = torch.tensor(chance.sample(range(len(rows)), len(rows)))
        yield from torch.split(rows[order[: len(rows) // batch * batch]], batch)


def make_optimizers(model: torch.nn.Module, decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, norms and biases."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and ".layers." in n]
    embeddings = [p for n, p in named if p.ndim == 2 and ".layers." not in n]
    vectors = [p for _, p in named if p.ndim == 1]
    groups = [{"params": embeddings, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [
        # This scaling of Muon's steps lets both optimizers share one learning rate.
        torch.optim.Muon(matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, betas=(0.9, 0.95)),
    ]


def save_checkpoint(path: Path, model: OPTForCausalLM, optimizers: list[Any], done: Done) -> None:
    """Write weights and optimizer state as safetensors, then the progress as JSON."""
    new = path.with_name(path.name + ".new")
    model.save_pretrained(new)
    state = {
        f"{i}/{index}/{name}": value.detach().cpu().clone()
        for i, optimizer in enumerate(optimizers)
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    save_file(state, new / "optimizers.safetensors")
    (new / "progress.json").write_text(json.dumps(asdict(done)))
    for file in new.iterdir():  # a kill while writing leaves the old checkpoint whole
        file.replace(path / file.name)
    new.rmdir()


def load_optimizers(path: Path, optimizers: list[Any]) -> None:
    """Read back the optimizer state that ``save_checkpoint`` wrote."""
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    for key, value in load_file(path / "optimizers.safetensors").items():
        i, index, name = key.split("/")
        states[int(i)].setdefault(int(index), {})[name] = value
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def make_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> OPTForCausalLM:
    """Build the untrained model of the asked size."""
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=len(tokenizer), hidden_size=args.width, word_embed_proj_dim=args.width,
            num_hidden_layers=args.layers, num_attention_heads=args.width // args.head_dim,
            ffn_dim=4 * args.width, max_position_embeddings=args.length, activation_function="relu",
            do_layer_norm_before=True, dropout=args.dropout, pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip


def fit(args: argparse.Namespace, model: OPTForCausalLM, train_ids: Tensor, held_out: Tensor, done: Done) -> None:
    """Train until the minutes are used up, with checkpoints; ``done`` is kept up to date."""
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.precision)
    model, *optimizers = accelerator.prepare(model, *make_optimizers(model, args.decay))
    if args.resume:
        load_optimizers(args.checkpoint, optimizers)
    raw, bos, budget = accelerator.unwrap_model(model), model.config.bos_token_id, 60 * args.minutes
    source = batches(train_ids, args.length, args.batch, bos, args.seed + done.step)
    next_save, typical = done.seconds + args.save_seconds, math.inf
    model.train()
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("training", total=budget)
        while done.seconds < budget:
            started, part = time.monotonic(), done.seconds / budget
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = args.rate * min(1.0, (part + 1e-4) / args.warmup) * (1 - part)
            loss = loss_of(model, next(source).to(accelerator.device))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            # The cap keeps the time that the process was stopped in mid-step out of the schedule.
            spent = min(time.monotonic() - started, 4 * typical)
            typical = spent if math.isinf(typical) else 0.9 * typical + 0.1 * spent
            done.step, done.seconds = done.step + 1, done.seconds + spent
            done.tokens += args.batch * (args.length - 1)
            bar.update(task, completed=done.seconds, description=f"step {done.step} loss {loss.item():.3f}")
            if done.seconds >= min(next_save, budget):
                next_save += args.save_seconds
                save_checkpoint(args.checkpoint, raw, optimizers, done)
                perplexity = math.exp(total_nll(model, held_out, args.length, bos) / len(held_out))
                bar.console.print(
                    f"step {done.step}, {done.seconds / 60:.1f} minutes: held-out perplexity {perplexity:.2f}"
                )


def result_row(model: OPTForCausalLM, name: str, text: str, ids: Tensor) -> str:
    """One row of the card's perplexity table."""
    nll = total_nll(model, ids, model.config.max_position_embeddings, model.config.bos_token_id)
    counts = len(ids), len(text.encode()), len(text.split())
    return f"| {name} | " + " | ".join(f"{math.exp(nll / max(1, n)):.4g}" for n in counts) + " |"


def finish(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast, held_out: Tensor, size: int) -> None:
    """Write the fp16 model, the tokenizer and the model card."""
    done = Done(**json.loads((args.checkpoint / "progress.json").read_text()))
    OPTForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float16).save_pretrained(args.out)
    for key in ("is_local", "local_files_only"):  # how a resumed run read it says nothing to its users
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(args.out)
    model = OPTForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    rows = [result_row(model, "pieces held out of the text", tokenizer.decode(held_out), held_out)]
    if args.test:
        text = args.test.read_text(encoding="utf-8")
        rows.append(result_row(model, args.test_name or args.test.name, text, encode(tokenizer, text)))
    sources = args.data_note or ([" ".join(args.dataset)] if args.dataset else [p.name for p in args.text])
    config = model.config
    card = CARD.format(
        licence=args.licence, layers=config.num_hidden_layers, width=config.hidden_size, ffn=config.ffn_dim,
        heads=config.num_attention_heads, positions=config.max_position_embeddings, vocab=config.vocab_size,
        parameters=model.num_parameters() / 1e6, data="\n".join(f"- {s}" for s in sources), steps=done.step,
        batch=args.batch, tokens=done.tokens / 1e6, epochs=done.tokens / size, minutes=done.seconds / 60,
        precision="bf16 autocast" if args.precision == "bf16" else "fp32", rate=args.rate, decay=args.decay,
        dropout=args.dropout, results="\n".join(rows), remark=args.remark,
    )  # fmt: skip
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print("\n".join(rows), f"Wrote {args.out}: {done.step} steps, {done.tokens} tokens.", sep="\n")


def main(args: argparse.Namespace) -> None:
    """Train as the command line asks."""
    if not hasattr(torch.optim, "Muon"):
        raise SystemExit(f"torch {torch.__version__} has no torch.optim.Muon: install torch 2.9 or later.")
    if args.width % args.head_dim:
        raise SystemExit(f"--width {args.width} is no multiple of --head-dim {args.head_dim}: change one.")
    if not args.text and not args.dataset:
        raise SystemExit("No text to train on: give --text FILE ..., --dataset NAME, or --tiny.")
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    set_seed(args.seed)
    if args.tiny:
        torch.set_num_threads(1)  # on a busy machine, threads wait for each other longer than they work
    args.checkpoint = args.checkpoint or args.out / "checkpoint"
    texts = load_texts(args.text, args.dataset)
    if args.resume:
        if not (args.checkpoint / "progress.json").exists():
            raise SystemExit(f"No checkpoint in {args.checkpoint}: drop --resume or give --checkpoint DIR.")
        done = Done(**json.loads((args.checkpoint / "progress.json").read_text()))
        tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
        model = OPTForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32)
    else:
        done, tokenizer = Done(), train_tokenizer(texts["text"], args.vocab, args.length)
        model = make_model(args, tokenizer)
        tokenizer.save_pretrained(args.checkpoint)
    rows = texts.map(lambda row: {"ids": encode(tokenizer, row["text"])}).with_format("torch")
    train_ids, held_out = divide([row["ids"] for row in rows], tokenizer.eos_token_id)
    print(f"{model.num_parameters()} parameters, {len(train_ids)} training tokens, {len(held_out)} held out")
    fit(args, model, train_ids, held_out, done)
    finish(args, tokenizer, held_out, len(train_ids))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--text", type=Path, nargs="+", metavar="FILE", help="text files; one listed twice counts twice")
    add("--dataset", nargs="+", metavar="NAME", help="a `datasets` name, and maybe the configuration's")
    add("--test", type=Path, metavar="FILE", help="unseen text for the card's perplexity")
    add("--test-name", help="how the card calls that text")
    add("--out", type=Path, default=Path("demo_model"), help="folder for the model, the tokenizer and the card")
    add("--checkpoint", type=Path, help="folder for the checkpoints (default: OUT/checkpoint)")
    add("--resume", action="store_true", help="go on from the checkpoint")
    add("--tiny", action="store_true", help="train a toy model for a few seconds")
    add("--data-note", nargs="+", metavar="LINE", help="the card's lines about the data and its licences")
    add("--remark", default="", help="a last sentence for the card")
    add("--licence", default="other", help="licence tag of the card, such as cc-by-sa-3.0")
    add("--cpu", action="store_true", help="do not use an accelerator")
    add("--precision", default="bf16", choices=["no", "bf16"], help="autocast of the matrix products")
    add("--minutes", type=float, default=60.0, help="time to spend inside training steps")
    add("--save-seconds", type=float, default=300.0, help="time between checkpoints")
    sizes = {"vocab": 4096, "layers": 6, "width": 256, "head-dim": 64, "length": 512, "batch": 12}
    rates = {"rate": 2e-3, "warmup": 0.02, "decay": 0.2, "dropout": 0.15}
    for name, default in {**sizes, **rates}.items():
        add(f"--{name}", type=type(default), default=default)
    add("--seed", type=int, default=0)
    if parser.parse_args(argv).tiny:
        parser.set_defaults(**TINY)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
