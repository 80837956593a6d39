"""AES-128 under fixed keys inside Numba kernels, by the processor's own instructions (AES-NI); blocks are two uint64.

For kernels that follow a chain of blocks, where calls of a library for each step would cost more than the cipher. For
`usable` processors only: elsewhere these functions are never compiled, and OpenSSL's cipher gives the same blocks.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, types
from numba.extending import intrinsic

from private_llm.kernels.compiling import compiled

Array = np.ndarray[Any, Any]

_I64 = ir.IntType(64)
_BLOCK = ir.VectorType(_I64, 2)


@cache
def usable() -> bool:
    """Whether this processor has the instructions, and the compiler targets it and no other."""
    if config.CPU_NAME or config.CPU_FEATURES:
        return False
    features = binding.get_host_cpu_features()
    return platform.machine().lower() in ("x86_64", "amd64") and bool(features.get("aes"))


@intrinsic
def encrypt(typing_context, low, high, keys):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """The block (low, high) under the round keys at an address: 11 blocks, as `round_keys` has them."""
    word = types.uint64

    def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:  # noqa: ANN401
        first, second, address = args
        table = builder.inttoptr(address, _BLOCK.as_pointer())

        def key(number: int) -> Any:  # noqa: ANN401
            return builder.load(builder.gep(table, [ir.Constant(_I64, number)]), align=8)

        def run(name: str, block: Any, number: int) -> Any:  # noqa: ANN401
            full = f"llvm.x86.aesni.{name}"
            known = builder.module.globals.get(full)
            function = known or ir.Function(builder.module, ir.FunctionType(_BLOCK, [_BLOCK, _BLOCK]), full)
            return builder.call(function, [block, key(number)])

        made = builder.insert_element(ir.Constant(_BLOCK, ir.Undefined), first, ir.Constant(_I64, 0))
        made = builder.xor(builder.insert_element(made, second, ir.Constant(_I64, 1)), key(0))
        for number in range(1, 10):
            made = run("aesenc", made, number)
        made = run("aesenclast", made, 10)
        halves = [builder.extract_element(made, ir.Constant(_I64, half)) for half in range(2)]
        return context.make_tuple(builder, types.UniTuple(word, 2), halves)

    return types.UniTuple(word, 2)(word, word, types.uintp), codegen


KEYS_BYTES = 176
"""Size of one key's round keys."""


@compiled
def encrypt_block(low: Any, high: Any, keys: Array) -> Any:  # noqa: ANN401 - numbers of Numba's
    """`encrypt` with round keys [11, 2] as an array."""
    return encrypt(low, high, np.uintp(keys.ctypes.data))


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
