"""What an estimate is of: the work, and the links and processors that do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.token_sharding import Stage, seconds_of
from private_llm_cli.bench.link import LinkSpeed
from private_llm_cli.commands.doctor import float_speed, matmul_speed

if TYPE_CHECKING:
    from private_llm_hf.tools.estimate import LayerCost


@dataclass(frozen=True)
class Hardware:
    """Links and processors. ring, floats: billion multiply-adds a second of a party (in its ring) and of a node."""

    link: LinkSpeed
    ring: float
    floats: float

    @classmethod
    def of(cls, bandwidth: float, latency: float, gmacs: float | None, sharded: bool) -> Hardware:
        """gmacs None: measured here. Raises ConfigError for impossible values."""
        link = LinkSpeed(bandwidth, latency)
        if gmacs is None:
            return cls(link, matmul_speed(), float_speed() if sharded else 0.0)
        if not gmacs > 0:
            raise ConfigError(f"gmacs: got {gmacs:g}; want a positive number")
        return cls(link, gmacs, gmacs)

    def gmacs(self, layer: LayerCost) -> float:
        """The speed that counts in this layer."""
        return self.floats if layer.stages else self.ring

    def speeds(self, config: PrivateConfig) -> list[str]:
        """The speeds that count in a session, in words."""
        parties = [] if config.protocol == "cascade" else [f"{self.ring:.1f} GMAC/s per party"]
        return parties + ([] if config.plan is None else [f"{self.floats:.1f} GMAC/s per node"])

    def seconds(self, layer: LayerCost) -> float:
        """Time of one layer."""
        return layer.seconds(self.link.bandwidth_mbit, self.link.latency_ms, self.gmacs(layer))

    def stages(self, stages: Sequence[Stage]) -> float:
        """Time of stages one after the other."""
        return seconds_of(stages, self.link.bandwidth_mbit, self.link.latency_ms, self.floats)


@dataclass(frozen=True)
class Workload:
    """What is estimated: one forward of `sequence` tokens (0: images), or `new` tokens after them.

    sparsity: what predictors leave out, as it was given. replaced: the activation that ReLU took the place of.
    """

    model: str
    sequence: int
    new: int
    batch: int
    sparsity: str = ""
    replaced: str | None = None

    def __str__(self) -> str:
        forward = f"one forward of {self.sequence} tokens" if self.sequence else "images"
        done = f"{self.new} tokens after {self.sequence}" if self.new else forward
        sparse = f", sparse: {self.sparsity}" if self.sparsity else ""
        relu = f", ReLU in place of {self.replaced}" if self.replaced else ""
        return f"{self.model}: {done}, batch {self.batch}{sparse}{relu}"
