"""Shapes that an estimate finds without PyTorch's help are PyTorch's."""

import pytest
import torch
from private_llm_hf.tools.priced_once import QuickShapes

INT, REAL = torch.int64, torch.float64


def meta(*shape, dtype=INT):
    return torch.empty(shape, dtype=dtype, device="meta")


CASES = {
    "same": lambda: meta(3, 4) + meta(3, 4),
    "broadcast": lambda: meta(3, 1, 4) * meta(5, 1),
    "scalar": lambda: meta(3) - 7,
    "no dimension": lambda: meta() ^ meta(2, 0),
    "a number by a whole": lambda: meta(3, dtype=REAL) * 2,
    "a whole by a number": lambda: meta(3) * 2.5,
    "two types": lambda: meta(3) + meta(3, dtype=torch.int32),
    "weighted": lambda: torch.add(meta(2, 3), meta(3), alpha=5),
    "onto": lambda: torch.add(meta(2, 3), meta(3), alpha=5, out=meta(2, 3)),
    "minus": lambda: -meta(2, 3).mT,
    "joined": lambda: torch.cat([meta(2, 3), meta(2, 0), meta(2, 4)], -1),
    "joined types": lambda: torch.cat([meta(2, 3), meta(1, 3, dtype=torch.int32)]),
    "stacked": lambda: torch.stack([meta(2, 3), meta(2, 3)]),
    "a view of a sum": lambda: (meta(4, 6).mT + meta(6, 4)).view(-1),
}
"""Results with the strides of a contiguous tensor, but for the last, which a real tensor would refuse."""


@pytest.mark.parametrize("name", CASES)
def test_shapes_and_types_are_the_usual(name):
    with QuickShapes():
        quick = CASES[name]()
    usual = CASES[name]() if name != "a view of a sum" else meta(24)
    assert (quick.shape, quick.dtype, quick.device) == (usual.shape, usual.dtype, usual.device)


@pytest.mark.parametrize("wrong", [lambda: meta(3) + meta(4), lambda: torch.cat([meta(2, 3), meta(2, 4)])])
def test_what_does_not_fit_is_still_refused(wrong):
    with QuickShapes(), pytest.raises(RuntimeError):
        wrong()


def test_real_tensors_keep_their_values():
    with QuickShapes():
        assert (torch.arange(3) + torch.arange(3)).tolist() == [0, 2, 4]
        assert torch.cat([torch.ones(1), meta(1, dtype=torch.float32).new_ones(0, device="cpu")]).tolist() == [1.0]
