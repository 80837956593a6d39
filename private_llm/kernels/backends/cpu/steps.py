"""Recorded steps on the CPU: one call runs many kernels, without Python in between (Numba, GIL-free).

A step is a row of 64-bit words: the address of its function, then what it takes. Messages are rows, too. Kernels that
exist are called by a function of the same name here, which reads their arguments from the row; sums, products and
copies of PyTorch become strided loops over at most `DIMS` dimensions. `KERNELS` says what arguments a kernel takes:
"r" an address that is read, "k" that of a module's round keys, "w" one that is written (and may be read), "i" a number,
"z" the type of the elements (a step has 64-bit elements only), "p" a plan (int64) and "f" flags (uint8), which take two
words: address and length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from private_llm.kernels.address import WORD, flat
from private_llm.kernels.backends.cpu import (
    aes,
    bits,
    exponential,
    frames,
    matmul,
    queues,
    seeded_matmul,
    team,
    trunc,
    waves,
)
from private_llm.kernels.backends.cpu.connection import FIELDS, HERE, KIND, MEMORY
from private_llm.kernels.compiling import CompiledStep, compiled

DIMS = 4
"""Dimensions of a strided loop."""

Array = np.ndarray[Any, Any]
Row = Any
"""The words of a step after its function's address."""

_SIGNED = np.int64(0)
_FLAG = np.uint8(0)


STOP, SEND, RECEIVE, TOGETHER = range(4)
"""What stands in place of a function's address: an event for Python; a message, with the number of its connection, the
address of its payload, the number of its elements, and 4 words of tag; pieces of a step (`team.piece`)."""


if HERE:

    @compiled
    def _message(code: int, link: int, payload: int, count: int, tag: Array) -> bool:
        """Send or receive; False: Python does it."""
        memory = flat(link, FIELDS, _SIGNED)[KIND] == MEMORY
        if code == SEND:
            done = queues.send(link, payload, count, tag) if memory else frames.send(link, payload, count, tag)
        else:
            done = queues.receive(link, payload, count, tag) if memory else frames.receive(link, payload, count, tag)
        return bool(done)

    @compiled
    def _pieces(workers: int, row: int) -> None:
        """With a team, if there is one."""
        if workers:
            team.together(workers, row)
        else:
            team.alone(row)

else:

    @compiled
    def _message(code: int, link: int, payload: int, count: int, tag: Array) -> bool:
        """Python does it: elsewhere the functions that would be called do not exist."""
        return False

    @compiled
    def _pieces(workers: int, row: int) -> None:
        """One after the other, for the same reason."""
        team.alone(row)


@compiled
def run(table: int, starts: int, first: int, last: int, links: int, workers: int) -> int:
    """Rows first .. last - 1 of a table of words, which begin where `starts` says, with the connections `links`
    (`frames.py`, `queues.py`) and a team (`team.py`; all by address, 0 for none). Returns the first row that is left
    to Python, or `last`.
    """
    words, rows = flat(table, 1 << 40, _SIGNED), flat(starts, 1 << 40, _SIGNED)
    for step in range(first, last):
        at = rows[step]
        code = words[at]
        if code > TOGETHER:
            team.call(code, table + 8 * (at + 1))
            continue
        if code == TOGETHER:
            _pieces(workers, table + 8 * (at + 1))
            continue
        if code == STOP:
            return step
        link, tag = links + 8 * FIELDS * words[at + 1], words[at + 4 : at + 8]
        if not _message(code, link, words[at + 2], words[at + 3], tag):
            return step
    return last


# -- kernels that exist -------------------------------------------------------------------------------------------
@CompiledStep
def transpose_words(row: Row) -> None:
    """`bits.transpose_words`."""
    a = carray(row, 6)
    bits.transpose_words(a[0], a[1], WORD, a[2], a[3], a[4], a[5])


@CompiledStep
def block_monomials(row: Row) -> None:
    """`bits.block_monomials`."""
    a = carray(row, 10)
    bits.block_monomials(a[0], a[1], a[2], flat(a[3], a[4], _SIGNED), a[5], a[6], a[7], a[8], a[9])


@CompiledStep
def block_carries(row: Row) -> None:
    """`bits.block_carries`."""
    a = carray(row, 12)
    plan = flat(a[3], a[4], _SIGNED)
    bits.block_carries(a[0], a[1], a[2], plan, a[5], a[6], a[7] != 0, a[8], a[9], a[10], a[11])


