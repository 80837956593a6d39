"""What a predictor is and how it is trained, as two frozen settings."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self

from private_llm.errors import ConfigError, refuse_unknown
from private_llm.typed_settings import check_types

Kind = Literal["ffn", "heads"]
KINDS: tuple[Kind, ...] = ("ffn", "heads")


class _Settings:
    """Reading and writing as JSON, and refusals."""

    def _demand(self, name: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise ConfigError(f"{name}: got {getattr(self, name)!r}; want {wanted}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises ConfigError for unknown keys and wrong values."""
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
        check_types(self)
        self._demand("rank", self.rank >= 1, "at least 1")
        self._demand("block", self.block >= 1, "at least 1")
        self._demand("block", self.kind != "heads" or self.block == 1, "1 for heads, which are predicted one by one")
        self._demand("target_recall", 0 < self.target_recall < 1, "a number above 0 and below 1")
        self._demand("tolerance", 0 < self.tolerance < 1, "a number above 0 and below 1")
        self._demand("budget", self.budget is None or 0 < self.budget <= 1, "a number above 0 and at most 1")


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
        check_types(self)
        for name, least in (("epochs", 0), ("batch", 1), ("patience", 1), ("seed", 0), ("decay", 0)):
            self._demand(name, getattr(self, name) >= least, f"at least {least}")
        self._demand("most_rows", self.most_rows is None or self.most_rows >= 2, "at least 2")
        self._demand("rate", self.rate > 0, "a number above 0")
        self._demand("validation", 0 < self.validation < 1, "a number above 0 and below 1")
