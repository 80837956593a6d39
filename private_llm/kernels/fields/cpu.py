"""Local steps on ring elements and packed fields on the CPU (Numba, GIL-free), made of `kernels.fields`.

Operands are addresses (`address`) of n elements of the type of `zero` (uint32 or uint64), or of packed words. Packed
arrays hold one f-bit field per element in ceil(n f / 64) words: each full block of 512 elements is 64 rows of
8 lanes, lane l of row r being bits r f .. r f + f - 1 of the f words base + 8 j + l (so packing is eight-lane vector
work with uniform shifts); the rest follows back to back. A call works on elements begin .. end - 1, whole blocks or
up to the last element, so calls may share the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from private_llm.kernels.address import WORD, Array, flat
from private_llm.kernels.compiling import compiled
from private_llm.kernels.fields import STEPS, FieldStep

BLOCK = 512


@compiled
def unpack(words: Array, start: int, count: int, f: int, out: Array) -> None:
    """Fields of elements start .. start+count-1 (a full block, or the tail) into out [512]."""
    mask = np.uint64((1 << f) - 1)
    base = (start >> 9) * 8 * f
    if count == BLOCK:
        for r in range(64):
            at = r * f
            word = base + (at >> 6) * 8
            off = at & 63
            low = np.uint64(off)
            if off + f <= 64:
                for lane in range(8):
                    out[r * 8 + lane] = (words[word + lane] >> low) & mask
            else:
                high = np.uint64(64 - off)
                for lane in range(8):
                    out[r * 8 + lane] = ((words[word + lane] >> low) | (words[word + 8 + lane] << high)) & mask
        return
    for i in range(count):
        at = i * f
        word = base + (at >> 6)
        off = at & 63
        value = words[word] >> np.uint64(off)
        if off + f > 64:
            value |= words[word + 1] << np.uint64(64 - off)
        out[i] = value & mask


@compiled
def pack(fields: Array, start: int, count: int, f: int, words: Array) -> None:
    """The inverse of `unpack` into zeroed words; fields must be below 2^f."""
    base = (start >> 9) * 8 * f
    if count == BLOCK:
        for r in range(64):
            at = r * f
            word = base + (at >> 6) * 8
            off = at & 63
            low = np.uint64(off)
            for lane in range(8):
                words[word + lane] |= np.uint64(fields[r * 8 + lane]) << low
            if off + f > 64:
                high = np.uint64(64 - off)
                for lane in range(8):
                    words[word + 8 + lane] |= np.uint64(fields[r * 8 + lane]) >> high
        return
    for i in range(count):
        at = i * f
        word = base + (at >> 6)
        off = at & 63
        words[word] |= np.uint64(fields[i]) << np.uint64(off)
        if off + f > 64:
            words[word + 1] |= np.uint64(fields[i]) >> np.uint64(64 - off)


@compiled
def clear(words: Array, n: int, f: int, begin: int, end: int) -> None:
    """Zeros where fields of elements begin .. end - 1 are going to be packed; whole blocks, or up to the last of n."""
    at = (begin >> 9) * 8 * f
    last = len(words) if end == n else (end >> 9) * 8 * f
    words[at:last] = WORD


def _source(name: str, step: FieldStep) -> Iterator[str]:
    """Lines of a kernel: operands, numbers, width of a field, n, `zero`, and which elements.

    Operands are x_at; x_all is what lies there, x_part elements of one block, x_fields a block's unpacked fields.
    """
    elements = [x for x in step.operands if x not in step.packed]
    packed, read = (tuple(x for x in names if x in step.packed) for names in (step.writes, step.reads))
    taken = [f"{x}_at: {'Written' if x in step.writes else 'Read'}" for x in step.operands]
    numbers = [f"{x}_given: int" for x in step.numbers]
    yield f"def {name}({', '.join([*taken, *numbers])}, width: int, n: int, zero: Zero, begin: int, end: int):"
    yield from (f"    {x}_all = flat({x}_at, n, zero)" for x in elements)
    yield from (f"    {x}_all = flat({x}_at, (n * width + 63) // 64, WORD)" for x in step.packed)
    yield f"    kind, bits = {elements[0]}_all.dtype.type, {elements[0]}_all.itemsize * 8"
    yield "    one, top, mask = kind(1), kind(bits - 1), kind((1 << width) - 1)"
    yield "    quarter = kind(1) << kind(bits - 2)"
    yield from (f"    {x} = kind({x}_given)" for x in step.numbers)
    yield from ("    up = kind(bits - f_given)" for x in step.numbers if x == "f")
    rooms = dict(zip(packed, read, strict=False))  # a result takes the room of a field that was read: fewer arrays
    yield from (f"    {x}_fields = np.empty(BLOCK, dtype=kind)" for x in (*read, *packed[len(read) :]))
    yield from (f"    clear({x}_all, n, width, begin, end)" for x in packed)
    yield "    for start in range(begin, end, BLOCK):"
    yield "        count = min(BLOCK, n - start)"
    yield from (f"        unpack({x}_all, start, count, width, {x}_fields)" for x in read)
    yield from (f"        {x}_part = {x}_all[start : start + count]" for x in elements)
    yield "        for j in range(count):"
    yield from (f"            {x} = {x}_{'fields' if x in read else 'part'}[j]" for x in step.reads)
    for line in step.lines:
        result, value = line.split(" = ")
        yield f"            {result} = kind({value})"  # Numba widens sums of 32 bits
    yield from (
        f"            {rooms.get(x, x)}_fields[j] = {x} & mask" if x in packed else f"            {x}_part[j] = {x}"
        for x in step.writes
    )
    yield from (f"        pack({rooms.get(x, x)}_fields, start, count, width, {x}_all)" for x in packed)


def _made(name: str, step: FieldStep) -> Any:  # noqa: ANN401 - Numba ships no types
    scope: dict[str, Any] = {"__name__": __name__, "np": np, "flat": flat, "WORD": WORD, "BLOCK": BLOCK}
    scope |= {"pack": pack, "unpack": unpack, "clear": clear}
    exec(compile("\n".join(_source(name, step)), __file__, "exec"), scope)  # of names in this package alone
    return compiled(scope[name])


KERNELS = {name: _made(name, step) for name, step in STEPS.items()}
