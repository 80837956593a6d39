"""One block under several fixed keys of AES-128 at once, inside Numba kernels: what a node of a tree of seeds needs.

Round keys are interleaved, [11, LANES, 2] (`table`), so that where the processor has them (VAES) one instruction
works on the block under all keys; elsewhere one follows the other. For `aes.usable()` processors only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

Array = np.ndarray[Any, Any]

LANES = 4
"""Keys of a table, and blocks that are written for each, whether there are so many or not."""
LINE = 64
"""Bytes of so many blocks; addresses that are multiples of it are read fastest."""

_FEATURES = binding.get_host_cpu_features()
_WIDE = bool(_FEATURES.get("vaes", False)) and bool(_FEATURES.get("avx512f", False))
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_LINE, _BLOCK = ir.VectorType(_I64, 2 * LANES), ir.VectorType(_I64, 2)
_UNDEFINED = ir.Constant(_LINE, ir.Undefined)
_SEED = range(2)
_CONTROL = 6
"""Where a line that is a node has its seed, and all bits of it the control bit; its words are between."""


class _Lines:
    """Writes instructions on lines, vectors of eight words."""

    def __init__(self, builder: Any) -> None:  # noqa: ANN401 - llvmlite's
        self._builder = builder

    def load(self, address: Any, offset: int = 0) -> Any:  # noqa: ANN401
        return self._builder.load(self.pointer(address, offset), align=8)

    def pointer(self, address: Any, offset: int = 0, kind: Any = _LINE) -> Any:  # noqa: ANN401
        return self._builder.inttoptr(self._builder.add(address, _I64(offset)), kind.as_pointer())

    def picked(self, line: Any, places: list[int], other: Any = _UNDEFINED) -> Any:  # noqa: ANN401
        """The words at these places of a line and (from 8 on) another one."""
        return self._builder.shuffle_vector(line, other, ir.Constant(ir.VectorType(_I32, len(places)), places))

    def encrypted(self, plain: Any, table: Any, keys: int) -> Any:  # noqa: ANN401
        """The first `keys` blocks of a line, each under its key of the table, plus itself; the others are anything."""
        if _WIDE:
            return self._builder.xor(self._rounds(plain, table, 0, _LINE, ".512"), plain)
        blocks = [self._rounds(self.picked(plain, [0, 1]), table, 16 * key, _BLOCK, "") for key in range(keys)]
        blocks += [blocks[0]] * (LANES - keys)
        order = ir.Constant(ir.VectorType(_I32, 4), list(range(4)))
        halves = [self._builder.shuffle_vector(blocks[n], blocks[n + 1], order) for n in (0, 2)]
        places = ir.Constant(ir.VectorType(_I32, 8), list(range(8)))
        return self._builder.xor(self._builder.shuffle_vector(halves[0], halves[1], places), plain)

    def _rounds(self, block: Any, table: Any, offset: int, kind: Any, width: str) -> Any:  # noqa: ANN401
        for number in range(11):
            place = self.pointer(table, 16 * LANES * number + offset, kind)
            key = self._builder.load(place, align=8)
            if not number:
                block = self._builder.xor(block, key)
                continue
            name = f"llvm.x86.aesni.aesenc{'last' if number == 10 else ''}{width}"
            known = self._builder.module.globals.get(name)
            step = known or ir.Function(self._builder.module, ir.FunctionType(kind, [kind, kind]), name)
            block = self._builder.call(step, [block, key])
        return block


def _fan(keys: int) -> Callable[..., None]:
    """The block (low, high) under the first `keys` keys of the table at an address, plus itself, to memory."""

    @intrinsic
    def run(typing_context, low, high, table, to):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
            lines = _Lines(builder)
            plain = builder.insert_element(_UNDEFINED, args[0], _I32(0))
            plain = lines.picked(builder.insert_element(plain, args[1], _I32(1)), [0, 1] * LANES)
            builder.store(lines.encrypted(plain, args[2], keys), lines.pointer(args[3]), align=8)
            return context.get_dummy_value()

        return types.void(types.uint64, types.uint64, types.intp, types.intp), codegen

    made: Callable[..., None] = run
    return made


def _descent(keys: int) -> Callable[..., None]:
    """The child of a node: all are lines at addresses.

    A node: seed (2 words, the lowest bit 0), sum of words (4), control bit in all bits, nothing. fix: what is added if
    the control bit is set: to the child's seed, whose lowest bit is the child's control bit (2), and to the words (4).
    """

    @intrinsic
    def run(typing_context, node, fix, table, to):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
            lines = _Lines(builder)
            old = lines.load(args[0])
            made = lines.encrypted(lines.picked(old, [0, 1] * LANES), args[2], keys)
            fix = builder.and_(lines.load(args[1]), lines.picked(old, [_CONTROL] * 2 * LANES))
            seed, words = builder.xor(made, fix), builder.add(old, builder.add(made, fix))
            bit = builder.and_(builder.extract_element(seed, _I32(0)), _I64(1))
            line = lines.picked(seed, [n if n in _SEED else n + 2 * LANES for n in range(2 * LANES)], words)
            line = builder.and_(line, ir.Constant(_LINE, [-2, *[-1] * (2 * LANES - 1)]))
            line = builder.insert_element(line, builder.neg(bit), _I32(_CONTROL))
            builder.store(line, lines.pointer(args[3]), align=8)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp, types.intp), codegen

    made: Callable[..., None] = run
    return made


encrypt_two, encrypt_three = _fan(2), _fan(3)
"""(low, high, address of a table, address of a line): the block under two or three keys, each plus the block."""
descend_two, descend_three = _descent(2), _descent(3)
"""(address of a node, of a fix, of a table, of the child): as `_descent`, for at most two words and for more."""


def tables(groups: list[list[Array]]) -> Array:
    """For each group of round keys [11, 2], at most LANES: a table. [groups, 11, LANES, 2], at a multiple of LINE.

    The last key of a group fills the lanes left.
    """
    made = np.stack([np.stack([keys[min(n, len(keys) - 1)] for n in range(LANES)], 1) for keys in groups])
    room = np.empty(made.size + LINE // 8, dtype=np.uint64)
    start = -room.ctypes.data % LINE // 8
    room[start : start + made.size] = made.reshape(-1)
    return room[start : start + made.size].reshape(made.shape)
