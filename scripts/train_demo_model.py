"""Train the small OPT (ReLU) language model that is bundled as a demo.

The script trains a byte-level BPE tokenizer and an ``OPTForCausalLM`` from scratch on plain text, for a
given number of minutes, on a CPU or an accelerator, and writes a directory that
``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` load. For example::

    python scripts/train_demo_model.py --text a.txt b.txt --test held_out.txt --minutes 60 --out demo_model
    python scripts/train_demo_model.py --tiny --out /tmp/tiny        # a toy run of a few seconds, offline

Only the minutes spent inside training steps count, and the learning rate falls to zero with them: a run
on a busy machine, or one that was stopped and continued (``SIGSTOP``, or ``--resume`` after a kill), still
ends annealed. Checkpoints are safetensors and JSON only.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
TINY_TEXT = ROOT / "integrations" / "private_llm_hf" / "data" / "shakespeare.txt"
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SEGMENT = 2048  # tokens in a held-out piece


@dataclass
class Progressed:
    """How far a run has got; kept beside each checkpoint as JSON."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def train_tokenizer(texts: list[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that puts the start token before each text, as OPT's own does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Any) -> list[Tensor]:
    """Tokenise each row of a ``datasets`` table into one long sequence."""
    rows = texts.map(lambda row: {"ids": tokenizer(row["text"], add_special_tokens=False, verbose=False).input_ids},
                     remove_columns=texts.column_names, desc="tokenise")
    return [torch.tensor(row["ids"], dtype=torch.int64) for row in rows]


