"""Convolutions on register tiles, on byte tiles and on several threads: the same bits, whatever the sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from private_llm.kernels import conv, matmul, ops
from private_llm.kernels.conv import cpu as cpu_conv
from private_llm.kernels.matmul import amx as cpu_amx
from private_llm.kernels.matmul import amx_tiles
from private_llm.ring.ring import Ring
from tests.kernels.cases import RINGS, Case, Draw, conv_cases, expected, operation, run
from tests.kernels.reference import ring_conv2d

SIZES = [
    # x, w, stride, padding, dilation, groups: sizes that byte tiles take
    ((3, 5, 9, 7), (35, 5, 3, 3), (1, 1), (1, 1), (1, 1), 1),  # positions of several images in a panel, odd rows
    ((1, 30, 6, 33), (130, 30, 3, 3), (1, 1), (0, 1), (1, 1), 1),  # more rows and more steps than a block
    ((2, 33, 11, 20), (34, 33, 2, 3), (2, 2), (1, 0), (2, 1), 1),
    ((2, 40, 8, 8), (64, 20, 3, 1), (1, 2), (1, 1), (1, 1), 2),
    ((17, 16, 4, 4), (16, 16, 3, 3), (1, 1), (1, 1), (1, 2), 1),  # many small images
    ((2, 47, 5, 6), (20, 47, 3, 3), (1, 1), (1, 1), (1, 1), 1),  # 423 entries: more than a block, no multiple of four
    ((9, 64, 2, 2), (16, 64, 2, 2), (1, 1), (1, 1), (1, 1), 1),
]


@pytest.fixture(params=["byte", "register"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which kernel has to do it."""
    if request.param == "register":
        monkeypatch.setattr(cpu_amx, "usable", lambda: False)
    elif not cpu_amx.usable():
        pytest.skip("this processor has no byte tiles (AMX)")
    else:
        monkeypatch.setattr(matmul, "tiled", lambda *_: True)
    return str(request.param)


@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_both_kinds_of_tiles(ring: Ring, size: tuple[Any, ...], tiles: str) -> None:
    left, right, stride, padding, dilation, groups = size
    how = (stride, padding, dilation, groups)
    draw = Draw(f"tiles {left}")
    x, w = draw.ring(ring, *left), draw.ring(ring, *right)
    want = ring_conv2d(x, w, *how)
    onto = draw.ring(ring, *want.shape)
    assert torch.equal(ops.ring_conv2d(x, w, *how), want)
    assert torch.equal(conv.product(x, w, *how, onto.clone()), want + onto)


@pytest.mark.parametrize("case", list(conv_cases()), ids=str)
def test_small_cases_on_both(case: Case, tiles: str) -> None:
    assert all(map(torch.equal, run(operation(case.op), case), expected(case)))


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("images", [1, 5])
@pytest.mark.parametrize("groups", [1, 2])
def test_threads_share_images_or_outputs(
    threads: int, images: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("private_llm.kernels.parallel.threads", lambda seconds: threads)
    draw = Draw("threads")
    x, w = draw.ring(RINGS[1], images, 4, 9, 9), draw.ring(RINGS[1], 70, 4 // groups, 3, 3)
    how = ((1, 1), (1, 1), (1, 1), groups)
    assert torch.equal(ops.ring_conv2d(x, w, *how), ring_conv2d(x, w, *how))


@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_largest_bytes(ring: Ring, tiles: str) -> None:
    """Bytes of all ones make the largest sums of byte products."""
    x = torch.full((1, 600, 3, 16), -1, dtype=ring.dtype)
    w = torch.full((16, 600, 3, 1), -1, dtype=ring.dtype)
    assert torch.equal(
        ops.ring_conv2d(x, w, (1, 1), (0, 0), (1, 1), 1), torch.full((1, 16, 1, 16), 1800).to(ring.dtype)
    )


def test_scratch_suffices() -> None:
    """Convolutions borrow the scratch memory of matrix products."""
    planes = 64 + 4 * cpu_conv.BLOCK * (cpu_conv.PANEL + cpu_amx.ROWS_IN_CACHE) + amx_tiles.SUMS_BYTES
    assert planes <= cpu_amx.DESK_BYTES + cpu_amx.PRODUCT_BYTES
