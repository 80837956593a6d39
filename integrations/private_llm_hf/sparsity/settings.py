"""What a predictor is and how it is trained, as two frozen settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

from private_llm.errors import ConfigError, refuse_unknown

Kind = Literal["ffn", "heads"]
KINDS: tuple[Kind, ...] = ("ffn", "heads")


class _Settings:
    """Reading and writing as JSON."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises ConfigError for unknown keys and for values that are refused."""
        refuse_unknown(values, {item.name for item in fields(cls)}, f"{cls.__name__}: ")  # type: ignore[arg-type]
        return cls(**values)


@dataclass(frozen=True)
class PredictorConfig(_Settings):
    """One predictor: score = W2 a(W1 x + b1) + b2, a unit is predicted active where its score exceeds the threshold.

    kind: "ffn" (units are neurons, from what FC1 or gate and up receive) or "heads" (units are attention heads, from
    what q receives). rank: rows of W1. hidden: a, "linear" (Comet) or "relu" (the public format of PowerInfer).
    block: neurons per unit; a block is active if any of its neurons is. target_recall: least share of the active
    neurons (heads) that calibration puts above threshold 0 on validation data. budget: share of units that every
    position computes, at random among those that are predicted if they are more, and with others if they are fewer;
    None: those that are predicted. tolerance: how much of its norm the output of an attention block may lose by
    leaving inactive heads out (`predictor.py`). Raises ConfigError.
    """

    rank: int = 32
    threshold: float = 0.0
    block: int = 1
    kind: Kind = "ffn"
    hidden: Literal["linear", "relu"] = "linear"
    target_recall: float = 0.95
    budget: float | None = None
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        for name in ("rank", "block"):
            _whole(name, getattr(self, name), 1)
        if self.kind not in KINDS:
            raise ConfigError(f"kind: got {self.kind!r}; want one of {', '.join(KINDS)}")
        if self.hidden not in ("linear", "relu"):
            raise ConfigError(f"hidden: got {self.hidden!r}; want 'linear' or 'relu'")
        if self.kind == "heads" and self.block != 1:
            raise ConfigError(f"block: got {self.block} for heads; want 1, heads are predicted one by one")
        _number("threshold", self.threshold, -math.inf, math.inf)
        _number("target_recall", self.target_recall, 0.0, 1.0)
        _number("tolerance", self.tolerance, 0.0, 1.0)
        if self.budget is not None:
            _number("budget", self.budget, 0.0, 1.0, closed=True)


@dataclass(frozen=True)
class TrainingConfig(_Settings):
    """How a predictor is trained: AdamW whose rate falls linearly to zero over `epochs`, early stop after `patience`.

    batch: positions a step. validation: share of the positions that are held out, in runs of consecutive ones.
    most_rows: positions that are used of a longer recording (None: all). group: put neurons that are active together
    into one block (`training.py`) where blocks are predicted. Raises ConfigError.
    """

    epochs: int = 12
    batch: int = 1024
    rate: float = 2e-3
    decay: float = 1e-4
    patience: int = 3
    validation: float = 0.1
    most_rows: int | None = None
    seed: int = 0
    group: bool = True

    def __post_init__(self) -> None:
        for name, least in (("epochs", 0), ("batch", 1), ("patience", 1), ("seed", 0)):
            _whole(name, getattr(self, name), least)
        if self.most_rows is not None:
            _whole("most_rows", self.most_rows, 2)
        _number("rate", self.rate, 0.0, math.inf)
        _number("decay", self.decay, -1e-300, math.inf)
        _number("validation", self.validation, 0.0, 1.0)


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}: got {value!r}; want a whole number of at least {least}")


def _number(name: str, value: object, low: float, high: float, closed: bool = False) -> None:
    """Strictly between the bounds, or up to the higher one."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or not (low < float(value) < high or (closed and value == high)):  # type: ignore[arg-type]
        where = "a finite number" if math.isinf(low) else f"a number above {max(low, 0.0):g}"
        where += "" if math.isinf(high) else f" and {'at most' if closed else 'below'} {high:g}"
        raise ConfigError(f"{name}: got {value!r}; want {where}")
