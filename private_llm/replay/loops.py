"""What PyTorch computes on ring elements, as steps: sums, products and copies by loops, moves by lists of places.

`LOWERED` has every operation that a recorded step may contain, with the function that writes its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.kernels import steps
from private_llm.kernels.compiling import CompiledStep
from private_llm.replay.program import Word

Emit = Callable[[CompiledStep, Sequence["Word | Tensor"]], None]
"""Writes a step down; a tensor in its row stands for the address of its first element."""

aten = torch.ops.aten
_MOST = steps.DIMS
_SIGN = {steps.ADD: 1, steps.SUB: -1}


def collapsed(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The fewest dimensions over which tensors of these strides are walked in the same order."""
    sizes: list[int] = []
    walks: list[list[int]] = [[] for _ in strides]
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        now = [stride[dim] for stride in strides]
        if sizes and all(walk[-1] == step * size for walk, step in zip(walks, now, strict=True)):
            sizes[-1] *= size
            for walk, step in zip(walks, now, strict=True):
                walk[-1] = step
            continue
        sizes.append(size)
        for walk, step in zip(walks, now, strict=True):
            walk.append(step)
    return sizes, walks


def _padded(values: list[int], fill: int) -> list[int]:
    if len(values) > _MOST:
        raise UnsupportedOp(f"a loop over {len(values)} dimensions")
    return [fill] * (_MOST - len(values)) + values


_Layout = tuple[tuple[int, ...], tuple[int, ...]]


@lru_cache(maxsize=4096)
def _walked(shape: tuple[int, ...], layouts: tuple[_Layout, ...]) -> tuple[list[int], list[list[int]]]:
    """Sizes and strides of a loop over tensors of these sizes and strides, expanded to a shape."""
    wide = [torch.empty_strided(*layout, device="meta").expand(shape) for layout in layouts]
    sizes, walks = collapsed(shape, [each.stride() for each in wide])
    return _padded(sizes, 1), [_padded(walk, 0) for walk in walks]


def _row(shape: Sequence[int], tensors: Sequence[Tensor]) -> list[Word | Tensor]:
    sizes, walks = _walked(tuple(shape), tuple([(tuple(each.shape), each.stride()) for each in tensors]))
    row: list[Word | Tensor] = [*sizes]
    for each, walk in zip(tensors, walks, strict=True):
        row += [each, *walk]
    return row


def combine(emit: Emit, out: Tensor, x: Tensor | int, y: Tensor | int, operation: int, factor: int = 1) -> None:
    """out = x (operation) y, element by element; factor: of y in `steps.ADD_TIMES`.

    Raises UnsupportedOp for elements that are not int64, and for tensors that no loop over 4 dimensions walks.
    """
    known = [each if isinstance(each, Tensor) else torch.tensor([each], dtype=torch.int64) for each in (x, y)]
    if any(each.dtype != torch.int64 for each in (out, *known)):
        raise UnsupportedOp(f"an operation on {', '.join(str(each.dtype) for each in (out, *known))}")
    if out.numel():
        emit(steps.combine, [*_row(out.shape, [out, *known]), operation, factor])


def copy(emit: Emit, out: Tensor, x: Tensor) -> None:
    """out = x. Raises UnsupportedOp as `combine`."""
    if x.dtype != torch.int64 or out.dtype != torch.int64:
        raise UnsupportedOp(f"a copy of {x.dtype} to {out.dtype}")
    if out.numel():
        emit(steps.combine, [*_row(out.shape, [out, x, x]), steps.COPY, 1])


def _sum(
    emit: Emit, out: Tensor, x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, **_: object
) -> None:  # fmt: skip
    if x.dtype != torch.int64:
        raise UnsupportedOp(f"a sum of {x.dtype}")
    over = sorted(dim % x.dim() for dim in (dims or range(x.dim())))
    sizes, (walk,) = collapsed([x.shape[dim] for dim in over], [[x.stride(dim) for dim in over]])
    if len(sizes) > 1:
        raise UnsupportedOp("a sum over dimensions that lie apart")
    rest = [dim for dim in range(x.dim()) if dim not in over]
    result = out.squeeze(over) if keepdim else out
    kept, walks = collapsed([x.shape[dim] for dim in rest], [result.stride(), [x.stride(dim) for dim in rest]])
    if len(kept) >= _MOST:
        raise UnsupportedOp(f"a sum over one of {len(kept) + 1} dimensions")
    row: list[Word | Tensor] = [*_padded([*kept, *(sizes or [1])], 1), out, *_padded([*walks[0], 0], 0), x]
    if out.numel():
        emit(steps.sum_last, [*row, *_padded([*walks[1], *(walk or [0])], 0)])


