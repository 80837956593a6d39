"""Batches of elementwise operations as one Triton kernel each, whose source is written here; see `kernels.pointwise`.

A program takes `BLOCK` elements of one group. Sizes, strides and numbers stand in the source, so that layers that are
alike share a kernel; addresses are arguments.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from private_llm.kernels.pointwise import Batch, Group, Operation, Place

BLOCK = 256
"""Elements of a program."""
_TYPES = {torch.int64: "tl.int64", torch.int32: "tl.int32", torch.uint8: "tl.uint8", torch.bool: "tl.int1"}
_SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "xor": "^", "and": "&", "or": "|", "shr": ">>", "shl": "<<",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip


def launch(first: Tensor, operands: Sequence[Tensor], batch: Batch) -> None:
    """On the GPU of the first operand; see `kernels.pointwise.launch`."""
    blocks = sum(triton.cdiv(group.count, BLOCK) for group in batch)
    kernel(batch)[(blocks,)](*operands, BLOCK=BLOCK)


@cache
def kernel(batch: Batch) -> Any:  # noqa: ANN401 - Triton's
    """The kernel of a batch; those that are alike are one, also on disk."""
    return _kernel_of(source(batch))


@cache
def _kernel_of(text: str) -> Any:  # noqa: ANN401 - Triton's
    name = f"<pointwise {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # where Triton reads sources
    made = {"tl": tl, "__name__": __name__}
    exec(compile(text, name, "exec"), made)
    return triton.jit(made["batch_kernel"])


def source(batch: Batch) -> str:
    """The kernel's source."""
    operands = 1 + max(place.number for group in batch for place in _places(group))
    lines = [f"def batch_kernel({', '.join(f'p{n}' for n in range(operands))}, BLOCK: tl.constexpr):"]
    lines.append("    i_b = tl.program_id(0)")
    first = 0
    for group in batch:
        last = first + triton.cdiv(group.count, BLOCK)
        lines.append(f"    if (i_b >= {first}) & (i_b < {last}):")
        lines += [f"        {line}" for line in _lines(group, first)]
        first = last
    return "\n".join(lines) + "\n"


def _places(group: Group) -> Iterator[Place]:
    for operation in group.operations:
        yield from (each for each in operation.arguments if isinstance(each, Place))
    yield from (place for place, _ in group.stores)


def _lines(group: Group, first: int) -> Iterator[str]:
    """What a program of a group computes."""
    furthest = max(_furthest(place) for place in _places(group))
    start = f"i_b - {first}" if first else "i_b"
    wide = ".to(tl.int64)" if max(furthest, group.count + BLOCK) >= 1 << 31 else ""
    yield f"o = ({start}){wide} * BLOCK + tl.arange(0, BLOCK)"
    yield f"m = o < {group.count}"
    loaded: dict[Place, str] = {}
    for number, operation in enumerate(group.operations):
        for place in operation.arguments:
            if isinstance(place, Place) and place not in loaded:
                loaded[place] = f"b{len(loaded)}"
                yield f"{loaded[place]} = tl.load({_address(place)}, mask=m, other=0)"
        yield f"v{number} = {_computed(operation, loaded)}"
    for place, number in group.stores:
        yield f"tl.store({_address(place)}, v{number}, mask=m)"


def _furthest(place: Place) -> int:
    return place.offset + sum((size - 1) * stride for size, stride in place.dims)


def _address(place: Place) -> str:
    """The address of element `o` of a place: its number taken apart by sizes, from the innermost on."""
    terms, inner = [f"p{place.number}"], 1
    if place.offset:
        terms.append(str(place.offset))
    for number, (size, stride) in reversed(list(enumerate(place.dims))):
        index = "o" if inner == 1 else f"o // {inner}"
        if number:
            index = f"{index} % {size}"
        if stride:
            terms.append(f"({index}) * {stride}" if stride != 1 else f"({index})")
        inner *= size
    if len(terms) == 1 or all("o" not in term for term in terms[1:]):
        terms.append("0 * o")
    return " + ".join(terms)


def _computed(operation: Operation, loaded: dict[Place, str]) -> str:
    into = _TYPES[operation.dtype]
    given = []
    for number, each in enumerate(operation.arguments):
        if isinstance(each, int):
            given.append(f"tl.full((BLOCK,), {each}, {into})")
        else:
            name = loaded[each] if isinstance(each, Place) else f"v{each.number}"
            given.append(name if operation.name == "where" and not number else f"{name}.to({into})")
    if operation.name in _SIGNS:
        made = f"({given[0]} {_SIGNS[operation.name]} {given[1]})"
    else:
        made = f"tl.where({', '.join(given)})" if operation.name == "where" else given[0]
    return f"{made}.to({_TYPES[operation.made]})"
