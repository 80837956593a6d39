"""Handwritten digits, and the small network that is trained on them: to try out and test private classification."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from private_llm.errors import ConfigError

HELD_OUT = 5
"""Every fifth image is never trained on: 360 of 1797."""


def _bundled(name: str) -> Path:
    found = Path(str(resources.files("private_llm_hf").joinpath(name)))
    if not found.exists():
        raise ConfigError(f"{name} is not part of this installation")
    return found


def digits(held_out: bool) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 8, 8] from 0 to 1 and labels [N]: the held-out ones, or all others. Raises ConfigError."""
    found = load_file(_bundled("data/digits.safetensors"))
    kept = (torch.arange(len(found["labels"])) % HELD_OUT == 0) == held_out
    return found["images"][kept].unsqueeze(1) / 16.0, found["labels"][kept].to(torch.int64)


def digits_model() -> str:
    """The folder of the bundled network. Raises ConfigError if this installation lacks it."""
    return str(_bundled("digits_model"))