def _moved(emit: Emit, out: Tensor, x: Tensor, move: Callable[[Tensor], Tensor]) -> None:
    """out = move(x), where `move` only moves elements, and may put -1 where zeros belong."""
    if x.dtype != torch.int64 or not out.is_contiguous():
        raise UnsupportedOp(f"a move of {x.dtype}")
    if not out.numel():
        return
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    places = move(torch.arange(span).as_strided(x.shape, x.stride())).contiguous()
    emit(steps.gather, [out.numel(), out, x, places])


def _binary(operation: int) -> Callable[..., None]:
    def lower(emit: Emit, out: Tensor, x: Tensor, y: Tensor | int, *, alpha: int = 1, **_: object) -> None:
        if alpha == 1:
            combine(emit, out, x, y, operation)
        elif isinstance(alpha, int) and operation in _SIGN:
            combine(emit, out, x, y, steps.ADD_TIMES, _SIGN[operation] * alpha)
        else:
            raise UnsupportedOp(f"an operation with a factor of {alpha}")

    return lower


def _cat(emit: Emit, out: Tensor, pieces: Sequence[Tensor], dim: int = 0) -> None:
    at = 0
    for piece in pieces:
        if piece.dim() == out.dim():
            copy(emit, out.narrow(dim, at, piece.shape[dim]), piece)
            at += piece.shape[dim]


def _stack(emit: Emit, out: Tensor, pieces: Sequence[Tensor], dim: int = 0) -> None:
    for number, piece in enumerate(pieces):
        copy(emit, out.select(dim, number), piece)


def _moves(operation: Any) -> Callable[..., None]:  # noqa: ANN401 - an overload of PyTorch's
    def lower(emit: Emit, out: Tensor, x: Tensor, *how: Any, **more: Any) -> None:  # noqa: ANN401
        _moved(emit, out, x, lambda places: operation(places, *how, **more))

    return lower


def _pad(emit: Emit, out: Tensor, x: Tensor, pad: Sequence[int], value: float = 0) -> None:
    if value:
        raise UnsupportedOp(f"padding with {value}")
    _moved(emit, out, x, lambda places: aten.constant_pad_nd(places, pad, -1))


def _copied(emit: Emit, out: Tensor, x: Tensor, **_: object) -> None:
    copy(emit, out, x)


MOVES = frozenset({
    aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.repeat.default, aten.flip.default,
    aten.roll.default, aten.constant_pad_nd.default,
})  # fmt: skip
"""Operations whose places are found when they are recorded."""

LOWERED: dict[Any, Callable[..., None]] = {
    **{each: _moves(each) for each in MOVES},
    aten.constant_pad_nd.default: _pad,
    aten.add.Tensor: _binary(steps.ADD), aten.add_.Tensor: _binary(steps.ADD), aten.add.out: _binary(steps.ADD),
    aten.sub.Tensor: _binary(steps.SUB), aten.sub_.Tensor: _binary(steps.SUB), aten.sub.out: _binary(steps.SUB),
    aten.mul.Tensor: _binary(steps.MUL), aten.mul_.Tensor: _binary(steps.MUL), aten.mul.out: _binary(steps.MUL),
    aten.bitwise_xor.Tensor: _binary(steps.XOR), aten.bitwise_xor_.Tensor: _binary(steps.XOR),
    aten.bitwise_and.Tensor: _binary(steps.AND), aten.bitwise_and_.Tensor: _binary(steps.AND),
    aten.__rshift__.Scalar: _binary(steps.RIGHT),
    aten.rsub.Scalar: lambda emit, out, x, y, alpha=1: combine(emit, out, y, x, steps.SUB),
    aten.neg.default: lambda emit, out, x: combine(emit, out, 0, x, steps.SUB),
    aten.bitwise_not.default: lambda emit, out, x: combine(emit, out, x, -1, steps.XOR),
    aten.clone.default: _copied, aten._to_copy.default: _copied, aten.contiguous.default: _copied,
    aten.copy_.default: lambda emit, out, x, source, non_blocking=False: copy(emit, out, source),
    aten.cat.default: _cat, aten.stack.default: _stack,
    aten.sum.dim_IntList: _sum, aten.sum.IntList_out: _sum, aten.sum.default: _sum,
}  # fmt: skip
"""Called with the writer, the tensor that is written, and the operation's arguments."""

STARTED = frozenset({
    aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default,
    aten.new_empty_strided.default,
})  # fmt: skip
"""Operations whose result has no content yet."""

CONSTANT = frozenset({
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default,
})  # fmt: skip
"""Operations whose result depends on the shape of what they are given."""