@CompiledStep
def join_products(row: Row) -> None:
    """`bits.join_products`."""
    a = carray(row, 9)
    bits.join_products(a[0], flat(a[1], a[2], _SIGNED), a[3], a[4], a[5], a[6], a[7], a[8])


@CompiledStep
def join_carries(row: Row) -> None:
    """`bits.join_carries`."""
    a = carray(row, 12)
    plan = flat(a[4], a[5], _SIGNED)
    bits.join_carries(a[0], a[1], a[2], a[3], plan, a[6], a[7] != 0, a[8], a[9], a[10], a[11])


@CompiledStep
def inject_products(row: Row) -> None:
    """`bits.inject_products`."""
    a = carray(row, 10)
    bits.inject_products(a[0], a[1], a[2], flat(a[3], a[4], _FLAG), a[5], a[6], a[7], WORD, a[8], a[9])


@CompiledStep
def inject_terms(row: Row) -> None:
    """`bits.inject_terms`."""
    a = carray(row, 17)
    bits.inject_terms(
        a[0], a[1], a[2], a[3], a[4], a[5], flat(a[6], a[7], _FLAG), a[8], a[9], a[10], a[11], a[12] != 0, a[13], a[14],
        WORD, a[15], a[16],
    )  # fmt: skip


@CompiledStep
def fields_packed(row: Row) -> None:
    """`trunc.packed`."""
    a = carray(row, 6)
    trunc.packed(a[0], a[1], a[2], WORD, a[3], a[4], a[5])


@CompiledStep
def fields_unpacked(row: Row) -> None:
    """`trunc.unpacked`."""
    a = carray(row, 6)
    trunc.unpacked(a[0], a[1], a[2], WORD, a[3], a[4], a[5])


@CompiledStep
def trunc_helper(row: Row) -> None:
    """`trunc.helper`."""
    a = carray(row, 16)
    trunc.helper(
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], WORD, a[10], a[11], a[12], a[13], a[14], a[15]
    )


@CompiledStep
def trunc_opened(row: Row) -> None:
    """`trunc.opened`."""
    a = carray(row, 11)
    trunc.opened(a[0], a[1], a[2], a[3], a[4], a[5], a[6], WORD, a[7], a[8], a[9], a[10])


@CompiledStep
def trunc_closed(row: Row) -> None:
    """`trunc.closed`."""
    a = carray(row, 12)
    trunc.closed(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], WORD, a[8], a[9], a[10], a[11])


@CompiledStep
def dot_product(row: Row) -> None:
    """`matmul.dot_product`."""
    a = carray(row, 8)
    matmul.dot_product(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], WORD)


@CompiledStep
def row_product(row: Row) -> None:
    """`matmul.row_product`."""
    a = carray(row, 8)
    matmul.row_product(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], WORD)


@CompiledStep
def exponential_weighed(row: Row) -> None:
    """`exponential.weighed`."""
    a = carray(row, 17)
    digits, near = flat(a[4], a[5], _SIGNED), flat(a[6], a[7], _SIGNED)
    far, fine = flat(a[8], a[9], _SIGNED), flat(a[10], a[11], _SIGNED)
    exponential.weighed(a[0], a[1], a[2], a[3], digits, near, far, fine, a[12], a[13], a[14], a[15], a[16])


@CompiledStep
def exponential_placed(row: Row) -> None:
    """`exponential.placed`."""
    a = carray(row, 13)
    digits, coarse, fine = flat(a[3], a[4], _SIGNED), flat(a[5], a[6], _SIGNED), flat(a[7], a[8], _SIGNED)
    exponential.placed(a[0], a[1], a[2], digits, coarse, fine, a[9], a[10], a[11], a[12])


