"""How predicted activation sparsity is used (Comet, IEEE S&P 2025): one frozen, checked configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from private_llm.errors import ConfigError, refuse_unknown

_CHOICES: dict[str, tuple[object, ...]] = {
    "orders": ("fresh", "kept"),
    "levels": ("budget", "open"),
    "neurons": (True, False),
    "heads": (True, False),
}


@dataclass(frozen=True)
class CometConfig:
    """What a private run leaves out, and what it opens for that.

    predictors: folder of `scripts/train_predictors.py`, read by the model's owner alone; None where the model was
    shared with its predictors. neurons, heads: whether feed-forward neurons and attention heads are left out, where
    there are predictors of them.
    orders: "fresh" opens every pattern in a secret order of its own, which links nothing, and leaves out activations
    of neurons only (heads need a kept order); "kept" opens patterns in the one secret order in which the owner stored
    the weights, so that products are left out as well. Patterns in a kept order are linked: whoever knows the model
    and some inputs finds out which neurons are which (docs/threat-model.md), until the model is shared anew.
    levels: "budget" opens a fixed public number of units at each position, the predictors' own (`--budget-share`) or
    the share of units `neuron_budget` and `head_budget`; "open" opens as many as are active, a side channel.
    Raises ConfigError.
    """

    predictors: str | None = None
    neurons: bool = True
    heads: bool = True
    orders: Literal["fresh", "kept"] = "fresh"
    levels: Literal["budget", "open"] = "budget"
    neuron_budget: float | None = None
    head_budget: float | None = None

    def __post_init__(self) -> None:
        for key, allowed in _CHOICES.items():
            given = getattr(self, key)
            if not any(type(given) is type(value) and given == value for value in allowed):
                raise ConfigError(f"sparsity: {key}: got {given!r}; want {' or '.join(map(repr, allowed))}")
        if self.predictors is not None and not isinstance(self.predictors, str):
            raise ConfigError(f"sparsity: predictors: got {self.predictors!r}; want the path of a folder, or None")
        if not (self.neurons or self.heads):
            raise ConfigError("sparsity: neither neurons nor heads are left out; want one of them, or sparsity=None")
        if not self.kinds:
            raise ConfigError("sparsity: heads are left out with orders='kept' only; got orders='fresh' and no neurons")
        if self.orders == "fresh" and self.levels == "open":
            raise ConfigError(
                "sparsity: orders='fresh' always opens a public number of places; want levels='budget' or orders='kept'"
            )
        for key in ("neuron_budget", "head_budget"):
            share = getattr(self, key)
            if share is None:
                continue
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
                raise ConfigError(f"sparsity: {key}: got {share!r}; want a share above 0 and at most 1")
            if self.levels == "open":
                raise ConfigError(f"sparsity: {key}: levels='open' opens what is active; leave the budget out")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of units that are left out, "ffn" and "heads"."""
        heads = self.heads and self.orders == "kept"
        return (("ffn",) if self.neurons else ()) + (("heads",) if heads else ())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CometConfig:
        """Build from a mapping; unknown keys raise ConfigError."""
        refuse_unknown(values, [item.name for item in dataclasses.fields(cls)], "sparsity: ")
        return cls(**values)

    def agreed(self) -> dict[str, Any]:
        """What all parties must agree upon: all but where the owner's predictors lie and what their budgets became."""
        own = ("predictors", "neuron_budget", "head_budget")
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in own}
