"""Which adder a comparison uses: few rounds (prefix), few bytes (ripple), or none (keys); from public sizes alone.

All parties decide alike, because sizes, bandwidth and latency are part of what they agreed upon.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from private_llm.net.ledger import Cost
from private_llm.protocol_facts import may_take_keys

ROUND_S = 1e-4
"""Computing that one round costs besides the network: a few calls of Python (measured 0.06 to 0.15 ms)."""

BLOCK_S = 6e-9
"""A block of the cipher of comparison keys, on one thread, with what is done with it (measured 5 to 7 ns)."""


@dataclass(frozen=True)
class Adder:
    """The choice of `PrivateConfig.adder` with the network it is made for: Mbit/s each way, one-way latency in ms.

    Without a bandwidth "auto" is the prefix adder.
    """

    kind: Literal["auto", "prefix", "ripple", "keys"] = "auto"
    bandwidth_mbit: float | None = None
    latency_ms: float = 0.05

    def ripples(self, prefix: Callable[[], Cost], ripple: Callable[[], Cost]) -> bool:
        """Whether the ripple adder is the one to use, given what each would cost (asked for only if it matters)."""
        if self.kind != "auto" or self.bandwidth_mbit is None:
            return self.kind == "ripple"
        return self.seconds(ripple(), self.bandwidth_mbit) < self.seconds(prefix(), self.bandwidth_mbit)

    @property
    def may_take_keys(self) -> bool:
        """Whether `takes_keys` may ever say yes."""
        return may_take_keys(self.kind, self.bandwidth_mbit)

    def takes_keys(self, keys: Callable[[], Cost], other: Callable[[], Cost], blocks: int) -> bool:
        """Whether comparison keys are the way to go, by what they and the other way cost, and blocks of the cipher."""
        if self.kind != "auto" or self.bandwidth_mbit is None:
            return self.kind == "keys"
        seconds = self.key_seconds(keys(), blocks)
        return seconds is not None and seconds < self.seconds(other(), self.bandwidth_mbit)

    def key_seconds(self, keys: Cost, blocks: int) -> float | None:
        """How long comparison keys take, by their cost and blocks of the cipher; None without a stated bandwidth."""
        return None if self.bandwidth_mbit is None else self.seconds(keys, self.bandwidth_mbit) + blocks * BLOCK_S

    def seconds(self, cost: Cost, bandwidth_mbit: float) -> float:
        """Rounds, and the busiest direction of the busiest party's connection (preprocessing included)."""
        used: dict[tuple[int, bool], int] = defaultdict(int)
        for (sender, receiver), count in cost.sent.items():
            used[sender, True] += count
            used[receiver, False] += count
        wire = max(used.values(), default=0) * 8 / (bandwidth_mbit * 1e6)
        return wire + cost.rounds * (self.latency_ms * 1e-3 + ROUND_S)


DEFAULT_ADDER = Adder()
