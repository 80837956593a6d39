"""What a capacity of experts saves and costs: bytes of a prompt, and the loss of a mixture that was trained with all.

    python scripts/studies/expert_capacity.py              trains a mixture of 16 experts, 2 chosen, on the bundled text
    python scripts/studies/expert_capacity.py --tiny

A small OLMoE is trained on bytes of the bundled play with transformers' own loss of balance. Its losses are those of
128 tokens of text that it has not seen, in plaintext, every expert limited to its capacity as `models/experts.py` does
it; bytes and rounds are counted for one layer of OLMoE-1B-7B and of Qwen3-30B-A3B.
"""

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from private_llm_hf.client.costs import Costs
from private_llm_hf.models.experts import places
from private_llm_hf.tools.estimate import estimate
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM, PretrainedConfig, Qwen3MoeConfig

from private_llm.config import PrivateConfig

TEXT = Path(str(resources.files("private_llm_hf").joinpath("data", "shakespeare.txt")))
CAPACITIES = (None, 2.0, 1.5, 1.25, 1.0)
LENGTH, HELD_OUT = 128, 8192
SMALL = {"vocab_size": 256, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
LAYERS: dict[str, PretrainedConfig] = {
    "OLMoE-1B-7B": OlmoeConfig(num_hidden_layers=1, intermediate_size=1024, **SMALL),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        num_hidden_layers=1, hidden_size=2048, moe_intermediate_size=768, num_attention_heads=32, head_dim=128,
        num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, **SMALL,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Training:
    """Sizes of the mixture, and how long it is trained."""

    hidden: int = 128
    layers: int = 3
    steps: int = 600
    rows: int = 8


TINY = Training(hidden=32, layers=1, steps=3, rows=2)


def trained(size: Training, text: Tensor) -> OlmoeForCausalLM:
    """A mixture of 16 experts, of which 2 are chosen, trained on windows of text [bytes]."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    config = OlmoeConfig(
        hidden_size=size.hidden, intermediate_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=4,
        num_experts=16, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.01, **SMALL,
    )  # fmt: skip
    model = OlmoeForCausalLM(config).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, size.steps)
    for _ in tqdm(range(size.steps), desc="training"):
        starts = random.integers(0, len(text) - LENGTH, size.rows).tolist()
        ids = torch.stack([text[start : start + LENGTH] for start in starts])
        loss = model(input_ids=ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    model.config.output_router_logits = False
    return model.eval()


@contextmanager
def limited(model: nn.Module, capacity: float | None) -> Iterator[list[float]]:
    """Experts take their places' tokens of each row of LENGTH; the list gets the share of weight that is left out."""
    lost: list[float] = []

    def forward(
        original: Callable[..., Tensor], count: int, hidden: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:  # fmt: skip
        most = places(capacity, LENGTH, index.shape[-1], count)
        full = torch.zeros(len(hidden), count).scatter_(-1, index, weights).view(-1, LENGTH, count)
        best = full.topk(most, dim=1).indices
        kept = torch.zeros_like(full).scatter_(1, best, full.gather(1, best)).view(-1, count)
        lost.append(1 - float(kept.sum() / full.sum()))
        return original(hidden, index, kept.gather(-1, index))

    found = [each for each in model.modules() if hasattr(each, "gate_up_proj")]
    for each in found:
        each.forward = functools.partial(forward, each.forward, len(each.gate_up_proj))
    try:
        yield lost
    finally:
        for each in found:
            del each.forward


@torch.no_grad()
def losses(model: OlmoeForCausalLM, text: Tensor) -> dict[float | None, tuple[float, float, float]]:
    """By capacity: nats a byte, share of most likely next bytes that stay, and share of weight that is left out."""
    ids = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    found: dict[float | None, tuple[float, float, float]] = {}
    likely: Tensor | None = None
    for capacity in CAPACITIES:
        with limited(model, capacity) as lost:
            logits = model(input_ids=ids).logits[:, :-1]
        mine = logits.argmax(-1)
        likely = mine if likely is None else likely
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        found[capacity] = float(loss), float((mine == likely).float().mean()), math.fsum(lost) / len(lost)
    return found


def costs(shape: PretrainedConfig, capacity: float | None, length: int) -> Costs:
    """Of a prompt, under trio."""
    model_class = AutoModelForCausalLM._model_mapping[type(shape)]
    return estimate(model_class, shape, PrivateConfig(expert_capacity=capacity), length).costs


def cell(costs: Costs) -> str:
    """Megabytes and rounds."""
    return f"{costs.bytes_total / 1e6:,.0f}, {costs.rounds:,}"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a test of this script")
    tiny = parser.parse_args().tiny
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    model = trained(TINY if tiny else Training(), text[:-HELD_OUT])
    found = losses(model, text[-HELD_OUT:])
    names = " | ".join(f"{name}: MB, rounds" for name in LAYERS)
    print(f"| capacity | weight left out | nats a byte | same next byte | {names} |")
    print("|---" * (4 + len(LAYERS)) + "|")
    for capacity, (loss, same, lost) in found.items():
        counted = [costs(shape, capacity, 32 if tiny else LENGTH) for shape in LAYERS.values()]
        cells = " | ".join(map(cell, counted))
        print(f"| {capacity or 'all'} | {100 * lost:.1f} % | {loss:.3f} | {100 * same:.1f} % | {cells} |")


if __name__ == "__main__":
    main()
