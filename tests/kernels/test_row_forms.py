"""Inner products of rows beside their products with one row: against integers, wrap-around included."""

from __future__ import annotations

from operator import add, mul

import pytest
import torch
from torch import Tensor

from private_llm.kernels.forms import InnerAndScaled


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (5, 64)])
def test_inner_and_scaled(rows: int, width: int, dtype: torch.dtype) -> None:
    info, form = torch.iinfo(dtype), InnerAndScaled()
    generator = torch.Generator().manual_seed(rows)
    x, x1 = (torch.randint(info.min, info.max, (rows, width), dtype=dtype, generator=generator) for _ in range(2))
    y, y1 = (torch.randint(info.min, info.max, (rows + 1, width), dtype=dtype, generator=generator) for _ in range(2))
    x[0, 0] = y[0, 0] = info.min

    def whole(a: Tensor, b: Tensor) -> list[list[int]]:
        *others, last = b.tolist()
        return [
            [sum(map(mul, row, other)), *map(mul, row, last)] for row, other in zip(a.tolist(), others, strict=True)
        ]

    def same(made: Tensor, want: list[list[int]]) -> bool:
        size = 1 << info.bits
        return [[v % size for v in row] for row in made.tolist()] == [[v % size for v in row] for row in want]

    made = form.product(x, y)
    assert made.dtype == dtype
    assert same(made, whole(x, y))
    sums = [list(map(add, *rows)) for rows in zip(whole(x, y), whole(x1, y1), strict=True)]
    assert same(form.pair(x, y, x1, y1), sums)
    real = form.real(x.double(), y.double())
    assert torch.allclose(real[:, 0], (x.double() * y[:-1].double()).sum(-1))
    assert form.macs(x.shape, y.shape) == 2 * rows * width
