"""Recall and precision of predictions, and the threshold that reaches a recall.

Counted are units (neurons, heads, or blocks of neurons). Where units are blocks, recall weighs each by its active
neurons: it is the share of the active *neurons* that are computed. Precision is the share of predicted units that are
active.
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

    most: units predicted at the busiest position. Recall is 1 where nothing is active, precision where nothing is
    predicted.
    """

    rows: int
    recall: float
    precision: float
    activity: float
    predicted: float
    most: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


class Counter:
    """Adds up predictions."""

    def __init__(self) -> None:
        self._rows = self._units = self._active = self._found = self._predicted = self._right = 0
        self._active_units = self._most = 0

    def add(self, predicted: Tensor, counts: Tensor) -> None:
        """bool [N, units], and active neurons per unit [N, units]."""
        active = counts > 0
        self._rows += len(counts)
        self._units += counts.numel()
        self._right += int((predicted & active).sum())
        self._predicted += int(predicted.sum())
        self._most = max(self._most, int(predicted.sum(1).max())) if len(counts) else self._most
        self._active += int(counts.sum())
        self._found += int(counts[predicted].sum())
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
    """The highest threshold (of 2^16 between the extremes) above which at least this share of active neurons scores.

    0 if nothing is active. Goes over the data twice; memory does not grow with it.
    """
    low, high, total = float("inf"), float("-inf"), 0.0
    for scores, counts in scored():
        hits = scores[counts > 0]
        if len(hits):
            low, high, total = min(low, float(hits.min())), max(high, float(hits.max())), total + float(counts.sum())
    if not total:
        return 0.0
    step = (high - low) / _BINS or 1e-6
    found = torch.zeros(_BINS + 1, dtype=torch.float64)
    for scores, counts in scored():
        hits = counts > 0
        bins = ((scores[hits].double() - low) / step).long().clamp_(0, _BINS)
        found += torch.bincount(bins.cpu(), counts[hits].double().cpu(), minlength=_BINS + 1)
    above = found.flip(0).cumsum(0).flip(0)  # above[b]: weight of what scores at least low + b step
    best = int((above >= recall * total).nonzero().max())
    return low + (best - 1) * step
