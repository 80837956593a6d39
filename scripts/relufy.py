"""Give a language model an activation that makes zeros, and tune it until it writes as well as before.

GELU or SiLU of every feed-forward block becomes ReLU, ReLU squared, a shifted ReLU or dReLU, relu(gate) * relu(up), and
all weights are fine-tuned on text of the kind that the model was trained on (Comet, appendix C)::

    python scripts/relufy.py facebook/opt-125m --activation relu2 --data a.txt b.txt --output sparse_model
    python scripts/relufy.py MODEL --activation drelu --dataset NAME [CONFIGURATION] --output sparse_model
    python scripts/relufy.py ... --resume     # go on from the last checkpoint
    python scripts/relufy.py --tiny           # a random toy model and bundled text, in seconds

It ends early if the perplexity of held-out text stops falling, keeps the best weights, and reports sparsity and
perplexity before, after the swap and after tuning, also on `--test`. ReLU and ReLU squared load with transformers;
so does a shifted ReLU where FC1 has a bias. The others need `load_relufied` (see docs/sparsity.md). It needs ``pip
install private-llm[train]``.
"""

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import Accelerator
from bench.rows import provenance
from private_llm_hf.checkpoint.sample_inputs import evaluating
from private_llm_hf.sparsity.relufy import (
    ACTIVATIONS,
    FACTS,
    GATED,
    T5_NAME,
    Relufied,
    ReluKind,
    activation_key,
    put_in_place,
)
from private_llm_hf.sparsity.sites import Site, activations_of
from private_llm_hf.tools.texts import encode, load_texts, loss_of, total_nll, windows
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from train_demo_model import Done, batches, divide, load_optimizers, save_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from private_llm.errors import ConfigError, PatchMismatch

INTEGRATION = Path(__file__).resolve().parent.parent / "integrations/private_llm_hf"
TINY = {
    "model": str(INTEGRATION / "demo_model"), "data": [INTEGRATION / "data/shakespeare.txt"],
    "test": INTEGRATION / "data/heldout.txt", "steps": 6, "every": 3, "length": 64, "batch": 4, "activation": "drelu",
    "threads": 1,
}  # fmt: skip


@dataclass
class Tuned(Done):
    """How far tuning has got: best held-out perplexity, and validations since."""

    best: float = math.inf
    since: int = 0


def relufy(
    model: PreTrainedModel, inputs: Mapping[str, Any], activation: ReluKind = "relu", shift: float = 1.0
) -> Relufied:
    """Swap the activation of every feed-forward block, in place. inputs: of one short call, to find the blocks.

    Raises ConfigError for an unknown activation or a shift that is not a finite number; PatchMismatch for a model
    without feed-forward blocks, one that has this activation, dReLU for blocks without a gate, or a configuration that
    does not name its activation.
    """
    kind = type(model).__name__
    if not torch.tensor(float(shift)).isfinite():
        raise ConfigError(f"shift: got {shift}; want a finite number")
    blocks = activations_of(model, inputs)
    if not blocks:
        raise PatchMismatch(f"{kind}: no feed-forward block with an activation of its own; nothing to swap")
    key = activation_key(model.config)
    old = str(getattr(model.config, key))
    if old.removeprefix(GATED) == activation:
        raise PatchMismatch(f"{kind}: its activation is {old!r} already; train predictors for it as it is")
    ungated = [site.name for site, _ in blocks if len(site.readers) != 2]
    if activation == "drelu" and ungated:
        raise PatchMismatch(f"{kind}: dReLU needs a gate and an up projection, '{ungated[0]}' has none; use 'relu'")
    firsts = [model.get_submodule(site.name) for site, _ in blocks]
    folds = activation == "shifted-relu" and _have_biases(model, blocks)
    made = Relufied(
        activation, old, activation in ("relu", "relu2") or folds, tuple(str(site.activation) for site, _ in blocks),
        tuple(site.readers[1] for site, _ in blocks) if activation == "drelu" else (),
        float(shift) if activation == "shifted-relu" else 0.0,
    )  # fmt: skip
    if folds:
        with torch.no_grad():
            for first in firsts:
                first.get_parameter("bias").sub_(made.shift)
    put_in_place(model, made)
    return made


