"""Where training starts: the best linear guess of the activity with so few rows in between (reduced-rank regression).

With x centred, S = E[x x^T] = L L^T and C = E[x (y - p)^T], the regression of rank r that leaves the least squared
error is B = L^-T U U^T L^-1 C, where U holds the first r left singular vectors of L^-1 C (Izenman 1975). So
W1 = U^T L^-1 makes r uncorrelated features of unit variance, and W2 is C^T L^-T U, scaled by unit from a probability to
log odds as in linear discriminant analysis.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from private_llm_hf.sparsity.predictor import Predictor

_RIDGE = 1e-4
"""Of the mean variance of inputs: they may span less than their width (a layer norm takes one dimension away)."""
_UNEXPLAINED = 0.1
"""Least share of a unit's variance that is taken as unexplained."""


def start_from_regression(predictor: Predictor, data: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Set the weights from inputs [N, width] and activity of units, float [N, units], one pass.

    Memory: width^2 + width * units float64.
    """
    width, units = predictor.width, predictor.units
    rows = 0
    x_sum, y_sum = torch.zeros(width, dtype=torch.float64), torch.zeros(units, dtype=torch.float64)
    xx, xy = torch.zeros(width, width, dtype=torch.float64), torch.zeros(width, units, dtype=torch.float64)
    for x, y in data:
        rows += len(x)
        x_sum += x.sum(0)
        y_sum += y.sum(0)
        xx += x.T @ x
        xy += x.T @ y
    if not rows:
        return
    mean, share = x_sum / rows, y_sum / rows
    s = xx / rows - mean[:, None] * mean
    s.diagonal().add_(_RIDGE * s.diagonal().mean().clamp_min(1e-12))
    c = xy / rows - mean[:, None] * share
    lower = torch.linalg.cholesky(s)
    whitened = torch.linalg.solve_triangular(lower, c, upper=False)  # L^-1 C, [width, units]
    features = torch.linalg.svd(whitened, full_matrices=False).U[:, : predictor.config.rank]
    w2 = whitened.T @ features  # [units, rank or fewer]
    w1 = torch.linalg.solve_triangular(lower.T, features, upper=True).T
    chances = share.clamp(0.5 / rows, 1 - 0.5 / rows)
    variance = chances * (1 - chances)
    explained = w2.square().sum(1) / variance
    w2 = w2 / (variance * (1 - explained).clamp_min(_UNEXPLAINED))[:, None]
    with torch.no_grad():
        used = w1.shape[0]  # fewer than the rank if there are fewer units
        predictor.fc1.weight[:used].copy_(w1)
        predictor.fc1.bias[:used].copy_(-w1 @ mean)
        predictor.fc2.weight[:, :used].copy_(w2)
        predictor.fc2.weight[:, used:] = 0.0
        predictor.fc2.bias.copy_(chances.log() - (1 - chances).log())