def split(documents: list[Tensor], eos: int, every: int = 32) -> tuple[Tensor, Tensor]:
    """Hold out every 32nd piece of each document; a document listed twice loses the same pieces twice."""
    train: list[Tensor] = []
    held_out: list[Tensor] = []
    end = torch.tensor([eos])
    for ids in documents:
        segments = ids.split(min(SEGMENT, max(1, len(ids) // every)))
        held_out += segments[every // 2 :: every]
        train += [s for i, s in enumerate(segments) if i % every != every // 2] + [end]
    return torch.cat(train), torch.cat(held_out)


def windows(ids: Tensor, length: int, bos: int) -> Tensor:
    """Cut a sequence into rows of ``length`` tokens that each begin with the start token."""
    count = len(ids) // (length - 1)
    rows = ids[: count * (length - 1)].view(count, length - 1)
    return torch.cat([torch.full((count, 1), bos), rows], dim=1)


def batches(ids: Tensor, length: int, batch: int, bos: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield shuffled batches for ever; each epoch cuts the text at other places."""
    while True:
        offset = int(torch.randint(length - 1, (1,), generator=generator))
        rows = windows(ids[offset:], length, bos)
        if len(rows) < batch:
            raise ValueError(
                f"the text has {len(ids)} tokens, which is less than one batch of {batch} x {length}; "
                "give more text or lower --batch or --length"
            )
        rows = rows[torch.randperm(len(rows), generator=generator)]
        yield from rows[: len(rows) // batch * batch].split(batch)


def loss_of(model: torch.nn.Module, rows: Tensor, reduction: str = "mean") -> Tensor:
    """Next-token cross-entropy over the rows."""
    logits = model(input_ids=rows, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def total_nll(model: torch.nn.Module, ids: Tensor, length: int, bos: int) -> float:
    """Negative log-likelihood (nats) of the sequence in disjoint windows, the last, shorter one included."""
    model.eval()
    device = next(model.parameters()).device
    full = windows(ids, length, bos)
    rest = ids[full.shape[0] * (length - 1) :]
    pieces = list(full.split(8)) + ([windows(rest, len(rest) + 1, bos)] if len(rest) else [])
    total = sum(float(loss_of(model, piece.to(device), "sum")) for piece in pieces)
    model.train()
    return total


def make_optimizers(model: torch.nn.Module, decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, norms and biases."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    embeddings = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." not in n]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": embeddings, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, betas=(0.9, 0.95)),
    ]


def save_checkpoint(path: Path, model: OPTForCausalLM, optimizers: list[Any], done: Progressed) -> None:
    """Write weights and optimizer state as safetensors, and the progress as JSON last."""
    model.save_pretrained(path)
    state = {
        f"{i}/{index}/{name}": value.detach().clone()
        for i, optimizer in enumerate(optimizers)
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    save_file(state, path / "optimizers.safetensors")
    (path / "progress.json").write_text(json.dumps(asdict(done)))


def load_optimizers(path: Path, optimizers: list[Any]) -> None:
    """Read back the optimizer state that ``save_checkpoint`` wrote."""
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    for key, value in load_file(path / "optimizers.safetensors").items():
        i, index, name = key.split("/")
        states[int(i)].setdefault(int(index), {})[name] = value
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def train(args: argparse.Namespace) -> None:
    """Run the training that the command line asks for."""
    set_seed(args.seed)
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.precision, gradient_accumulation_steps=1)
    checkpoint = args.checkpoint or args.out / "checkpoint"
    if args.text:
        texts = load_dataset("text", data_files=[str(p) for p in args.text], sample_by="document", split="train")
    else:
        texts = load_dataset(args.dataset, split="train")
    if args.resume:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        done = Progressed(**json.loads((checkpoint / "progress.json").read_text()))
        model = OPTForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(texts["text"], args.vocab, args.length)
        done = Progressed()
        model = OPTForCausalLM(
            OPTConfig(
                vocab_size=args.vocab,
                hidden_size=args.width,
                word_embed_proj_dim=args.width,
                num_hidden_layers=args.layers,
                num_attention_heads=args.width // args.head_dim,
                ffn_dim=4 * args.width,
                max_position_embeddings=args.length,
                activation_function="relu",
                do_layer_norm_before=True,
                dropout=args.dropout,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        )
    tokenizer.save_pretrained(checkpoint)
    bos = tokenizer.bos_token_id
    train_ids, held_out = split(encode(tokenizer, texts), tokenizer.eos_token_id)
    model, *optimizers = accelerator.prepare(model, *make_optimizers(model, args.decay))
    if args.resume:
        load_optimizers(checkpoint, optimizers)
    model.train()
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f} M parameters, {len(train_ids)} training tokens, {len(held_out)} held out", flush=True)

    budget = 60 * args.minutes
    source = batches(train_ids, args.length, args.batch, bos, torch.Generator().manual_seed(args.seed + done.step))
    next_save = done.seconds + args.save_seconds
    typical = math.inf  # a usual step's seconds
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("train", total=budget, completed=done.seconds)
        while done.seconds < budget:
            started = time.monotonic()
            part = done.seconds / budget
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = args.rate * min(1.0, (part + 1e-4) / args.warmup) * (1 - part)
            loss = loss_of(model, next(source).to(accelerator.device))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            # A process that was stopped in the middle of a step must not lose that time from its schedule.
            spent = min(time.monotonic() - started, 4 * typical)
            typical = spent if math.isinf(typical) else 0.9 * typical + 0.1 * spent
            done.step, done.seconds = done.step + 1, done.seconds + spent
            done.tokens += args.batch * (args.length - 1)
            bar.update(task, completed=done.seconds, description=f"step {done.step} loss {loss.item():.3f}")
            if done.seconds >= next_save:
                next_save += args.save_seconds
                raw = accelerator.unwrap_model(model)
                save_checkpoint(checkpoint, raw, optimizers, done)
                nll = total_nll(model, held_out, args.length, bos) / len(held_out)
                bar.console.print(
                    f"step {done.step} minutes {done.seconds / 60:.1f} tokens {done.tokens} "
                    f"loss {loss.item():.3f} held-out perplexity {math.exp(nll):.2f}"
                )
    save_checkpoint(checkpoint, accelerator.unwrap_model(model), optimizers, done)
    print(done)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", help="text files; one listed twice counts twice")
    parser.add_argument("--dataset", help="name of a `datasets` data set with a `text` column, instead of files")
    parser.add_argument("--test", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--precision", default="bf16", choices=["no", "bf16", "fp16"])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--save-seconds", type=float, default=300.0)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--warmup", type=float, default=0.02)
    parser.add_argument("--decay", type=float, default=0.2)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse_args())