def save_relufied(model: PreTrainedModel, made: Relufied, folder: str | Path, report: Mapping[str, Any]) -> None:
    """Write the model and relufied.json: what was swapped, and `report`. Raises PatchMismatch without an activation."""
    folder = Path(folder)
    model.save_pretrained(folder)
    if not made.native:
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        names = {activation_key(model.config), T5_NAME} & set(config)  # T5 writes its activation twice
        config |= dict.fromkeys(names, f"private_llm_{made.activation.replace('-', '_')}")
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    facts = {"relufied": {**asdict(made), "modules": list(made.modules), "ups": list(made.ups)}, "report": dict(report)}
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _have_biases(model: PreTrainedModel, blocks: list[tuple[Site, nn.Module]]) -> bool:
    """Whether every FC1 or gate has a bias; zeros are put in where only a setting of the model is in the way."""
    if getattr(model.config, "mlp_bias", None) is False:
        layers = [model.get_submodule(name) for site, _ in blocks for name in (*site.readers, site.writer)]
        for layer in layers:
            weight = layer.get_parameter("weight")
            layer.bias = nn.Parameter(torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device))
        model.config.mlp_bias = True
    return all(isinstance(model.get_submodule(site.name).bias, Tensor) for site, _ in blocks)


def start(args: argparse.Namespace) -> PreTrainedModel:
    """The model to change; --tiny takes a random one, for the bundled model has ReLU already."""
    if not args.tiny:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        return model
    torch.manual_seed(args.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def figures(
    args: argparse.Namespace, model: PreTrainedModel, texts: dict[str, Tensor], bos: int
) -> dict[str, dict[str, float]]:
    """Perplexity per token, and the share of zeros after the activations, of each text."""
    device = next(model.parameters()).device
    found = {}
    for name, ids in texts.items():
        rows = windows(ids, args.length, bos)[:64].to(device)
        sites = [site for site, _ in activations_of(model, {"input_ids": rows[:1, :4]})]
        shares = share_of_zeros(model, sites, ({"input_ids": part} for part in rows.split(args.batch)))
        found[name] = {
            "perplexity": round(math.exp(total_nll(model, ids, args.length, bos) / len(ids)), 3),
            "sparsity": round(sum(shares.values()) / len(shares), 4),
            "sparsity_by_layer": [round(share, 4) for share in shares.values()],
        }
    return found


def share_of_zeros(
    model: PreTrainedModel, sites: Iterable[Site], batches: Iterable[Mapping[str, Any]]
) -> dict[str, float]:
    """By name of each feed-forward site, the share of neurons that do not reach the next layer. Keeps nothing."""
    blocks = [site for site in sites if site.kind == "ffn"]
    counts = {site.name: [0, 0] for site in blocks}
    with ExitStack() as stack, torch.no_grad():
        for site in blocks:

            def look(_: nn.Module, received: tuple[Any, ...], found: list[int] = counts[site.name]) -> None:
                found[0] += int((received[0] == 0).sum())
                found[1] += received[0].numel()

            stack.callback(model.get_submodule(site.writer).register_forward_pre_hook(look).remove)
        stack.enter_context(evaluating(model))
        for batch in batches:
            model(**batch)
    return {name: zeros / max(1, total) for name, (zeros, total) in counts.items()}


def tune(
    args: argparse.Namespace, model: PreTrainedModel, train_ids: Tensor, held_out: Tensor, bos: int, folder: Path
) -> Tuned:
    """Fine-tune all weights; the best ones are in `folder`/best.safetensors at the end."""
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=args.decay)
    done = Tuned()
    if args.resume:
        done = Tuned(**json.loads((folder / "progress.json").read_text()))
        load_model(model, folder / "model.safetensors")
    model, optimizer = accelerator.prepare(model, optimizer)
    if args.resume:
        load_optimizers(folder, [optimizer])
    raw, source = accelerator.unwrap_model(model), batches(train_ids, args.length, args.batch, bos, args.seed)
    for _ in range(done.step):
        next(source)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("tuning", total=args.steps, completed=done.step)
        while done.step < args.steps and done.since < args.patience:
            torch.manual_seed(args.seed + done.step)  # of dropout, so that a resumed run goes on in the same way
            model.train()
            part = done.step / args.steps
            for group in optimizer.param_groups:
                group["lr"] = args.rate * min(1.0, (part + 1e-3) / args.warmup) * (1 - part)
            loss = loss_of(model, next(source).to(accelerator.device))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            done.step, done.tokens = done.step + 1, done.tokens + args.batch * (args.length - 1)
            bar.update(task, completed=done.step, description=f"loss {loss.item():.3f}, best {done.best:.2f}")
            if done.step % args.every == 0 or done.step == args.steps:
                perplexity = math.exp(total_nll(raw, held_out, args.length, bos) / len(held_out))
                done.since = 0 if perplexity < done.best else done.since + 1
                if not done.since:
                    done.best = perplexity
                    save_model(raw, str(folder / "best.safetensors"))
                save_checkpoint(folder, raw, [optimizer], done)
    return done


