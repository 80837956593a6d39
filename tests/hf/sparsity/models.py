"""Tiny models that make zeros, a batch for each, and recordings whose activity is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from private_llm_hf.sparsity.recordings import Recording, RecordingWriter
from private_llm_hf.sparsity.sites import Site
from torch import Tensor
from transformers import PreTrainedModel

from tests.hf.tiny import build

RELU: dict[str, dict[str, object]] = {
    "opt": {},
    "gpt2": {"activation_function": "relu"},
    "llama": {"hidden_act": "relu"},
    "bert": {"hidden_act": "relu"},
    "t5": {},
    "vit": {"hidden_act": "relu"},
}
"""Architectures, and the settings that give them ReLU."""


def sparse(name: str, seed: int = 0) -> PreTrainedModel:
    return build(name, seed=seed, **RELU[name])


def batch(name: str, rows: int = 2, length: int = 9) -> dict[str, Any]:
    chance = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=chance)}
    ids = torch.randint(3, 120, (rows, length), generator=chance)
    return {"input_ids": ids, "decoder_input_ids": ids[:, :5]} if name == "t5" else {"input_ids": ids}


def site(width: int = 24, units: int = 40) -> Site:
    return Site("layers.0.fc1", "ffn", 0, width, units, ("layers.0.fc1",), "layers.0.fc2", "layers.0.act")


def linear_activity(folder: Path, rank: int = 4, rows: int = 6000, seed: int = 0, units: int = 40) -> Recording:
    """Units are active where a linear function of Gaussian inputs is large, about one time in five."""
    chance = torch.Generator().manual_seed(7)
    down = torch.randn(24, rank, generator=chance) / 24**0.5
    up = torch.randn(rank, units, generator=chance)
    inputs = torch.randn(rows, 24, generator=torch.Generator().manual_seed(seed))
    active = inputs.half().float() @ down @ up > 0.84 * up.norm(dim=0)
    return write(folder, inputs, active)


def write(folder: Path, inputs: Tensor, active: Tensor) -> Recording:
    with RecordingWriter(folder, site(inputs.shape[1], active.shape[1]), {"model": "m", "tolerance": 0.1}) as writer:
        writer.add(inputs, active)
    return Recording(folder)
