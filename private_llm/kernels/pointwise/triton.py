"""Batches of elementwise operations as one Triton kernel each, whose source is written here; see `kernels.pointwise`.

A program takes `BLOCK` elements of one group. Only the kinds of operations and views stand in the source; sizes,
strides and numbers are arguments, as addresses are. So layers of other ranges, or longer caches, share kernels.
"""

from __future__ import annotations

import hashlib
import linecache
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from private_llm.kernels.pointwise import Batch, Operation, Place, PointwiseGroup

BLOCK = 256  # elements of a program
_COMPILING = 8  # kernels that are compiled at a time
_TYPES = {torch.int64: "tl.int64", torch.int32: "tl.int32", torch.uint8: "tl.uint8", torch.bool: "tl.int1"}
_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "xor": "^", "and": "&", "or": "|", "shr": ">>", "shl": "<<",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip


def launch(first: Tensor, operands: Sequence[Tensor], batch: Batch) -> None:
    """On the GPU of the first operand; see `kernels.pointwise.launch`."""
    made, numbers = kernel(batch)
    blocks = sum(triton.cdiv(group.count, BLOCK) for group in batch)
    made[(blocks,)](*operands, *numbers, BLOCK=BLOCK)


def compile_all(first: Tensor, calls: Sequence[tuple[Batch, Sequence[Tensor]]]) -> None:
    """See `kernels.pointwise.compile_all`: each kernel once, in threads, since most of it happens outside of Python.

    Parties are threads that ask for the same kernels at the same time: who comes later finds what the first compiled.
    """
    by_source = {id(kernel(batch)[0]): (batch, operands) for batch, operands in calls}

    def compile_one(call: tuple[Batch, Sequence[Tensor]]) -> None:
        made, numbers = kernel(call[0])
        with torch.cuda.device(first.device), _lock_of(made):
            made.warmup(*call[1], *numbers, BLOCK=BLOCK, grid=(1,))

    with ThreadPoolExecutor(_COMPILING) as pool:
        list(pool.map(compile_one, by_source.values()))


@cache
def _lock_of(_: Any) -> threading.Lock:  # noqa: ANN401 - a kernel
    return threading.Lock()


@cache
def kernel(batch: Batch) -> tuple[Any, tuple[int, ...]]:
    """The kernel of a batch, and the numbers that it takes after the operands; batches that are alike share one."""
    text, numbers = source(batch)
    return _kernel_of(text), numbers


@cache
def _kernel_of(text: str) -> Any:  # noqa: ANN401 - Triton's
    return jit_of(text, "batch_kernel", {"tl": tl, "__name__": __name__})


def jit_of(text: str, name: str, scope: dict[str, Any]) -> Any:  # noqa: ANN401 - Triton's
    """The kernel `name` of a source that a module of this package has written; arguments with types are numbers."""
    file = f"<{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # where Triton reads sources
    made = dict(scope)
    exec(compile(text, file, "exec"), made)  # of kinds and places alone: no text of a user is in it
    plain = [each for each, kind in made[name].__annotations__.items() if kind != "tl.constexpr"]
    return triton.jit(made[name], do_not_specialize=plain)


def source(batch: Batch) -> tuple[str, tuple[int, ...]]:
    """The kernel's source, and the numbers that it takes."""
    text = _Source()
    first = 0
    for group in batch:
        last = first + triton.cdiv(group.count, BLOCK)
        text.add_group(group, first, last)
        first = last
    operands = 1 + max(place.number for group in batch for place in _places(group))
    names = [f"p{n}" for n in range(operands)]
    names += [f"n{n}: tl.int{64 if n in text.wide else 32}" for n in range(len(text.numbers))]
    head = f"def batch_kernel({', '.join(names)}, BLOCK: tl.constexpr):"
    return "\n".join([head, "    i_b = tl.program_id(0)", *text.lines, ""]), tuple(text.numbers)


def _places(group: PointwiseGroup) -> Iterator[Place]:
    for operation in group.operations:
        yield from (each for each in operation.arguments if isinstance(each, Place))
    yield from (place for place, _ in group.stores)


class _Source:
    """Lines of a kernel. numbers: what it is called with; wide: those of 64 bits."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.numbers: list[int] = []
        self.wide: set[int] = set()

    def add_group(self, group: PointwiseGroup, first: int, last: int) -> None:
        """What programs `first` to `last` - 1 compute."""
        # an operand's first element is added in 64 bits, and may lie far before what is read of it
        furthest = (sum((size - 1) * stride for size, stride in place.dims) for place in _places(group))
        self._wide = max(group.count + BLOCK, *furthest) >= 1 << 31
        start, count = self._number(first), self._number(group.count, self._wide)
        self.lines.append(f"    if (i_b >= {start}) & (i_b < {self._number(last)}):")
        self._line(f"o = (i_b - {start}){'.to(tl.int64)' if self._wide else ''} * BLOCK + tl.arange(0, BLOCK)")
        self._line(f"m = o < {count}")
        loaded: dict[Place, str] = {}
        for number, operation in enumerate(group.operations):
            for place in operation.arguments:
                if isinstance(place, Place) and place not in loaded:
                    loaded[place] = f"b{len(loaded)}"
                    self._line(f"{loaded[place]} = tl.load({self._address(place)}, mask=m, other=0)")
            self._line(f"v{number} = {self._computed(operation, loaded)}")
        for place, number in group.stores:
            self._line(f"tl.store({self._address(place)}, v{number}, mask=m)")

    def _line(self, text: str) -> None:
        self.lines.append(f"        {text}")

    def _number(self, value: int, wide: bool = False) -> str:
        if wide:
            self.wide.add(len(self.numbers))
        self.numbers.append(value)
        return f"n{len(self.numbers) - 1}"

    def _address(self, place: Place) -> str:
        """The address of element `o` of a place: its number taken apart by sizes, from the innermost on."""
        terms, left = [f"p{place.number}"], "o"
        if place.offset:
            terms.append(self._number(place.offset, wide=True))
        for number, (size, stride) in reversed(list(enumerate(place.dims))):
            index = left
            if number:
                width = self._number(size, self._wide)
                index, left = f"({left}) % {width}", f"({left}) // {width}"
            if stride:
                terms.append(f"({index})" if stride == 1 else f"({index}) * {self._number(stride, self._wide)}")
        if not any(stride for _, stride in place.dims):
            terms.append("0 * o")
        return " + ".join(terms)

    def _computed(self, operation: Operation, loaded: dict[Place, str]) -> str:
        into = _TYPES[operation.dtype]
        given = []
        for number, each in enumerate(operation.arguments):
            if isinstance(each, int):
                given.append(f"tl.full((BLOCK,), {self._number(each, wide=True)}, tl.int64).to({into})")
            else:
                name = loaded[each] if isinstance(each, Place) else f"v{each.number}"
                given.append(name if operation.name == "where" and not number else f"{name}.to({into})")
        if operation.name in _SIGNS:
            made = f"({given[0]} {_SIGNS[operation.name]} {given[1]})"
        else:
            made = f"tl.where({', '.join(given)})" if operation.name == "where" else given[0]
        return f"{made}.to({_TYPES[operation.made]})"