def main(args: argparse.Namespace) -> None:
    """Swap, tune, save, report."""
    if not args.data and not args.dataset:
        raise SystemExit("No text to tune on: give --data FILE ..., --dataset NAME, or --tiny.")
    if not args.model:
        raise SystemExit("No model: give its folder or name, or --tiny.")
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    folder = args.checkpoint or args.output / "checkpoint"
    if args.resume != (folder / "progress.json").exists():
        found = "no checkpoint" if args.resume else "a checkpoint of an earlier run"
        raise SystemExit(
            f"{folder} holds {found}: {'drop' if args.resume else 'add'} --resume, or change --checkpoint."
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    bos = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    model = start(args).to(Accelerator(cpu=args.cpu, mixed_precision=args.precision).device)
    ids = [encode(tokenizer, text) for text in load_texts(args.data, args.dataset)["text"]]
    train_ids, held_out = divide(ids, tokenizer.eos_token_id)
    texts = {"held out": held_out}
    if args.test:
        texts["test"] = encode(tokenizer, args.test.read_text(encoding="utf-8"))
    report: dict[str, Any] = {"before": figures(args, model, texts, bos)}
    made = relufy(model, {"input_ids": train_ids[None, :4].to(model.device)}, args.activation, args.shift)
    report["swapped"] = figures(args, model, texts, bos)
    done = tune(args, model, train_ids, held_out, bos, folder)
    load_model(model, folder / "best.safetensors")
    report |= {
        "tuned": figures(args, model, texts, bos),
        "steps": done.step,
        "tokens": done.tokens,
        **provenance(),
    }
    save_relufied(model, made, args.output, report)
    tokenizer.save_pretrained(args.output)
    print(json.dumps({"activation": made.activation, "was": made.replaced, "native": made.native, **report}))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("model", nargs="?", help="a causal language model's folder or name")
    add("--activation", choices=ACTIVATIONS, default="relu", help="what to put in place (default: relu)")
    add("--shift", type=float, default=1.0, help="of shifted-relu, relu(x - shift)")
    add("--data", type=Path, nargs="+", metavar="FILE", help="text files; one listed twice counts twice")
    add("--dataset", nargs="+", metavar="NAME", help="a `datasets` name, and maybe the configuration's")
    add("--test", type=Path, metavar="FILE", help="unseen text to report on, too")
    add("--output", type=Path, default=Path("sparse_model"), help="folder for the model")
    add("--checkpoint", type=Path, help="folder for the checkpoints (default: OUTPUT/checkpoint)")
    add("--resume", action="store_true", help="go on from the checkpoint")
    add("--steps", type=int, default=1000, help="most steps")
    add("--every", type=int, default=100, help="steps between validations, each of which writes a checkpoint")
    add("--patience", type=int, default=3, help="validations without a lower perplexity before it ends")
    add("--length", type=int, default=256, help="tokens in a row")
    add("--batch", type=int, default=8, help="rows in a step")
    add("--rate", type=float, default=3e-4, help="peak learning rate")
    add("--warmup", type=float, default=0.03, help="share of the steps in which the rate rises")
    add("--decay", type=float, default=0.01, help="weight decay")
    add("--precision", default="no", choices=["no", "bf16"], help="autocast of the matrix products")
    add("--threads", type=int, help="torch threads (default: torch's own choice)")
    add("--cpu", action="store_true", help="do not use an accelerator")
    add("--seed", type=int, default=0)
    add("--tiny", action="store_true", help="a random toy model, a few steps")
    if parser.parse_args(argv).tiny:
        parser.set_defaults(**TINY)
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        main(parse_args())
    except (ConfigError, PatchMismatch) as error:
        raise SystemExit(str(error)) from None
