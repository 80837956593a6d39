"""What primitives send and wait for, by formulas of public shapes beside them, and the adder that comparisons choose.

The common test suite compares them with the ledger, byte for byte. All parties choose alike, because sizes, bandwidth
and latency are part of what they agreed upon.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from private_llm.net.ledger import Cost
from private_llm.protocols.share import words_for
from private_llm.ring.ring import Ring


class Prices:
    """Bytes by link and online rounds of each primitive: `prices.msb(...)` is `msb_price` of the class that has it.

    Counts are numbers of elements, widths numbers of columns, shifts and ranges numbers of bits; e is the bytes of an
    element, bits are packed into words of 8 bytes. Trio's link (0, 2) carries preprocessing, (1, 2) and (2, 1) the
    rest. What no class prices, the protocol does not have.
    """

    def __init__(self, *classes: type) -> None:
        """classes: with static methods `..._price`, of which those of later classes count."""
        for each in classes:
            named = [name for name in dir(each) if name.endswith("_price")]
            vars(self).update({name.removesuffix("_price"): getattr(each, name) for name in named})

    def permutation(self, size: int) -> Cost:
        """`permutation` of `size` elements: nothing is sent where all come from streams that parties share."""
        return Cost()

    def shuffle(self, ring: Ring, count: int, undo: bool = False, left: int | None = None) -> Cost:
        """`shuffle` of `count` elements in all (rows times columns), of which `left` are wanted (None: all)."""
        return self.moved(count * ring.bytes, undo, None if left is None else left * ring.bytes)

    def shuffle_bits(self, count: int, rows: int = 1, undo: bool = False) -> Cost:
        """`shuffle_bits` of `rows` vectors of `count` bits, or with `undo` `unshuffle_bits`."""
        return self.moved(8 * words_for(count) * rows, undo, None)

    def a2b(self, ring: Ring, count: int, bits: int | None = None) -> Cost:
        """`a2b` of `count` elements, `bits` of each (None: all): always the ripple adder."""
        return self.msb_ripple(count, bits or ring.bits)

    def __getattr__(self, name: str) -> Callable[..., Cost]:
        raise AttributeError(f"prices: got {name!r}; want one of {', '.join(sorted(vars(self)))}")


ROUND_S = 1e-4  # computing that one round costs besides the network: a few calls of Python (measured 0.06 to 0.15 ms)

BLOCK_S = 6e-9  # a block of the cipher of comparison keys and what is done with it, on one thread (5 to 7 ns)


@dataclass(frozen=True)
class Adder:
    """How comparisons add: few rounds (prefix), few bytes (ripple), or not at all (keys). `PrivateConfig.adder`.

    With the network it is chosen for: Mbit/s each way, one-way latency in ms. Without one "auto" is the prefix adder.
    """

    kind: Literal["auto", "prefix", "ripple", "keys"] = "auto"
    bandwidth_mbit: float | None = None
    latency_ms: float = 0.05

    def ripples(self, prefix: Callable[[], Cost], ripple: Callable[[], Cost]) -> bool:
        """Whether the ripple adder is the one to use, given what each would cost (asked for only if it matters)."""
        if self.kind != "auto" or self.bandwidth_mbit is None:
            return self.kind == "ripple"
        return self.seconds(ripple(), self.bandwidth_mbit) < self.seconds(prefix(), self.bandwidth_mbit)

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
