"""Predictors whose scores have a known size, whatever the size of their inputs and weights.

A score counts by its sign alone, so each unit's row may be multiplied by any positive number, and so may a hidden value
if the rows that read it are divided by it. What a block reads is nearly always a norm's output g * n + h, of which the
owner knows g and h, and rows n have a mean square of 1: scores get a root mean square of 2 for independent entries,
and then none exceeds 2 (sqrt(width) + 1). Between the two layers the factor is divided so that the weights of both
are of one size: fixed point rounds either as little as it can.
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm_hf.sparsity.predictor import Predictor

_SIZE = 2.0
"""Root mean square of scores. Comparisons resolve steps of 2^-8, and the check of ranges wants scores below 2^10."""

_LEARNT = 0.25
"""Factor of scores where nothing is known of the input: those of training are logits, of 1 to 10."""

_SMALLEST, _LARGEST = 2.0**-4, 2.0**8
"""Bounds of the root mean square of hidden values: they have 18 fractional bits and reach 2^20."""


def scaled(predictor: Predictor, gain: Tensor | None = None, shift: Tensor | None = None) -> dict[str, Tensor]:
    """Weights by their names, float32: of the same predictions, with threshold 0 and scores of about `_SIZE`.

    gain, shift: float64 [width], weight and bias of the norm whose output is read; None: nothing is known of the input.
    """
    down, lift = predictor.fc1.weight.detach().double(), predictor.fc1.bias.detach().double()
    up, bias = predictor.fc2.weight.detach().double(), predictor.fc2.bias.detach().double()
    bias = bias - predictor.config.threshold
    read = down if gain is None else down * gain
    middle = lift if shift is None else lift + down @ shift
    hidden = _positive((read.square().sum(1) + middle.square()).sqrt())
    if gain is None:
        factor = torch.full_like(bias, _LEARNT)
    elif predictor.config.hidden == "linear":
        size = ((up @ read).square().sum(1) + (up @ middle + bias).square()).sqrt()
        factor = _SIZE / _positive(size)
    else:  # hidden values have one sign: they may add up
        factor = _SIZE / _positive(up.abs() @ hidden + bias.abs())
    above, below = up * hidden * factor[:, None], down / hidden[:, None]
    balance = (_root_mean_square(above) / _positive(_root_mean_square(below))).sqrt()
    balance = balance.clamp(_SMALLEST, _LARGEST)
    found = {
        "fc1.weight": below * balance, "fc1.bias": lift / hidden * balance,
        "fc2.weight": above / balance, "fc2.bias": bias * factor,
    }  # fmt: skip
    return {name: value.float() for name, value in found.items()}


def _positive(size: Tensor) -> Tensor:
    """Sizes to divide by: 1 where there is none."""
    return torch.where(size > 0, size, 1.0)


def _root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
