"""Which tile of a product is fastest, tried out once for each range of sizes on each GPU.

Sizes are ranged by powers of two: decoding makes new sizes at every step, and trying out costs more than a product.
Results do not depend on the tile, so parties need not choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from private_llm.kernels.devices import ALONE


@dataclass(frozen=True)
class Tile:
    """Outputs (BM x BN) of one program, steps of the inner dimension at a time, warps, and loads under way.

    share: of kernels whose tiles are sums of several products, how many of these one program makes.
    """

    rows: int
    columns: int
    inner: int = 32
    warps: int = 8
    stages: int = 2
    share: int = 1

    @property
    def constants(self) -> dict[str, int]:
        """As a kernel takes them."""
        return {
            "BM": self.rows, "BN": self.columns, "BK": self.inner, "num_warps": self.warps, "num_stages": self.stages
        }  # fmt: skip


def size_range(*sizes: int) -> tuple[int, ...]:
    """The power of two that holds each size."""
    return tuple(max(size - 1, 0).bit_length() for size in sizes)


def _briefly(run: Callable[[], None]) -> float:
    """Milliseconds of `run`, measured for a few of them: a model meets dozens of sizes."""
    made: float = do_bench(run, warmup=1, rep=4)
    return made


class Tuner:
    """Remembers the fastest of `tiles` for each key; the first one is used where nothing can be measured."""

    def __init__(self, tiles: Sequence[Tile], measure: Callable[[Callable[[], None]], float] = _briefly) -> None:
        self.tiles = tuple(tiles)
        self._measure = measure
        self._best: dict[object, Tile] = {}

    def best(self, key: object, launch: Callable[[Tile], None]) -> Tile:
        """The tile for `key`; `launch` must be harmless to repeat. Tiles that do not fit the GPU are passed over."""
        found = self._best.get(key)
        if found is None:
            with ALONE:  # parties may be threads
                found = self._best.get(key)
                if found is None:
                    found = self._best[key] = min(self.tiles, key=lambda tile: self._seconds(tile, launch))
        return found

    def _seconds(self, tile: Tile, launch: Callable[[Tile], None]) -> float:
        try:
            return self._measure(lambda: launch(tile))
        except OutOfResources:
            return float("inf")
