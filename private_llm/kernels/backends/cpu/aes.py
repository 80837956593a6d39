"""AES-128 inside Numba kernels: whether the processor's own instructions (AES-NI) can be used, and round keys.

For kernels that follow a chain of blocks, where calls of a library for each step would cost more than the cipher
(`aes_fan`, `aes_ctr`). Where they cannot, OpenSSL's cipher gives the same blocks.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding
from numba import config

Array = np.ndarray[Any, Any]


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
