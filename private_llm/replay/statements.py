"""Elementwise operations of PyTorch as statements: the n-th element of one view, of the n-th elements of others.

Views that are added, shifted or compared are broadcast to one shape, whose elements are counted row by row. An
operation that puts pieces together (`cat`, `stack`, padding, `repeat`) is a statement for each piece.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from private_llm.replay.events import GraphNode, Slot
from private_llm.replay.loops import collapsed

Name = Slot | Tensor  # a tensor that changes from run to run, or a constant

INTEGERS = frozenset({torch.int64, torch.int32, torch.uint8, torch.bool})  # types that statements compute in


@dataclass(frozen=True, eq=False, repr=False)  # of a constant, too, which may be a share of a weight
class View:
    """Elements of a tensor from `offset` on; dims: sizes and strides, outermost first, joined where possible."""

    name: Name
    offset: int
    dims: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Statement:
    """out[n] = operation(arguments[n]), n < count, computed in `dtype`; arguments are views and numbers."""

    operation: str
    dtype: torch.dtype
    out: View
    arguments: tuple[View | int, ...]
    count: int

    @property
    def views(self) -> list[View]:
        """The arguments that are read from memory."""
        return [each for each in self.arguments if isinstance(each, View)]


def statements_of(node: GraphNode, found: Mapping[Slot, Tensor]) -> list[Statement]:
    """Those of a node; none for what is no elementwise operation of integers."""
    lower = _LOWERED.get(node.function)
    if lower is None:
        return []
    return lower(node, found) or []


Lowering = Callable[[GraphNode, Mapping[Slot, Tensor]], "list[Statement] | None"]
_LOWERED: dict[Any, Lowering] = {}
_aten = torch.ops.aten


def _lowers(*operations: Any) -> Callable[[Lowering], Lowering]:  # noqa: ANN401 - PyTorch's
    def register(lower: Lowering) -> Lowering:
        _LOWERED.update(dict.fromkeys(operations, lower))
        return lower

    return register


def _view(name: Name, offset: int, shape: Sequence[int], strides: Sequence[int]) -> View:
    sizes, (walk,) = collapsed(shape, [strides])
    return View(name, offset, tuple(zip(sizes, walk, strict=True)))


def tensor_of(name: Name, found: Mapping[Slot, Tensor]) -> Tensor:
    """The tensor behind a name."""
    return found[name] if isinstance(name, Slot) else name


def _argument(given: object, shape: torch.Size, found: Mapping[Slot, Tensor]) -> View | int | None:
    """An operand broadcast to a shape; None for what no statement takes."""
    if isinstance(given, int):
        return int(given)
    if not isinstance(given, Slot | Tensor):
        return None
    x = tensor_of(given, found)
    if x.dtype not in INTEGERS:
        return None
    if isinstance(given, Tensor) and x.dim() == 0 and x.is_cpu:  # a single number, which an operation reads
        return int(x)
    return _view(given, 0, shape, x.expand(shape).stride())


def _made(
    operation: str, dtype: torch.dtype, into: Name, given: Sequence[object], found: Mapping[Slot, Tensor]
) -> list[Statement] | None:  # fmt: skip
    """One statement over all of `into`."""
    out = tensor_of(into, found)
    arguments = [_argument(each, out.shape, found) for each in given]
    if out.dtype not in INTEGERS or dtype not in INTEGERS or None in arguments:
        return None
    if not out.numel():
        return None
    known = tuple(each for each in arguments if each is not None)
    return [Statement(operation, dtype, _view(into, 0, out.shape, out.stride()), known, out.numel())]


def _piece(into: Name, out: Tensor, part: Tensor, given: View | int) -> Statement:
    """A copy to `part`, a view of `out`, which is the tensor called `into`."""
    view = _view(into, int(part.storage_offset() - out.storage_offset()), part.shape, part.stride())
    return Statement("copy", out.dtype, view, (given,), part.numel())


_BINARY = {
    "add": "add add_", "sub": "sub sub_", "rsub": "rsub", "mul": "mul mul_",
    "xor": "bitwise_xor bitwise_xor_ __xor__", "and": "bitwise_and bitwise_and_ __and__",
    "or": "bitwise_or bitwise_or_ __or__", "shr": "__rshift__ bitwise_right_shift __irshift__",
    "shl": "__lshift__ bitwise_left_shift __ilshift__",
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge",
}  # fmt: skip
_OVERLOADS = ("Tensor", "Scalar", "Tensor_Scalar", "out", "Tensor_out")
_NAMES: dict[Any, str] = {
    getattr(getattr(_aten, packet), overload): name
    for name, packets in _BINARY.items()
    for packet in packets.split()
    for overload in getattr(_aten, packet).overloads()
    if overload in _OVERLOADS
}
_COMPARING = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


@_lowers(*_NAMES)
def _binary(node: GraphNode, found: Mapping[Slot, Tensor]) -> list[Statement] | None:
    operation, (left, right, *more) = _NAMES[node.function], node.arguments
    into = node.named.get("out", node.made[0])
    factor = node.named.get("alpha", more[0] if more else 1)
    if factor != 1 or isinstance(left, bool) or isinstance(right, bool | float):
        return None
    dtype = tensor_of(into, found).dtype
    operands = [tensor_of(x, found) if isinstance(x, Slot | Tensor) else x for x in (left, right)]
    if operation in _COMPARING:
        dtype = torch.result_type(*operands)
    elif dtype != torch.result_type(*operands) or (dtype == torch.bool and operation not in ("xor", "and", "or")):
        return None  # among them what is computed in another type than that of memory that was given for it
    if operation in ("shr", "shl") and not (isinstance(right, int) and 0 <= right < 8 * dtype.itemsize):
        return None
    if isinstance(right, int) and not -(1 << 8 * dtype.itemsize - 1) <= right < 1 << 8 * dtype.itemsize - 1:
        return None
    if operation == "rsub":
        return _made("sub", dtype, into, [right, left], found)
    return _made(operation, dtype, into, [left, right], found)


@_lowers(_aten.neg.default, _aten.where.self)
def _negated_or_chosen(node: GraphNode, found: Mapping[Slot, Tensor]) -> list[Statement] | None:
    into, negated = node.made[0], node.function is _aten.neg.default
    operation, given = ("sub", [0, *node.arguments]) if negated else ("where", list(node.arguments))
    return _made(operation, tensor_of(into, found).dtype, into, given, found)


@_lowers(_aten.clone.default, _aten._to_copy.default, _aten.copy_.default)
def _copied(node: GraphNode, found: Mapping[Slot, Tensor]) -> list[Statement] | None:
    in_place = node.function is _aten.copy_.default
    into, source = node.arguments[:2] if in_place else (node.made[0], node.arguments[0])
    if isinstance(source, Tensor) and not source.dim() and source.device.type == "cpu":  # a number, perhaps not there
        return None
    return _made("copy", tensor_of(into, found).dtype, into, [source], found)


@_lowers(
    _aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default, _aten.zero_.default, _aten.ones.default,
    _aten.ones_like.default, _aten.new_ones.default, _aten.full.default, _aten.full_like.default,
    _aten.new_full.default, _aten.fill_.Scalar,
)  # fmt: skip
def _filled(node: GraphNode, found: Mapping[Slot, Tensor]) -> list[Statement] | None:
    name, into = str(node.function), node.made[0]
    value = int("ones" in name) if "full" not in name and "fill" not in name else node.arguments[-1]
    return _made("copy", tensor_of(into, found).dtype, into, [value], found)


def _whole(given: Name, found: Mapping[Slot, Tensor]) -> View | None:
    x = tensor_of(given, found)
    return _view(given, 0, x.shape, x.stride()) if x.dtype in INTEGERS else None


@_lowers(_aten.cat.default, _aten.stack.default)
def _joined(node: GraphNode, found: Mapping[Slot, Tensor]) -> list[Statement] | None:
    into, pieces = node.made[0], node.arguments[0]
    out, dim = tensor_of(into, found), int(node.named.get("dim", (*node.arguments, 0)[1]))
    made, at = [], 0
    for given in pieces:
        piece, view = tensor_of(given, found), _whole(given, found)
        if node.function is _aten.stack.default:
            part, at = out.select(dim, at), at + 1
        elif piece.numel():
            part, at = out.narrow(dim, at, piece.shape[dim]), at + piece.shape[dim]
        else:
            continue
        if view is None or out.dtype not in INTEGERS:
            return None
        if part.numel():
            made.append(_piece(into, out, part, view))
    return made


@_lowers(_aten.constant_pad_nd.default)
def _padded(node: GraphNode, found: Mapping[Slot, Tensor]) -> list[Statement] | None:
    """The values, and the filling before and after them along each dimension: no element is written twice."""
    into, (given, sizes, *rest) = node.made[0], node.arguments
    value = node.named.get("value", rest[0] if rest else 0)
    out, view = tensor_of(into, found), _whole(given, found)
    if view is None or value != int(value) or min(sizes) < 0 or not tensor_of(given, found).numel():
        return None
    made, inner = [], out
    for place in range(len(sizes) // 2):
        dim, (before, behind) = out.dim() - 1 - place, sizes[2 * place : 2 * place + 2]
        length = inner.shape[dim]
        for start, size in ((0, before), (length - behind, behind)):
            if size:
                part = inner.narrow(dim, start, size)
                made.append(_piece(into, out, part, int(value)))
        inner = inner.narrow(dim, before, length - before - behind)
    return [*made, _piece(into, out, inner, view)]


@_lowers(_aten.repeat.default)
def _repeated(node: GraphNode, found: Mapping[Slot, Tensor]) -> list[Statement] | None:
    into, (given, times) = node.made[0], node.arguments[:2]
    out, x = tensor_of(into, found), tensor_of(given, found)
    if x.dtype not in INTEGERS or not out.numel() or not out.is_contiguous():
        return None
    x = x.expand(*([1] * (len(times) - x.dim())), *x.shape)
    shape = [size for pair in zip(times, x.shape, strict=True) for size in pair]
    strides = [stride for each in x.stride() for stride in (0, each)]
    target = out.view(shape)
    return [
        Statement(
            "copy", out.dtype, _view(into, 0, shape, target.stride()), (_view(given, 0, shape, strides),), out.numel()
        )
    ]
