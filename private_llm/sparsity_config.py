"""How predicted activation sparsity is used (Comet, IEEE S&P 2025): one frozen, checked configuration."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from private_llm.errors import ConfigError, refuse_unknown
from private_llm.typed_settings import check_types, settings_of


@dataclass(frozen=True)
class CometConfig:
    """What a private run leaves out, and what it opens for that.

    predictors: folder of `private-llm predictors train`, read by the model's owner alone; None where the model was
    shared with its predictors. neurons, heads: whether neurons and heads are left out, where there are predictors.
    orders: "fresh" opens every pattern in a secret order of its own, which links nothing, and leaves out activations
    of neurons only (heads need a kept order); "kept" opens patterns in the one secret order in which the owner stored
    the weights, so that products are left out as well. **A kept order tells a party that has the model your text**, as
    long as the model is not shared anew: on the bundled model 512 positions of anybody's text tell 81 to 93 % of the
    neurons' places, 8192 tell 99 to 100 %, without any known input; 32 known tokens of a prompt tell the 48 tokens
    after them, from one layer alone. Budgets of blocks of 16 lower it, to 7 of these 48 (docs/sparsity.md).
    levels: "budget" opens a fixed public number of units at each position, the predictors' own (`--budget-share`) or
    the share of units `neuron_budget` and `head_budget`, drawn at random; "open" (kept orders only) opens as many as
    are active, a side channel; "noisy" (fresh orders only) opens as many as are active in all positions of a call and
    noise, which is differentially private with `epsilon` and `delta` for counts that differ by one
    (oblivious/level_noise.py): it hides one neuron, no text.
    positions: most positions (tokens of all rows) that a private model computes in one kept order; None: any number. A
    call beyond it raises ConfigError before anything is sent: share the model anew, which draws new orders.
    Raises ConfigError.
    """

    predictors: str | None = None
    neurons: bool = True
    heads: bool = True
    orders: Literal["fresh", "kept"] = "fresh"
    levels: Literal["budget", "noisy", "open"] = "budget"
    neuron_budget: float | None = None
    head_budget: float | None = None
    epsilon: float = 0.1
    delta: float = 1e-6
    positions: int | None = None

    def __post_init__(self) -> None:
        check_types(self, "sparsity: ")
        if not (self.neurons or self.heads):
            raise ConfigError("sparsity: neither neurons nor heads are left out; want one of them, or sparsity=None")
        if not self.kinds:
            raise ConfigError("sparsity: heads are left out with orders='kept' only; got orders='fresh' and no neurons")
        for key in ("neuron_budget", "head_budget"):
            share = getattr(self, key)
            if share is None:
                continue
            if not 0 < share <= 1:
                raise ConfigError(f"sparsity: {key}: got {share!r}; want a share above 0 and at most 1")
            if self.levels != "budget":
                raise ConfigError(f"sparsity: {key}: levels={self.levels!r} opens what is active; leave the budget out")
        if self.positions is not None and self.positions < 1:
            raise ConfigError(f"sparsity: positions: got {self.positions!r}; want a number of at least 1, or None")
        if self.positions is not None and self.orders != "kept":
            raise ConfigError("sparsity: positions: fresh orders serve one opening each; want orders='kept', or None")
        self._check_levels()

    def _check_levels(self) -> None:
        wanted = {"open": "kept", "noisy": "fresh"}.get(self.levels, self.orders)
        if self.orders != wanted:
            raise ConfigError(f"sparsity: levels={self.levels!r} goes with orders={wanted!r}; got {self.orders!r}")
        for key, most in (("epsilon", 8), ("delta", 1)):
            value = getattr(self, key)
            if not 0 < value <= most:
                raise ConfigError(f"sparsity: {key}: got {value!r}; want a number above 0 and at most {most}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of units that are left out, "ffn" and "heads"."""
        heads = self.heads and self.orders == "kept"
        return (("ffn",) if self.neurons else ()) + (("heads",) if heads else ())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CometConfig":
        """Build from a mapping; unknown keys raise ConfigError."""
        refuse_unknown(values, settings_of(cls), "sparsity: ")
        return cls(**values)

    def agreed(self) -> dict[str, Any]:
        """What all parties must agree upon, so without the owner's predictors, their budgets and positions."""
        own = ("predictors", "neuron_budget", "head_budget", "positions")
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in own}
