"""Recall and precision of predictions, and the threshold that reaches a recall.

Counted are units (neurons, heads, or blocks of neurons). Where units are blocks, recall weighs each by its active
neurons: it is the share of the active *neurons* that are computed. Precision is the share of predicted units that are
active. With a budget, which of the predicted units a run leaves out, or fills up with, is random: recall and precision
are those in the mean over what it may draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

_BINS = 1 << 16

Scored = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""Goes over the data anew: scores [N, units], and active neurons per unit [N, units]."""


@dataclass(frozen=True)
class Measures:
    """rows: positions. activity, predicted: shares of units that are, or are predicted, active.

    most: units predicted at the busiest position; predicted and most are at most a budget. Recall is 1 where nothing
    is active, precision where nothing is predicted.
    """

    rows: int
    recall: float
    precision: float
    activity: float
    predicted: float
    most: int

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        return 2 * self.precision * self.recall / max(self.precision + self.recall, 1e-12)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


class Counter:
    """Adds up predictions."""

    def __init__(self) -> None:
        self._rows = self._units = self._active_units = self._predicted = self._most = 0
        self._active = self._found = self._right = 0.0

    def add(self, predicted: Tensor, counts: Tensor, budget: int | None = None) -> None:
        """bool [N, units] of scores above the threshold, and active neurons per unit [N, units].

        budget: units that every position computes, drawn as a run draws them; None: those that are predicted.
        """
        active, many = counts > 0, predicted.sum(1, keepdim=True).double()
        within = many if budget is None else many.clamp(max=budget)
        others = counts.shape[1] - many
        filled = torch.zeros_like(many) if budget is None else (budget - within) / others.clamp_min(1)
        chances = torch.where(predicted, within / many.clamp_min(1), filled)
        self._rows += len(counts)
        self._units += counts.numel()
        self._right += float((chances * (predicted & active)).sum())
        self._predicted += int(within.sum())
        self._most = max(self._most, int(within.max())) if len(counts) else self._most
        self._active += float(counts.sum())
        self._found += float((chances * counts).sum())
        self._active_units += int(active.sum())

    def measures(self) -> Measures:
        """Of all that was added."""
        return Measures(
            rows=self._rows,
            recall=self._found / self._active if self._active else 1.0,
            precision=self._right / self._predicted if self._predicted else 1.0,
            activity=self._active_units / max(1, self._units),
            predicted=self._predicted / max(1, self._units),
            most=self._most,
        )


def threshold_for(recall: float, scored: Scored) -> float:
    """The threshold with the best F1 of those that reach this recall; of 2^16 between the active units' scores.

    Where few units are inactive, that is below the one that just reaches it. 0 if nothing is active. Goes over the
    data twice; memory does not grow with it.
    """
    low, high, total = float("inf"), float("-inf"), 0.0
    for scores, counts in scored():
        hits = scores[counts > 0]
        if len(hits):
            low, high, total = min(low, float(hits.min())), max(high, float(hits.max())), total + float(counts.sum())
    if not total:
        return 0.0
    step = (high - low) / _BINS or 1e-6
    neurons, active, inactive = (torch.zeros(_BINS + 1, dtype=torch.float64) for _ in range(3))
    for scores, counts in scored():
        bins = ((scores.double() - low) / step).floor().clamp(-1, _BINS).long()
        hits, misses = counts > 0, (counts == 0) & (bins >= 0)
        neurons += torch.bincount(bins[hits], counts[hits].double(), minlength=_BINS + 1)
        active += torch.bincount(bins[hits], minlength=_BINS + 1)
        inactive += torch.bincount(bins[misses], minlength=_BINS + 1)
    neurons, active, inactive = (_above(found) for found in (neurons, active, inactive))
    found_share, right_share = neurons / total, active / (active + inactive).clamp_min(1)
    f1 = 2 * found_share * right_share / (found_share + right_share).clamp_min(1e-12)
    best = int(f1.masked_fill(found_share < recall, -1.0).argmax())
    return low + (best - 1) * step


def _above(counted: Tensor) -> Tensor:
    """Sums from each bin upwards."""
    return counted.flip(0).cumsum(0).flip(0)
