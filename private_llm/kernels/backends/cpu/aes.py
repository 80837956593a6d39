"""AES-128 inside Numba kernels: whether the processor's own instructions (AES-NI) can be used, and round keys.

For kernels that follow a chain of blocks, where calls of a library for each step would cost more than the cipher
(`aes_fan`, and below). Where they cannot, OpenSSL's cipher gives the same blocks.

AES-128 key streams in counter mode inside Numba kernels, from any byte on, by the processor's own instructions.

The stream is that of counter mode from counter 0 (NIST SP 800-38A, section 6.5): block i is the cipher of i as a
big-endian number of 16 bytes. Where the processor has them (VAES), an instruction works on four blocks; eight of them
are under way at a time. One core of a Sapphire Rapids makes 18 to 22 GB/s, OpenSSL 4 there 9 GB/s. For processors for
which `aes.usable()` is true only: elsewhere these functions are never compiled, and OpenSSL gives the same bytes.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, types
from numba.extending import intrinsic

from private_llm.kernels.address import Array, flat
from private_llm.kernels.compiling import compiled


@cache
def usable() -> bool:
    """Whether this processor has the instructions, and the compiler targets it and no other."""
    if config.CPU_NAME or config.CPU_FEATURES:
        return False
    features = binding.get_host_cpu_features()
    return platform.machine().lower() in ("x86_64", "amd64") and bool(features.get("aes"))


def round_keys(key: bytes) -> Array:
    """The round keys uint64 [11, 2] of a key of 16 bytes (FIPS 197, section 5.2)."""
    box = _substitution()
    words = [key[at : at + 4] for at in range(0, 16, 4)]
    constant = 1
    for number in range(4, 44):
        last = words[-1]
        if number % 4 == 0:
            last = bytes([box[last[1]] ^ constant, box[last[2]], box[last[3]], box[last[0]]])
            constant = constant << 1 ^ (0x11B if constant & 0x80 else 0)
        words.append(bytes(a ^ b for a, b in zip(words[-4], last, strict=True)))
    return np.frombuffer(b"".join(words), dtype="<u8").astype(np.uint64).reshape(11, 2)


@cache
def _substitution() -> bytes:
    """AES's table of bytes (FIPS 197, section 5.1.1): inverses modulo x^8 + x^4 + x^3 + x + 1, then an affine map."""
    power, byte = [0] * 255, 1
    for exponent in range(255):  # powers of the generator x + 1
        power[exponent] = byte
        byte = byte ^ (byte << 1) ^ (0x11B if byte & 0x80 else 0)
    inverse = {power[exponent]: power[-exponent % 255] for exponent in range(255)} | {0: 0}
    table = []
    for value in range(256):
        turned = made = inverse[value]
        for _ in range(4):
            turned = (turned << 1 | turned >> 7) & 0xFF
            made ^= turned
        table.append(made ^ 0x63)
    return bytes(table)


_FEATURES = binding.get_host_cpu_features()
LANES = 4 if _FEATURES.get("vaes", False) and _FEATURES.get("avx512f", False) else 1
"""Blocks in a vector."""
_UNDER_WAY = 8
"""Vectors that are encrypted side by side: an AES instruction takes several cycles, and one or two start in each."""
BLOCK = 16
"""Bytes of a block."""
SPILL = BLOCK * LANES
"""`write_lines` writes fewer bytes than this beyond a line's end."""

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_KEY = ir.VectorType(_I64, 2)
_VECTOR = ir.VectorType(_I64, 2 * LANES)
_UNDEFINED = ir.Constant(_VECTOR, ir.Undefined)


def _encrypt(vectors: int) -> Callable[..., None]:
    """Blocks first .. of the stream under the round keys at an address, as many as `vectors` hold, to memory."""

    @intrinsic
    def run(typing_context, keys, first, to):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
            table = builder.inttoptr(args[0], _KEY.as_pointer())

            def known(name: str, operands: int) -> Any:  # noqa: ANN401
                kind = ir.FunctionType(_VECTOR, [_VECTOR] * operands)
                return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)

            def spread(value: Any, count: int) -> Any:  # noqa: ANN401
                """The first `count` lanes of a vector, over and over."""
                mask = ir.Constant(ir.VectorType(_I32, 2 * LANES), list(range(count)) * (2 * LANES // count))
                return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)

            def key(number: int) -> Any:  # noqa: ANN401
                return spread(builder.load(builder.gep(table, [_I64(number)]), align=8), 2)

            start = spread(builder.insert_element(_UNDEFINED, args[1], _I32(0)), 1)
            odd = ir.Constant(_VECTOR, [0, -1] * LANES)
            blocks = []
            for n in range(vectors):  # the counter in the odd lanes, big-endian; the even ones are zero
                ahead = [extra for lane in range(LANES) for extra in (0, n * LANES + lane)]
                counter = builder.add(start, ir.Constant(_VECTOR, ahead))
                swapped = builder.call(known(f"llvm.bswap.v{2 * LANES}i64", 1), [counter])
                blocks.append(builder.xor(builder.and_(swapped, odd), key(0)))
            width = {1: "", 4: ".512"}[LANES]
            for number in range(1, 11):
                step = known(f"llvm.x86.aesni.aesenc{'last' if number == 10 else ''}{width}", 2)
                round_key = key(number)
                blocks = [builder.call(step, [block, round_key]) for block in blocks]
            for n, block in enumerate(blocks):
                place = builder.add(args[2], _I64(BLOCK * LANES * n))
                builder.store(block, builder.inttoptr(place, _VECTOR.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.intp), codegen

    made: Callable[..., None] = run
    return made


_many = _encrypt(_UNDER_WAY)
_one = _encrypt(1)


@compiled
def write_blocks(keys: int, first: int, to: int, blocks: int) -> None:
    """Blocks first .. first + blocks - 1 to memory, and up to LANES - 1 more after them."""
    done = 0
    while blocks - done >= _UNDER_WAY * LANES:
        _many(keys, first + done, to + BLOCK * done)
        done += _UNDER_WAY * LANES
    while done < blocks:
        _one(keys, first + done, to + BLOCK * done)
        done += LANES


@compiled
def write_bytes(keys: int, start: int, to: int, count: int) -> None:
    """Bytes start .. start + count - 1 of the stream to memory, and nothing else."""
    at, end, zero = start, start + count, np.uint8(0)
    scratch = np.empty(SPILL, np.uint8)
    while at < end:
        lead = at & (BLOCK - 1)
        blocks = (end - at) // BLOCK // LANES * LANES
        if lead == 0 and blocks:
            write_blocks(keys, at // BLOCK, to + at - start, blocks)
            at += BLOCK * blocks
        else:
            _one(keys, at // BLOCK, scratch.ctypes.data)
            taken = min(SPILL - lead, end - at)
            place = flat(to + at - start, taken, zero)
            for n in range(taken):
                place[n] = scratch[lead + n]
            at += taken


@compiled
def write_lines(keys: int, start: int, step: int, lines: int, length: int, to: int, pitch: int) -> None:
    """Line i, `length` bytes of the stream from byte start + i step on, to memory at to + i pitch.

    Up to BLOCK - 1 bytes before each line are overwritten, and fewer than `SPILL` after it: lines need at least BLOCK
    bytes between them, and the last one SPILL after it.
    """
    for i in range(lines):
        first = start + i * step
        lead = first & (BLOCK - 1)
        write_blocks(keys, first // BLOCK, to + i * pitch - lead, (lead + length + BLOCK - 1) // BLOCK)
