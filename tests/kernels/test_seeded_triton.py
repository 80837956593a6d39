"""Products with masks that are made within kernels of GPUs, in Triton's interpreter: bit for bit those of the whole."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from private_llm.kernels.seeded_tensor import SeededTensor
from private_llm.ring.prg import Seed
from private_llm.ring.ring import RING32, RING64, Ring
from tests.kernels import reference
from tests.kernels.cases import Draw

SEED = Seed(bytes(range(32)), "chacha20")
SIZES = ((1, 1, 1), (2, 16, 48), (3, 37, 21), (1, 150, 11), (5, 5, 34), (9, 17, 6), (20, 130, 35), (11, 128, 64))
"""Rows of x, inner size, columns: a line within a block, of whole blocks, across programs; few rows and many."""


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Those that are tried; large ones are used, because the interpreter takes as long for a block as for a hundred."""
    seeded = module("seeded_triton")
    given = seeded.TUNER.tiles
    tile = dataclasses.replace(given[0], rows=32, columns=16, share=2)
    monkeypatch.setattr(seeded, "TUNER", type(seeded.TUNER)((tile,)))
    return given


def module(name: str) -> Any:
    pytest.importorskip("triton")
    return importlib.import_module(f"private_llm.kernels.matmul.{name}")


def drawn_and_whole(ring: Ring, lines: int, width: int, turned: bool) -> list[tuple[Tensor, Tensor]]:
    """A mask, and others cut from its middle and joined of two streams, each with the same in memory."""
    found = []
    for label in ("w", "v"):
        mask, whole = SEED.drawn(label, (lines, width), ring), SEED.stream(label).elements(lines * width, ring)
        found.append((mask, whole.view(lines, width)))
    (mask, whole), (other, beside) = found
    cut = lines // 3
    joined = torch.cat([mask[cut:], other[:cut]]), torch.cat([whole[cut:], beside[:cut]])
    every = [(mask, whole), joined]
    assert all(isinstance(each, SeededTensor) and each.on_gpus for each, _ in every)
    return [(each.t(), held.t()) if turned else (each, held) for each, held in every]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("ring", [RING64, RING32], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=("rows", "turned"))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products(size: tuple[int, int, int], turned: bool, ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, (rows, inner, columns) = module("triton"), size
    draw = Draw(f"seeded {size}")
    x, z, y = draw.ring(ring, rows, inner), draw.ring(ring, rows, inner), draw.ring(ring, inner, columns)
    held = y.t().contiguous().t() if turned else y
    masks = drawn_and_whole(ring, *((columns, inner) if turned else (inner, columns)), turned)
    monkeypatch.setattr(SeededTensor, "made", lambda _: pytest.fail("made whole"))
    for (mask, whole), fused in zip(masks, (False, True), strict=True):
        wanted = reference.ring_matmul(x, whole) + z @ y
        made = matmul.pair(z, held, x, mask) if fused else matmul.product(x, mask, z @ y)
        assert torch.equal(made, wanted)
        assert torch.equal(module("seeded_triton").made(mask), whole)


@pytest.mark.full
@pytest.mark.parametrize("tile", range(4))
@pytest.mark.parametrize("turned", [False, True], ids=("rows", "turned"))
def test_every_tile_adds_up_the_same(
    turned: bool, tile: int, tiles: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also stacked rows, and two masks, which is what the helper multiplies by."""
    matmul, seeded = module("triton"), module("seeded_triton")
    monkeypatch.setattr(seeded, "TUNER", type(seeded.TUNER)((tiles[tile],)))
    (mask, whole), (other, beside) = drawn_and_whole(RING64, 33, 20, turned)
    draw = Draw("tiles")
    x, z = draw.ring(RING64, 2, 1, whole.shape[0]), draw.ring(RING64, 2, 1, whole.shape[0])
    assert torch.equal(matmul.pair(x, mask, z, other), reference.ring_matmul_pair(x, whole, z, beside))


@pytest.mark.full
@pytest.mark.parametrize("ring", [RING64, RING32], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=("rows", "turned"))
@pytest.mark.parametrize("inner", [16, 21])
def test_digits_of_some_columns(inner: int, turned: bool, ring: Ring) -> None:
    """As of a matrix with more columns than planes are held of at a time; also across two slices."""
    planes, seeded, columns = module("planes"), module("seeded_triton"), 48
    for mask, whole in drawn_and_whole(ring, *((columns, inner) if turned else (inner, columns)), turned):
        for first, last in ((0, 16), (3, 40)):
            wanted = planes.take_apart(whole[:, first:last].mT[None])
            assert torch.equal(seeded.take_apart(mask, first, last), wanted)


def test_what_kernels_do_not_make_is_made_whole() -> None:
    """AES streams, masks of three dimensions, listed rows, and a mask on the left."""
    matmul = module("triton")
    mask, whole = Seed(bytes(32)).drawn("w", (6, 5), RING64), Seed(bytes(32)).stream("w").elements(30, RING64)
    x = Draw("x").ring(RING64, 2, 5)
    assert torch.equal(matmul.product(x, mask.t()), x @ whole.view(6, 5).t())
    stacked, held = SEED.drawn("w", (2, 5, 3), RING64), SEED.stream("w").elements(30, RING64).view(2, 5, 3)
    assert torch.equal(matmul.product(x, stacked), x @ held)
    listed = torch.tensor([4, 0, 4])
    assert torch.equal(matmul.listed_product(x[:, :3], stacked[0], listed, False), x[:, :3] @ held[0][listed])
    assert torch.equal(matmul.listed_product(x[:, :3], stacked[1], listed, True), x[:, :3] @ held[1][listed].t())
    assert torch.equal(matmul.product(stacked[0], x[:, :3].t()), held[0] @ x[:, :3].t())
