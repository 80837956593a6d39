"""The choice of tiles, with a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from private_llm.kernels.matmul.planes import Tile, Tuner, size_range

TILES = (Tile(64, 64), Tile(16, 64, warps=4), Tile(128, 128))


def test_the_fastest_tile_is_found_once_for_each_key() -> None:
    launched: list[Tile] = []
    seconds = {TILES[0]: 3.0, TILES[1]: 1.0, TILES[2]: 2.0}

    def measure(run: Callable[[], None]) -> float:
        run()
        return seconds[launched[-1]]

    tuner = Tuner(TILES, measure)
    assert tuner.best("a", launched.append) == TILES[1]
    assert launched == list(TILES)
    seconds[TILES[2]] = 0.5
    assert tuner.best("a", launched.append) == TILES[1]
    assert tuner.best("b", launched.append) == TILES[2]
    assert launched == 2 * list(TILES)


def test_tiles_that_do_not_fit_are_passed_over() -> None:
    def launch(tile: Tile) -> None:
        if tile != TILES[2]:
            raise OutOfResources(1 << 20, 1 << 16, "shared memory")

    def measure(run: Callable[[], None]) -> float:
        run()
        return 1.0

    assert Tuner(TILES, measure).best("a", launch) == TILES[2]


def test_sizes_are_ranged_by_powers_of_two() -> None:
    assert size_range(0, 1, 2, 3, 4, 5, 128, 129) == (0, 0, 1, 2, 2, 3, 7, 8)


def test_a_tile_names_the_constants_of_a_kernel() -> None:
    assert Tile(1, 2, 3, 4, 5).constants == {"BM": 1, "BN": 2, "BK": 3, "num_warps": 4, "num_stages": 5}
