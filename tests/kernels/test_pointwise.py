"""Batches of elementwise operations: Triton's kernel (interpreter without a GPU) against PyTorch, one by one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from private_llm.kernels import pointwise
from private_llm.kernels.pointwise import OPERATIONS, Batch, Operation, Place, PointwiseGroup, Value
from private_llm.kernels.pointwise import triton as triton_pointwise
from private_llm.ring.prg import Seed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_WIDE, _FLAG = torch.int64, torch.bool
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")


def ran(batch: Batch, operands: list[Tensor], triton: bool) -> list[Tensor]:
    """The operands after a batch."""
    own = [x.clone() for x in operands]
    if triton:
        own = [x.to(DEVICE) for x in own]
        triton_pointwise.launch(own[0], own, batch)
    else:
        pointwise.launch(batch, *own)
    return [x.cpu() for x in own]


def check(batch: Batch, operands: list[Tensor]) -> None:
    for one, other in zip(ran(batch, operands, True), ran(batch, operands, False), strict=True):
        assert torch.equal(one, other)


def elements(count: int, dtype: torch.dtype) -> Tensor:
    drawn = Seed(bytes(32)).stream("pointwise").words(count)
    drawn[: min(count, 4)] = torch.tensor([-(2**63), 2**63 - 1, 0, -1])[: min(count, 4)]
    return drawn > 0 if dtype == _FLAG else drawn.to(dtype)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, list[Tensor]]:
    """Some groups, each on its own part of a result, with views of two shared operands of each type."""
    groups, results = [], []
    for number in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(2, 9), max_size=3))
        count = int(torch.Size(sizes).numel())
        dtype = draw(st.sampled_from([torch.int64, torch.int32]))
        operations: list[Operation] = []
        for step in range(draw(st.integers(1, 5))):
            name = draw(st.sampled_from(sorted(OPERATIONS)))

            def operand(step: int = step, dtype: torch.dtype = dtype, sizes: list[int] = sizes) -> Place | Value | int:
                kind = draw(st.integers(0, 2))
                if kind == 0 and step:
                    return Value(draw(st.integers(0, step - 1)))
                if kind == 1:
                    return draw(st.integers(-(2**31), 2**31 - 1))
                strides = [draw(st.sampled_from([0, 1, 3, 11])) for _ in sizes]
                which = 0 if dtype == _WIDE else 1
                return Place(which, draw(st.integers(0, 5)), tuple(zip(sizes, strides, strict=True)), dtype)

            given = [operand() for _ in range({"copy": 1, "where": 3}.get(name, 2))]
            if name in ("shr", "shl"):
                given[1] = draw(st.integers(0, 31))
            if name == "where":
                given[0] = Place(2, 0, ((count, 1),) if count > 1 else (), _FLAG)
            made = _FLAG if name in _COMPARING else dtype
            operations.append(Operation(name, dtype, tuple(given), made))
        stored = len(operations) - 1
        into = Place(3 + number, 1, ((count, 1),) if count > 1 else (), operations[stored].made)
        groups.append(PointwiseGroup(count, tuple(operations), ((into, stored),)))
        results.append(torch.zeros(count + 2, dtype=operations[stored].made))
    shared = [elements(400, torch.int64), elements(400, torch.int32), elements(800, _FLAG)]
    return tuple(groups), [*shared, *results]


@settings(max_examples=40, deadline=None)
@given(batches())
def test_any_batch(made: tuple[Batch, list[Tensor]]) -> None:
    check(*made)


def test_several_blocks_and_an_operand_that_is_changed() -> None:
    """More elements than a program takes, and a result that lies where an argument was."""
    count = 3 * triton_pointwise.BLOCK + 5
    place = Place(0, 0, ((count, 1),), _WIDE)
    turned = Place(1, 0, ((count // 11, 1), (11, count // 11)), _WIDE)
    doubled = Operation("mul", _WIDE, (place, 2), _WIDE)
    summed = Operation("add", _WIDE, (Value(0), 2**63 - 1), _WIDE)
    copied = Operation("copy", _WIDE, (turned,), _WIDE)
    other = Place(2, 0, ((count // 11 * 11, 1),), _WIDE)
    batch = (
        PointwiseGroup(count, (doubled, summed), ((place, 1),)),
        PointwiseGroup(count // 11 * 11, (copied,), ((other, 0),)),
    )
    check(batch, [elements(count, _WIDE), elements(count, _WIDE), elements(count, _WIDE)])


def test_numbers_and_sizes_are_no_part_of_a_kernel() -> None:
    """So layers with other ranges, and caches of other lengths, take kernels that were compiled."""

    def batch(count: int, factor: int) -> Batch:
        place, out = Place(0, 3, ((count, 1),), _WIDE), Place(1, 0, ((count, 1),), _WIDE)
        return (PointwiseGroup(count, (Operation("mul", _WIDE, (place, factor), _WIDE),), ((out, 0),)),)

    assert triton_pointwise.kernel(batch(7, 3))[0] is triton_pointwise.kernel(batch(1000, 5))[0]


def test_steps_of_gigabytes_are_counted_in_64_bits() -> None:
    """Also where a view begins so far before its operand that it ends near it."""
    far = Place(0, -7 << 30, ((8, 1 << 30),), _WIDE)
    batch = (PointwiseGroup(8, (Operation("copy", _WIDE, (far,), _WIDE),), ((Place(1, 0, ((8, 1),), _WIDE), 0),)),)
    text, numbers = triton_pointwise.source(batch)
    assert f"n{numbers.index(1 << 30)}: tl.int64" in text
