"""Kernels, and what PyTorch computes, as steps of recorded programs on CPUs (`replay/runner.py`; Numba, GIL-free).

A step takes a row of 64-bit words. The step of a kernel is made of its annotations (`kernels.address`): a plan and
flags take two words, address and length, and the type of elements none, since a step has 64-bit elements only. Sums,
products and copies of PyTorch become strided loops over at most `DIMS` dimensions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import overload

from private_llm.kernels.address import SIGNED, WORD, Array, flat
from private_llm.kernels.compiling import CompiledStep, compiled

DIMS = 4  # dimensions of a strided loop

StepRow = Any  # the words of a step after its function's address
NumbaValue = Any  # numba's: an array or a number


# -- kernels that exist -------------------------------------------------------------------------------------------
_TAKEN = {
    "Zero": (0, "WORD"),
    "bool": (1, "a[{0}] != 0"),
    "Plan": (2, "flat(a[{0}], a[{1}], SIGNED)"),
    "IndexTable": (2, "flat(a[{0}], a[{1}], SIGNED).reshape(a[{1}] // 4, 4)"),
    "Flags": (2, "flat(a[{0}], a[{1}], FLAG)"),
}
"""Words of a row that an argument takes, by its annotation, and how it is made of them; others are the word itself."""
_STEPS: dict[Any, tuple[CompiledStep, tuple[str, ...]]] = {}


def step_of(kernel: Any) -> tuple[CompiledStep, tuple[str, ...]]:  # noqa: ANN401 - Numba ships no types
    """A function that calls a kernel with arguments of a row, and the annotations of these arguments."""
    if kernel in _STEPS:
        return _STEPS[kernel]
    kinds = tuple(str(each.annotation) for each in inspect.signature(kernel.py_func).parameters.values())
    given, at = [], 0
    for kind in kinds:
        size, text = _TAKEN.get(kind, (1, "a[{0}]"))
        given.append(text.format(at, at + 1))
        at += size
    name = f"{kernel.__module__.replace('.', '_')}_{kernel.__name__}"
    text = f"def {name}(row):\n    a = carray(row, {at})\n    kernel({', '.join(given)})\n"
    made = {**globals(), "kernel": kernel, "WORD": WORD, "FLAG": np.uint8(0)}
    exec(compile(text, __file__, "exec"), made)  # of names in this package alone
    return _STEPS.setdefault(kernel, (CompiledStep(made[name]), kinds))  # the first of several threads' makes it


# -- what PyTorch does ------------------------------------------------------------------------------------------------
ADD, SUB, MUL, XOR, AND, RIGHT, ADD_TIMES, COPY = range(8)  # what `combine` computes
_FORMULAS = ("x + y", "x - y", "x * y", "x ^ y", "x & y", "x >> y", "x + factor * y", "x")
"""The same of one element; x is shifted as a signed number."""


def _at(x: NumbaValue, m: int) -> NumbaValue:
    """Element m of a line, or the one number for all of it."""


@overload(_at, strict=False)  # annotations differ
def _overloaded(x: NumbaValue, m: NumbaValue) -> Callable[[NumbaValue, int], NumbaValue]:
    return (lambda x, m: x[m]) if isinstance(x, types.Array) else (lambda x, m: x)


def _loops(name: str, taken: str, count: str, out: str, x: str, y: str) -> Any:  # noqa: ANN401 - Numba ships no types
    """A line of `combine`: a loop for each operation, over these elements."""
    lines = [f"def {name}(operation, factor, {taken}):"]
    for number, formula in enumerate(_FORMULAS):
        value = "".join({"x": x, "y": y}.get(each, each) for each in re.split(r"\b", formula))
        lines += [f"    if operation == {number}:", f"        for m in range({count}):", f"            {out} = {value}"]
    made: dict[str, Any] = {"__name__": __name__, "_at": _at}
    exec(compile("\n".join(lines), __file__, "exec"), made)  # of names in this package alone
    return compiled(made[name])


_dense = _loops("_dense", "out, x, y", "len(out)", "out[m]", "_at(x, m)", "_at(y, m)")
"""Without gaps, where x or y may be one number for all: each loop becomes vectors."""
_apart = _loops("_apart", "count, out, so, x, sx, y, sy", "count", "out[m * so]", "x[m * sx]", "y[m * sy]")  # with gaps


@compiled
def _line(
    operation: int, factor: int, count: int, out: int, so: int, x: int, sx: int, y: int, sy: int
) -> None:  # fmt: skip
    if so == 1 and sx == 1 and sy == 1:
        _dense(operation, factor, flat(out, count, SIGNED), flat(x, count, SIGNED), flat(y, count, SIGNED))
    elif so == 1 and sx == 1 and sy == 0:
        _dense(operation, factor, flat(out, count, SIGNED), flat(x, count, SIGNED), flat(y, 1, SIGNED)[0])
    elif so == 1 and sx == 0 and sy == 1:
        _dense(operation, factor, flat(out, count, SIGNED), flat(x, 1, SIGNED)[0], flat(y, count, SIGNED))
    else:
        most = 1 << 40
        _apart(
            operation, factor, count, flat(out, most, SIGNED), so, flat(x, most, SIGNED), sx, flat(y, most, SIGNED), sy
        )


@CompiledStep
def combine(row: StepRow) -> None:
    """out = x (operation) y. Row: sizes of 4 dimensions, address and 4 strides of out, x and y, operation, factor."""
    a = carray(row, 21)
    for i in range(a[0]):
        for j in range(a[1]):
            for k in range(a[2]):
                out = a[4] + 8 * (i * a[5] + j * a[6] + k * a[7])
                x = a[9] + 8 * (i * a[10] + j * a[11] + k * a[12])
                y = a[14] + 8 * (i * a[15] + j * a[16] + k * a[17])
                _line(a[19], a[20], a[3], out, a[8], x, a[13], y, a[18])


@compiled
def _summed(x: Array) -> int:
    """Of elements without gaps."""
    total = np.int64(0)
    for m in range(len(x)):
        total += x[m]
    return int(total)


@CompiledStep
def sum_last(row: StepRow) -> None:
    """out [n0, n1, n2] = x [n0, n1, n2, n3] summed over the last. The row: 4 sizes, then address, 4 strides of each."""
    a = carray(row, 14)
    out, x = flat(a[4], 1 << 40, SIGNED), flat(a[9], 1 << 40, SIGNED)
    for i in range(a[0]):
        for j in range(a[1]):
            for k in range(a[2]):
                at = i * a[10] + j * a[11] + k * a[12]
                total = np.int64(0)
                if a[13] == 1:
                    total = _summed(flat(a[9] + 8 * at, a[3], SIGNED))
                else:
                    for m in range(a[3]):
                        total += x[at + m * a[13]]
                out[i * a[5] + j * a[6] + k * a[7]] = total


@CompiledStep
def gather(row: StepRow) -> None:
    """out [n] = x [places], 0 where a place is negative. The row: n, out, x, places (addresses)."""
    a = carray(row, 4)
    out, x, places = flat(a[1], a[0], SIGNED), flat(a[2], 1 << 40, SIGNED), flat(a[3], a[0], SIGNED)
    for m in range(a[0]):
        at = places[m]
        out[m] = x[at] if at >= 0 else 0
