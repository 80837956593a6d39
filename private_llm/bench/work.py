"""What a benchmark runs: secret inputs, what the parties do with them, and the float64 truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import ConfigError
from private_llm.protocols.session import Session
from private_llm.tensor.fixed import Fixed

Run = Callable[[Session, Sequence[Fixed]], Fixed]
Truth = Callable[[Sequence[Tensor]], Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """One piece of work at one shape.

    inputs: public shapes of the secret inputs. spread: standard deviation of each (normal), or the half width if
    `uniform`. run: what every party does. truth: the same in float64.
    """

    name: str
    shape: Shape
    inputs: tuple[Shape, ...]
    run: Run
    truth: Truth
    spread: tuple[float, ...] = (1.0,)
    uniform: bool = False
    notes: str = ""
    extra: dict[str, str] = field(default_factory=dict)

    def values(self, seed: int = 1) -> list[Tensor]:
        """Random real inputs in float64, never zeros; the same for the same seed."""
        random = np.random.default_rng(seed)
        made = []
        for index, shape in enumerate(self.inputs):
            width = self.spread[min(index, len(self.spread) - 1)]
            numbers = random.uniform(-width, width, shape) if self.uniform else random.normal(0.0, width, shape)
            made.append(torch.from_numpy(np.asarray(numbers)))
        return made


def parse_shape(text: str) -> Shape:
    """ "128x768x3072" as (128, 768, 3072). Raises ConfigError."""
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(f"shape: got {text!r}; want positive sizes joined by 'x', for instance 128x768x3072")
    return shape
