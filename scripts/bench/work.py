"""What a benchmark runs: secret inputs, what the parties do with them, and the float64 truth."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import ConfigError
from private_llm.protocols.session import Session
from private_llm.replay.ahead import are_compiling
from private_llm.tensor.fixed import Fixed

Shape = tuple[int, ...]
Run = Callable[[Session, Sequence[Fixed]], Fixed]
Prepare = Callable[[Session, Mapping[str, Fixed]], Run]
Truth = Callable[[Sequence[Tensor], Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Work:
    """One piece of work at one shape.

    inputs: public shapes of the secret inputs. spread: standard deviation of each (normal), or the half width if
    `uniform`. weights: public shapes of the model owner's tensors; `prepare` makes of their shares what every party
    runs on the inputs. truth: the same in float64, from values of inputs and weights. rows: the first dimension of each
    input and of the result counts rows that know nothing of each other, so parallel sessions may share them. adapt:
    what is made of the random weights.
    """

    name: str
    shape: Shape
    inputs: tuple[Shape, ...]
    prepare: Prepare
    truth: Truth
    spread: tuple[float, ...] = (1.0,)
    uniform: bool = False
    weights: Mapping[str, Shape] = field(default_factory=dict)
    rows: bool = False
    adapt: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None

    def share_of(self, parallel_session: int, parallel_sessions: int) -> list[slice]:
        """The rows of each input that one of `parallel_sessions` computes. Raises ConfigError if it would have none."""
        if parallel_sessions == 1:
            return [slice(None)] * len(self.inputs)
        if not self.rows or min(shape[0] for shape in self.inputs) < parallel_sessions:
            raise ConfigError(
                f"benchmark {self.name!r} at {self.shape} cannot be spread over parallel_sessions={parallel_sessions}"
            )
        cut = [
            [shape[0] * k // parallel_sessions for k in (parallel_session, parallel_session + 1)]
            for shape in self.inputs
        ]
        return [slice(*ends) for ends in cut]

    def values(self, seed: int = 1) -> list[Tensor]:
        """Random real inputs in float64, never zeros; the same for the same seed."""
        random = np.random.default_rng(seed)
        made = []
        for index, shape in enumerate(self.inputs):
            width = self.spread[min(index, len(self.spread) - 1)]
            numbers = random.uniform(-width, width, shape) if self.uniform else random.normal(0.0, width, shape)
            made.append(torch.from_numpy(np.asarray(numbers)))
        return made

    def weight_values(self, seed: int = 2) -> dict[str, Tensor]:
        """Random weights in float64: matrices N(0, 0.04), biases N(0, 0.1), gains of norms N(1, 0.1); adapted."""
        made = random_weights(self.weights, seed)
        return made if self.adapt is None else self.adapt(made)


def random_weights(shapes: Mapping[str, Shape], seed: int) -> dict[str, Tensor]:
    """Random numbers of a size that keeps activations in the range of trained models."""
    random = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        matrix = len(shape) > 1
        middle = 1.0 if not matrix and name.endswith("weight") else 0.0
        made[name] = torch.from_numpy(random.normal(middle, 0.04 if matrix else 0.1, shape))
    return made


# -- runs before the timed ones: until kernels are compiled and no step is recorded any more --------------------------
MOST_RUNS = 8
"""A program is used from a few calls on, that within another a few calls later; what is new each time never is."""


def warm_up(run: Callable[[], float], uncompiled: Callable[[], int]) -> float:
    """Run until nothing is recorded, at most `MOST_RUNS` times; returns what the first run took (seconds).

    uncompiled: calls so far that Python computed because their program was not ready (`replay.program_cache`).
    """
    while are_compiling():
        time.sleep(0.1)
    before, first = uncompiled(), run()
    for _ in range(MOST_RUNS - 1):
        now = uncompiled()
        if now == before:
            break
        before = now
        run()
    return first
