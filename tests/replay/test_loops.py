"""Loops over ring elements (`replay/loops.py`): every operation in every layout is PyTorch's."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from private_llm.kernels import steps
from private_llm.kernels.compiling import CompiledStep
from private_llm.replay import loops, runner
from private_llm.replay.program import Word

OPERATIONS: list[tuple[int, Callable[[Tensor, Tensor], Tensor]]] = [
    (steps.ADD, operator.add), (steps.SUB, operator.sub), (steps.MUL, operator.mul), (steps.XOR, operator.xor),
    (steps.AND, operator.and_), (steps.RIGHT, lambda x, y: x >> (y & 63)), (steps.ADD_TIMES, lambda x, y: x - 3 * y),
]  # fmt: skip
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x[:5, :37].clone(), "lines": lambda x: x[:5, :37], "gaps": lambda x: x[:5, ::2][:, :37],
    "turned": lambda x: x.T[:5, :37], "one": lambda x: x[:1, :1], "one a line": lambda x: x[:5, :1],
    "one line": lambda x: x[:1, :37],
}  # fmt: skip


def at_once(code: CompiledStep, row: Sequence[Word | Tensor]) -> None:
    """Run a step as soon as it is written down."""
    words = [each.data_ptr() if isinstance(each, Tensor) else each for each in row]
    table, starts = np.array([code.address, *words], np.int64), np.zeros(1, np.int64)
    assert runner.run(int(table.ctypes.data), int(starts.ctypes.data), 0, 1, 0, 0) == 1


@pytest.mark.parametrize("made", ["dense", "gaps"])
@pytest.mark.parametrize(("operation", "wanted"), OPERATIONS)
def test_an_operation_in_all_layouts(operation: int, wanted: Callable[[Tensor, Tensor], Tensor], made: str) -> None:
    torch.manual_seed(operation)
    first, second = torch.randint(-(2**63), 2**63 - 1, (2, 80, 80))
    for layout, view in LAYOUTS.items():
        for other, beside in LAYOUTS.items():
            x, y = view(first), beside(second)
            y = y & 63 if operation == steps.RIGHT else y
            out = LAYOUTS[made](torch.zeros(80, 80, dtype=torch.int64))
            loops.combine(at_once, out, x, y, operation, -3)
            assert torch.equal(out, wanted(x, y).expand(5, 37)), (layout, other)


def test_copies_and_sums() -> None:
    torch.manual_seed(1)
    given = torch.randint(-(2**63), 2**63 - 1, (80, 80))
    for layout, view in LAYOUTS.items():
        for made in ("dense", "gaps"):
            out = LAYOUTS[made](torch.zeros(80, 80, dtype=torch.int64))
            loops.copy(at_once, out, view(given))
            assert torch.equal(out, view(given).expand(5, 37)), layout
        wide = view(given).expand(5, 37)
        total = torch.zeros(5, dtype=torch.int64)
        loops.LOWERED[torch.ops.aten.sum.dim_IntList](at_once, total, wide, [1])
        assert torch.equal(total, wide.sum(1)), layout


def test_an_operand_may_be_written() -> None:
    x, y = torch.arange(100), torch.arange(100) * 7
    loops.combine(at_once, x, x, y, steps.ADD)
    assert torch.equal(x, torch.arange(100) * 8)