@CompiledStep
def waves_hidden(row: Row) -> None:
    """`waves.hidden`."""
    a = carray(row, 13)
    plan, sizes, turns = flat(a[2], a[3], _SIGNED), flat(a[4], a[5], _SIGNED), flat(a[6], a[7], _SIGNED)
    waves.hidden(a[0], a[1], plan.reshape(a[3] // 4, 4), sizes, turns, a[8], a[9], a[10], a[11], a[12])


@CompiledStep
def waves_summed(row: Row) -> None:
    """`waves.summed`."""
    a = carray(row, 14)
    plan, sizes, turns = flat(a[4], a[5], _SIGNED), flat(a[6], a[7], _SIGNED), flat(a[8], a[9], _SIGNED)
    waves.summed(a[0], a[1], a[2], a[3], plan.reshape(a[5] // 4, 4), sizes, turns, a[10], a[11], a[12], a[13])


@CompiledStep
def waves_wraps(row: Row) -> None:
    """`waves.wraps`."""
    a = carray(row, 11)
    waves.wraps(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10])


@CompiledStep
def waves_widened(row: Row) -> None:
    """`waves.widened`."""
    a = carray(row, 12)
    waves.widened(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8] != 0, a[9], a[10], a[11])


@CompiledStep
def drawn_product(row: Row) -> None:
    """`seeded_matmul.in_register_tiles`."""
    a = carray(row, 13)
    seeded_matmul.in_register_tiles(
        a[0], a[1], a[2], a[3], a[4] != 0, a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], WORD
    )  # fmt: skip


KERNELS: dict[Any, tuple[Any, str]] = {
    bits.transpose_words: (transpose_words, "rizwiii"),
    bits.block_monomials: (block_monomials, "riipwiiii"),
    bits.block_carries: (block_carries, "riipriiwiii"),
    bits.join_products: (join_products, "rpiwiiii"),
    bits.join_carries: (join_carries, "rrripiiwiii"),
    bits.inject_products: (inject_products, "rirfwiizii"),
    bits.inject_terms: (inject_terms, "rirrrifririiwizii"),
    trunc.packed: (fields_packed, "riizwii"),
    trunc.unpacked: (fields_unpacked, "riizwii"),
    trunc.helper: (trunc_helper, "rrrrrrriiizwwwwii"),
    trunc.opened: (trunc_opened, "rrrriiizwwii"),
    trunc.closed: (trunc_closed, "rrrrriiizwwii"),
    exponential.weighed: (exponential_weighed, "rrrippppiiwii"),
    exponential.placed: (exponential_placed, "rripppiwii"),
    waves.hidden: (waves_hidden, "ripppriwii"),
    waves.summed: (waves_summed, "rriipppiwii"),
    waves.wraps: (waves_wraps, "rriiiiriwii"),
    waves.widened: (waves_widened, "rrriiiiiiwii"),
    matmul.dot_product: (dot_product, "rrwiiiiiz"),
    matmul.row_product: (row_product, "rrwiiiiiz"),
}
if aes.usable():  # elsewhere it cannot be compiled
    KERNELS[seeded_matmul.in_register_tiles] = drawn_product, "rikiiiiiiiwiwz"


# -- what PyTorch does ------------------------------------------------------------------------------------------------
ADD, SUB, MUL, XOR, AND, RIGHT, ADD_TIMES = range(7)
"""What `combine` computes; RIGHT shifts the signed x to the right by y, the last is x + factor y."""


@compiled
def _dense(operation: int, factor: int, out: Array, x: Array, y: Array) -> None:
    """A line of `combine` without gaps: each loop becomes vectors."""
    if operation == ADD:
        for m in range(len(out)):
            out[m] = x[m] + y[m]
    elif operation == SUB:
        for m in range(len(out)):
            out[m] = x[m] - y[m]
    elif operation == MUL:
        for m in range(len(out)):
            out[m] = x[m] * y[m]
    elif operation == XOR:
        for m in range(len(out)):
            out[m] = x[m] ^ y[m]
    elif operation == AND:
        for m in range(len(out)):
            out[m] = x[m] & y[m]
    elif operation == RIGHT:
        for m in range(len(out)):
            out[m] = x[m] >> y[m]
    else:
        for m in range(len(out)):
            out[m] = x[m] + factor * y[m]


@compiled
def _with_one(operation: int, factor: int, out: Array, x: Array, y: int) -> None:
    """The same where y is one number for all."""
    if operation in (ADD, SUB, ADD_TIMES):
        more = y if operation == ADD else -y if operation == SUB else factor * y
        for m in range(len(out)):
            out[m] = x[m] + more
    elif operation == MUL:
        for m in range(len(out)):
            out[m] = x[m] * y
    elif operation == XOR:
        for m in range(len(out)):
            out[m] = x[m] ^ y
    elif operation == AND:
        for m in range(len(out)):
            out[m] = x[m] & y
    else:
        for m in range(len(out)):
            out[m] = x[m] >> y


@compiled
def _from_one(out: Array, x: int, y: Array) -> None:
    """x - y, where x is one number for all."""
    for m in range(len(out)):
        out[m] = x - y[m]


@compiled
def _apart(
    operation: int, factor: int, count: int, out: int, so: int, x: int, sx: int, y: int, sy: int
) -> None:  # fmt: skip
    """A line with gaps."""
    outs, xs, ys = flat(out, 1 << 40, _SIGNED), flat(x, 1 << 40, _SIGNED), flat(y, 1 << 40, _SIGNED)
    times = 1 if operation == ADD else -1 if operation == SUB else factor
    for m in range(count):
        one, other = xs[m * sx], ys[m * sy]
        if operation == MUL:
            outs[m * so] = one * other
        elif operation == XOR:
            outs[m * so] = one ^ other
        elif operation == AND:
            outs[m * so] = one & other
        elif operation == RIGHT:
            outs[m * so] = one >> other
        else:
            outs[m * so] = one + times * other


@compiled
def _line(
    operation: int, factor: int, count: int, out: int, so: int, x: int, sx: int, y: int, sy: int
) -> None:  # fmt: skip
    """One line of `combine`: addresses and strides."""
    if so == 1 and sx == 1 and sy == 1:
        _dense(operation, factor, flat(out, count, _SIGNED), flat(x, count, _SIGNED), flat(y, count, _SIGNED))
    elif so == 1 and sx == 1 and sy == 0:
        _with_one(operation, factor, flat(out, count, _SIGNED), flat(x, count, _SIGNED), flat(y, 1, _SIGNED)[0])
    elif so == 1 and sx == 0 and sy == 1 and operation == SUB:
        _from_one(flat(out, count, _SIGNED), flat(x, 1, _SIGNED)[0], flat(y, count, _SIGNED))
    else:
        _apart(operation, factor, count, out, so, x, sx, y, sy)


@CompiledStep
def combine(row: Row) -> None:
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
def _copied(out: Array, x: Array) -> None:
    """Elements without gaps."""
    for m in range(len(out)):
        out[m] = x[m]


@CompiledStep
def copy(row: Row) -> None:
    """out = x. The row: sizes of 4 dimensions, then address and 4 strides of out and x in elements."""
    a = carray(row, 14)
    out, x = flat(a[4], 1 << 40, _SIGNED), flat(a[9], 1 << 40, _SIGNED)
    for i in range(a[0]):
        for j in range(a[1]):
            for k in range(a[2]):
                to = i * a[5] + j * a[6] + k * a[7]
                at = i * a[10] + j * a[11] + k * a[12]
                if a[8] == 1 and a[13] == 1:
                    _copied(flat(a[4] + 8 * to, a[3], _SIGNED), flat(a[9] + 8 * at, a[3], _SIGNED))
                else:
                    for m in range(a[3]):
                        out[to + m * a[8]] = x[at + m * a[13]]


@compiled
def _summed(x: Array) -> int:
    """Of elements without gaps."""
    total = np.int64(0)
    for m in range(len(x)):
        total += x[m]
    return int(total)


@CompiledStep
def sum_last(row: Row) -> None:
    """out [n0, n1, n2] = the sum of x [n0, n1, n2, n3] over its last dimension; the row as that of `copy`."""
    a = carray(row, 14)
    out, x = flat(a[4], 1 << 40, _SIGNED), flat(a[9], 1 << 40, _SIGNED)
    for i in range(a[0]):
        for j in range(a[1]):
            for k in range(a[2]):
                at = i * a[10] + j * a[11] + k * a[12]
                total = np.int64(0)
                if a[13] == 1:
                    total = _summed(flat(a[9] + 8 * at, a[3], _SIGNED))
                else:
                    for m in range(a[3]):
                        total += x[at + m * a[13]]
                out[i * a[5] + j * a[6] + k * a[7]] = total


@CompiledStep
def gather(row: Row) -> None:
    """out [n] = x [places], 0 where a place is negative. The row: n, out, x, places (addresses)."""
    a = carray(row, 4)
    out, x, places = flat(a[1], a[0], _SIGNED), flat(a[2], 1 << 40, _SIGNED), flat(a[3], a[0], _SIGNED)
    for m in range(a[0]):
        at = places[m]
        out[m] = x[at] if at >= 0 else 0
