"""Local steps of distributed point functions on the CPU (Numba, GIL-free); blocks are pairs of uint64."""

from __future__ import annotations

from typing import Any

import numpy as np

from private_llm.kernels.compiling import compiled

Array = np.ndarray[Any, Any]


@compiled
def children(
    seeds: Array, bits: Array, left: Array, right: Array, cw: Array, cw_left: Array, cw_right: Array,
    out: Array, out_bits: Array,
) -> None:  # fmt: skip
    """One level down: seeds [T, m, 2] and control bits [T, m] to out [T, 2m, 2] and out_bits [T, 2m].

    `left`, `right` [T, m, 2] are the block cipher's outputs of the seeds; adding the seed makes them one-way
    (Matyas-Meyer-Oseas). The lowest bit of a child is its control bit. `cw` [T, 2] corrects children of a set bit.
    """
    tokens, width, _ = seeds.shape
    one = np.uint64(1)
    for t in range(tokens):
        for i in range(width):
            for side in range(2):
                block = left if side == 0 else right
                low = block[t, i, 0] ^ seeds[t, i, 0]
                high = block[t, i, 1] ^ seeds[t, i, 1]
                control = low & one
                if bits[t, i]:
                    low ^= cw[t, 0]
                    high ^= cw[t, 1]
                    control ^= cw_left[t] if side == 0 else cw_right[t]
                out[t, 2 * i + side, 0] = low & ~one
                out[t, 2 * i + side, 1] = high
                out_bits[t, 2 * i + side] = control


@compiled
def leaves(seeds: Array, blocks: Array, bits: Array, final: Array, negate: bool, out: Array) -> None:
    """Additive shares of the one-hot rows: two 64-bit leaves a seed. out [T, domain] (32 or 64 bits)."""
    tokens, domain = out.shape
    kind = out.dtype.type
    for t in range(tokens):
        for v in range(domain):
            i = v >> 1
            side = v & 1
            value = blocks[t, i, side] ^ seeds[t, i, side]
            if bits[t, i]:
                value += final[t, side]
            out[t, v] = kind(np.uint64(0) - value if negate else value)
