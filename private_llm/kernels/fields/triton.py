"""Local steps on ring elements and packed fields on GPUs (Triton), made of `kernels.fields`; packing as in `cpu.py`.

One program takes one block of 512 elements. Fields straddle words, so packing ors each field into the one
or two zeroed words it touches, atomically: the order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import triton
import triton.language as tl

from private_llm.kernels.fields import STEPS, FieldStep
from private_llm.kernels.pointwise.triton import jit_of

BLOCK = 512


@triton.jit
def _places(i_start, n, F: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Word, following word and bit offset of each field: eight interleaved streams in a full block, else one."""
    # [BLOCK]
    o = tl.arange(0, BLOCK).to(tl.int64)
    full = i_start + BLOCK <= n
    o_bit = tl.where(full, o >> 3, o) * F
    o_word = (i_start >> 6) * F + tl.where(full, (o_bit >> 6) * 8 + (o & 7), o_bit >> 6)
    return o_word, o_word + tl.where(full, 8, 1), o_bit & 63


@triton.jit
def _load_fields(words, o_word, o_next, o_off, m_n, F: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Fields below 2^F, uint64."""
    m_spill = m_n & (o_off + F > 64)
    # [BLOCK]
    b_low = tl.load(words + o_word, mask=m_n, other=0).to(tl.uint64, bitcast=True) >> o_off.to(tl.uint64)
    b_high = tl.load(words + o_next, mask=m_spill, other=0).to(tl.uint64, bitcast=True)
    b_high = b_high << tl.where(m_spill, 64 - o_off, 0).to(tl.uint64)
    return (b_low | b_high) & ((1 << F) - 1)


@triton.jit
def _or_fields(words, b_fields, o_word, o_next, o_off, m_n, F: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    m_spill = m_n & (o_off + F > 64)
    b_low = (b_fields << o_off.to(tl.uint64)).to(tl.int64, bitcast=True)
    b_high = (b_fields >> tl.where(m_spill, 64 - o_off, 0).to(tl.uint64)).to(tl.int64, bitcast=True)
    tl.atomic_or(words + o_word, b_low, mask=m_n, sem="relaxed")
    tl.atomic_or(words + o_next, b_high, mask=m_spill, sem="relaxed")


@triton.jit
def _load_ring(x, o_n, m_n, BITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Ring elements as unsigned numbers, so that shifts are logical."""
    b_x = tl.load(x + o_n, mask=m_n, other=0)
    if BITS == 64:
        return b_x.to(tl.uint64, bitcast=True)
    else:
        return b_x.to(tl.uint32, bitcast=True)


@triton.jit
def _store_ring(x, b_x, o_n, m_n, BITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    if BITS == 64:
        tl.store(x + o_n, b_x.to(tl.int64, bitcast=True), mask=m_n)
    else:
        tl.store(x + o_n, b_x.to(tl.int32, bitcast=True), mask=m_n)


def _source(name: str, step: FieldStep) -> Iterator[str]:
    """Lines of a kernel: operands, n, numbers, width of a field, and bits of an element."""
    taken = ", ".join([f"{x}_at" for x in step.operands])
    constants = ", ".join([f"{x}: tl.constexpr" for x in (*step.numbers, "WIDTH", "BITS", "BLOCK")])
    yield f"def {name}_kernel({taken}, n, {constants}):"
    yield "    kind: tl.constexpr = tl.uint64 if BITS == 64 else tl.uint32"
    yield "    one: tl.constexpr = 1"
    yield "    top: tl.constexpr = BITS - 1"
    yield "    quarter: tl.constexpr = 1 << (BITS - 2)"
    yield from ("    up: tl.constexpr = BITS - f" for x in step.numbers if x == "f")
    yield "    i_start = tl.program_id(0).to(tl.int64) * BLOCK"
    yield "    o_n = i_start + tl.arange(0, BLOCK)"
    yield "    m_n = o_n < n"
    yield "    o_word, o_next, o_off = _places(i_start, n, WIDTH, BLOCK)"
    for x in step.reads:
        packed = f"_load_fields({x}_at, o_word, o_next, o_off, m_n, WIDTH).to(kind)"
        yield f"    {x} = {packed if x in step.packed else f'_load_ring({x}_at, o_n, m_n, BITS)'}"
    for line in step.lines:
        result, value = line.split(" = ")
        yield f"    {result} = ({value}).to(kind)"
    for x in step.writes:
        if x in step.packed:
            yield f"    {x} = {x}.to(tl.uint64) & ((1 << WIDTH) - 1)"
            yield f"    _or_fields({x}_at, {x}, o_word, o_next, o_off, m_n, WIDTH)"
        else:
            yield f"    _store_ring({x}_at, {x}, o_n, m_n, BITS)"


KERNELS = {
    name: jit_of("\n".join([*_source(name, step), ""]), f"{name}_kernel", globals()) for name, step in STEPS.items()
}


def _launcher(name: str, step: FieldStep) -> Callable[..., None]:
    """Of a step: operands that are read, numbers, width of a field, and what is written, with packed words of zero."""
    elements = next(number for number, x in enumerate(step.operands) if x not in step.packed)

    def launch(*given: Any) -> None:  # noqa: ANN401 - tensors and numbers
        read, last = len(step.operands) - len(step.writes), len(given) - len(step.writes)
        operands, numbers, width = given[:read] + given[last:], map(int, given[read : last - 1]), given[last - 1]
        like = operands[elements]
        if n := like.numel():
            sizes = {"WIDTH": width, "BITS": like.element_size() * 8, "BLOCK": BLOCK}
            chosen = dict(zip(step.numbers, numbers, strict=True))
            KERNELS[name][(triton.cdiv(n, BLOCK),)](*operands, n, **chosen, **sizes)

    return launch


globals().update({name: _launcher(name, step) for name, step in STEPS.items()})
