"""The table of one cubic that approximates a power near 1."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cubic:
    """sum_k coefficients[k] (y - centre)^k ~ y^power, for y in [1, top] and `slack` beyond, with relative `error`."""

    power: float
    centre: float
    slack: float
    error: float
    coefficients: tuple[float, float, float, float]
