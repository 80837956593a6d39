"""Elementwise kernels that are made when they are needed: one launch for groups of statements on views of tensors.

In main memory PyTorch computes them one by one, which is what the kernels of GPUs are compared with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from private_llm.kernels import ops


@dataclass(frozen=True)
class Place:
    """A view of operand `number`: elements from `offset` on; dims: sizes and strides, outermost first (row by row)."""

    number: int
    offset: int
    dims: tuple[tuple[int, int], ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Value:
    """What an earlier operation of the group made."""

    number: int


@dataclass(frozen=True)
class Operation:
    """An operation, `name` of `OPERATIONS`, on arguments (places, values of the group, numbers) cast to `dtype`; its
    result is cast to `made`.
    """

    name: str
    dtype: torch.dtype
    arguments: tuple[Place | Value | int, ...]
    made: torch.dtype


@dataclass(frozen=True)
class PointwiseGroup:
    """Operations on `count` elements; stores: which of their values go where. No place that is stored to is read."""

    count: int
    operations: tuple[Operation, ...]
    stores: tuple[tuple[Place, int], ...]


Batch = tuple[PointwiseGroup, ...]  # groups that do not touch what another one of them stores

OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "xor": lambda x, y: x ^ y,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "shr": lambda x, y: x >> y,
    "shl": lambda x, y: x << y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "where": torch.where,
    "copy": lambda x: x.clone(),  # a store that comes before it may write to x
}
"""Operations by name; shifts to the right keep the sign, and everything wraps around in the type of the result."""


def launch(batch: Batch, *operands: Tensor) -> None:
    """Compute a batch on the device of its operands: one launch on a GPU."""
    if operands[0].is_cuda:
        ops.on_gpu("pointwise", "launch", operands[0], operands, batch)
        return
    for group in batch:
        values: list[Tensor] = []
        for operation in group.operations:
            given = [_read(each, values, operands, group.count) for each in operation.arguments]
            kept = 1 if operation.name == "where" else 0  # its condition keeps its type
            cast = [*given[:kept], *(x.to(operation.dtype) for x in given[kept:])]
            values.append(OPERATIONS[operation.name](*cast).to(operation.made))
        for place, number in group.stores:
            out = _strided(place, operands)
            out.copy_(values[number].view(out.shape))


def compile_all(calls: Sequence[tuple[Batch, Sequence[Tensor]]]) -> None:
    """Compile the kernels of these launches side by side, where a GPU needs any."""
    on_gpus = [(batch, operands) for batch, operands in calls if operands[0].is_cuda]
    if on_gpus:
        ops.on_gpu("pointwise", "compile_all", on_gpus[0][1][0], on_gpus)


def _strided(place: Place, operands: Sequence[Tensor]) -> Tensor:
    x = operands[place.number]
    sizes, strides = [size for size, _ in place.dims], [stride for _, stride in place.dims]
    return x.as_strided(sizes, strides, int(x.storage_offset()) + place.offset)


def _read(given: Place | Value | int, values: Sequence[Tensor], operands: Sequence[Tensor], count: int) -> Tensor:
    if isinstance(given, Value):
        return values[given.number]
    if isinstance(given, Place):
        return _strided(given, operands).reshape(-1)
    return torch.full((count,), given, dtype=torch.int64)
