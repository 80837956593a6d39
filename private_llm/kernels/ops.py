"""Every local kernel under one name: cpu tensors get the Numba kernel, cuda tensors Triton, meta tensors shapes.

All tensors are signed torch integers; the kernels see them as unsigned. Rows and packed fields are int64 words.
What each operation computes is said once, in `reference`, in plain torch. All raise UnsupportedOp for operands on
another device, or on a GPU without Triton, and DomainError for those that are not contiguous where the CPU's kernels
take addresses (kernels/address.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels import conv, matmul_rows, matmul_seeded, shapes
from private_llm.kernels.address import addresses
from private_llm.kernels.backends.cpu import bits as cpu_bits
from private_llm.kernels.backends.cpu import prg as cpu_prg
from private_llm.kernels.backends.cpu import trunc as cpu_trunc
from private_llm.kernels.backends.cpu.trunc import BLOCK
from private_llm.kernels.devices import triton_module
from private_llm.kernels.parallel import parallel_for
from private_llm.kernels.seeded_tensor import dense
from private_llm.kernels.shapes import Pair
from private_llm.kernels.shapes import packed_words as packed_words
from private_llm.kernels.trace_hook import this_thread

Array = np.ndarray[Any, Any]

_TRANSPOSE_S, _ROW_S, _INJECT_S, _FIELD_S = 2e-9, 1e-9, 1e-9, 1e-9
"""About what one thread takes: for the transposition of an element, for one row's word of a comparison, for one row's
element of an injection, for packing a field and what goes with it."""
WORDS = 8
"""Threads take multiples of so many words of bits: whole lines of the cache."""
_ZERO = {torch.int64: np.uint64(0), torch.int32: np.uint32(0)}


def _gpu(family: str, name: str, *arguments: Any, writes: int = 0) -> Any:  # noqa: ANN401
    """Call a Triton kernel's launcher on the GPU of its first argument; the last `writes` arguments are written to."""
    device = arguments[0].device
    if device.type != "cuda":
        raise UnsupportedOp(f"no kernel for device {device}; want cpu or cuda tensors (or meta for cost counting)")
    hook = this_thread.hook
    if hook is None:
        return on_gpu(family, name, *arguments)
    return hook.computed(partial(on_gpu, family, name), arguments, writes)


def on_gpu(family: str, name: str, *arguments: Any) -> Any:  # noqa: ANN401
    """Call a Triton kernel's launcher on the GPU of its first argument, and tell nobody."""
    with torch.cuda.device(arguments[0].device):
        given = arguments if family == "matmul" else map(dense, arguments)  # which makes masks piece by piece
        return getattr(triton_module(family), name)(*given)


def ring_matmul(x: Tensor, y: Tensor) -> Tensor:
    """torch.matmul modulo the ring size; x [..., M, K], y [..., K, N]; CPU: one thread.

    Raises DomainError for other shapes, and unless both are int64 or both int32; so do all products here.
    """
    if x.is_cpu:
        return matmul_seeded.product(x, y)
    if x.is_meta:
        return shapes.ring_matmul(x, y)
    made: Tensor = _gpu("matmul", "product", x, y)
    return made


def ring_matmul_pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
    """x0 y0 + x1 y1, both of one shape, as in `ring_matmul`, without a temporary of y's size."""
    shapes.check_pair(x0, y0, x1, y1)
    if x0.is_cpu:
        return matmul_seeded.product(x1, y1, matmul_seeded.product(x0, y0))
    if x0.is_meta:
        return shapes.ring_matmul_pair(x0, y0, x1, y1)
    made: Tensor = _gpu("matmul", "pair", x0, y0, x1, y1)
    return made


def ring_matmul_rows(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """x y[rows]^T modulo the ring size: [M, R] of x [M, K], y [N, K] and public row numbers [R], in any order.

    Of a y whose rows are contiguous, only these are read. Raises DomainError for a number outside 0 .. N-1.
    """
    if x.is_cpu:
        return matmul_rows.rows_product(x, y, rows)
    if x.is_meta:
        return shapes.ring_matmul_rows(x, y, rows)
    matmul_rows.check_inside("ring_matmul_rows", rows, len(y))
    made: Tensor = _gpu("matmul", "rows_product", x, y, rows.to(x.device))
    return made


def ring_matmul_rows_pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor, rows: Tensor) -> Tensor:
    """x0 y0[rows]^T + x1 y1[rows]^T, both of one shape, as in `ring_matmul_rows`."""
    shapes.check_pair(x0, y0, x1, y1)
    if x0.is_cpu:
        return matmul_rows.rows_product(x1, y1, rows, matmul_rows.rows_product(x0, y0, rows))
    if x0.is_meta:
        return shapes.ring_matmul_rows_pair(x0, y0, x1, y1, rows)
    matmul_rows.check_inside("ring_matmul_rows", rows, len(y0))
    rows = rows.to(x0.device)
    made: Tensor = _gpu("matmul", "rows_product", x1, y1, rows, _gpu("matmul", "rows_product", x0, y0, rows), writes=1)
    return made


def ring_matmul_lines(x: Tensor, y: Tensor, lines: Tensor) -> Tensor:
    """x y[lines] modulo the ring size: [M, N] of x [M, R], y [K, N] and public row numbers [R], in any order.

    Of a y whose rows are contiguous, only these are read. Raises DomainError for a number outside 0 .. K-1.
    """
    if x.is_cpu:
        return matmul_rows.lines_product(x, y, lines)
    if x.is_meta:
        return shapes.ring_matmul_lines(x, y, lines)
    matmul_rows.check_inside("ring_matmul_lines", lines, len(y))
    made: Tensor = _gpu("matmul", "lines_product", x, y, lines.to(x.device))
    return made


def ring_matmul_lines_pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor, lines: Tensor) -> Tensor:
    """x0 y0[lines] + x1 y1[lines], both of one shape, as in `ring_matmul_lines`."""
    shapes.check_pair(x0, y0, x1, y1)
    if x0.is_cpu:
        return matmul_rows.lines_product(x1, y1, lines, matmul_rows.lines_product(x0, y0, lines))
    if x0.is_meta:
        return shapes.ring_matmul_lines_pair(x0, y0, x1, y1, lines)
    matmul_rows.check_inside("ring_matmul_lines", lines, len(y0))
    lines = lines.to(x0.device)
    made: Tensor = _gpu(
        "matmul", "lines_product", x1, y1, lines, _gpu("matmul", "lines_product", x0, y0, lines), writes=1
    )
    return made


def ring_conv2d(x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Tensor:
    """torch's conv2d of x [B, C, H, W] and w [O, C / groups, kh, kw] modulo the ring size; CPU: one thread.

    Raises DomainError for sizes that do not fit each other.
    """
    if x.is_cpu:
        return conv.product(x, w, stride, padding, dilation, groups)
    if x.is_meta:
        return shapes.ring_conv2d(x, w, stride, padding, dilation, groups)
    made: Tensor = _gpu("conv", "product", x, w, stride, padding, dilation, groups)
    return made


def ring_conv2d_pair(
    x0: Tensor, w0: Tensor, x1: Tensor, w1: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Tensor:  # fmt: skip
    """x0 * w0 + x1 * w1, both of one shape, as in `ring_conv2d`."""
    shapes.check_pair(x0, w0, x1, w1)
    how = (stride, padding, dilation, groups)
    if x0.is_cpu:
        return conv.product(x1, w1, *how, conv.product(x0, w0, *how))
    if x0.is_meta:
        return shapes.ring_conv2d_pair(x0, w0, x1, w1, *how)
    made: Tensor = _gpu("conv", "product", x1, w1, *how, _gpu("conv", "product", x0, w0, *how), writes=1)
    return made


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of table [R, W] at public numbers index [n], on the table's device. Raises DomainError outside 0 .. R-1."""
    out = shapes.gather_rows(table, index)
    if out.is_meta or not out.numel():
        return out
    if int(index.min()) < 0 or int(index.max()) >= table.shape[0]:
        raise DomainError(f"gather_rows: a number lies outside 0 .. {table.shape[0] - 1}")
    if table.is_cpu:
        return table.index_select(0, index.cpu())
    _gpu("gather", "gather_rows", table.contiguous(), index.to(table.device), out, writes=1)
    return out


def transpose_bits(x: Tensor, rows: int) -> Tensor:
    """Elements [n] to bit rows [rows, ceil(n/64)], least significant bit first."""
    out = shapes.transpose_bits(x, rows)
    if out.is_meta or not out.numel():
        return out
    x = x.contiguous().view(-1)
    if x.is_cpu:
        at, made = addresses(x, out)
        parallel_for(
            out.shape[1], 64 * _TRANSPOSE_S, WORDS, cpu_bits.transpose_words, at, x.numel(), _ZERO[x.dtype], made, rows
        )  # fmt: skip
    else:
        _gpu("bits", "transpose_bits", x, rows, out, writes=1)
    return out


def block_monomials(s: Tensor, low: int, blocks: Array, out: Tensor) -> None:
    """All monomials of the bits of each block of s [rows, W], xored into out [monomials, W]. Helper side.

    blocks: sizes of consecutive blocks of rows from `low` on, 1 to 3 each; a block of n bits has 2^n - 1 monomials.
    """
    if s.is_cpu:
        bits, made = addresses(s, out)
        parallel_for(
            s.shape[1], out.shape[0] * _ROW_S, WORDS, cpu_bits.block_monomials, bits, s.shape[0], low, blocks, made,
            out.shape[0], s.shape[1]
        )  # fmt: skip
    elif not s.is_meta:
        _gpu("bits", "block_monomials", s, low, blocks, out, writes=1)


def block_carries(m: Tensor, low: int, blocks: Array, mono: Tensor, first: bool, out: Tensor) -> None:
    """Shares of (generate, propagate) of each block from public bits m and shared monomials, xored into out.

    m [rows, W], mono as `block_monomials` makes it, out [2 blocks - 1, W]: all generates, then the propagates of all
    blocks but the first. first: whether this evaluator adds the terms without monomials.
    """
    if m.is_cpu:
        bits, shares, made = addresses(m, mono, out)
        parallel_for(
            m.shape[1], mono.shape[0] * _ROW_S, WORDS, cpu_bits.block_carries, bits, m.shape[0], low, blocks, shares,
            mono.shape[0], first, made, m.shape[1]
        )  # fmt: skip
    elif not m.is_meta:
        _gpu("bits", "block_carries", m, low, blocks, mono, first, out, writes=1)


def join_products(lam: Tensor, groups: Array, count: int, out: Tensor) -> None:
    """Products of masks that a level of joins needs, xored into out [products, W]. Helper side.

    lam [2 count - 1, W]: masks of the generates and propagates of `count` blocks. groups: how many join, 2 or 3 each.
    """
    if lam.is_cpu:
        masks, made = addresses(lam, out)
        parallel_for(
            lam.shape[1], out.shape[0] * _ROW_S, WORDS, cpu_bits.join_products, masks, groups, count, made,
            out.shape[0], lam.shape[1]
        )  # fmt: skip
    elif not lam.is_meta:
        _gpu("bits", "join_products", lam, groups, count, out, writes=1)


def join_carries(
    b: Tensor, lam: Tensor, prod: Tensor, groups: Array, count: int, first: bool, out: Tensor
) -> None:  # fmt: skip
    """Shares of the joined (generate, propagate) from masked rows, mask shares and product shares, xored into out.

    b, lam [2 count - 1, W], prod as `join_products` makes it, out [2 groups - 1, W].
    """
    if b.is_cpu:
        opened, masks, shares, made = addresses(b, lam, prod, out)
        parallel_for(
            b.shape[1], (prod.shape[0] + 2 * b.shape[0]) * _ROW_S, WORDS, cpu_bits.join_carries, opened, masks, shares,
            prod.shape[0], groups, count, first, made, b.shape[1]
        )  # fmt: skip
    elif not b.is_meta:
        _gpu("bits", "join_carries", b, lam, prod, groups, count, first, out, writes=1)


def inject_products(bits: Tensor, lam: Tensor, weighted: Array, out: Tensor) -> None:
    """Helper side of bit injection: out = (rows s_k, then s_k lam where weighted) - out.

    bits [rows, W] of n elements, lam [n] (not read if nothing is weighted), out [rows + weighted, n].
    """
    if out.is_meta or not out.numel():
        return
    if bits.is_cpu:
        rows, masks, made = addresses(bits, lam, out)
        parallel_for(
            bits.shape[1], 64 * out.shape[0] * _INJECT_S, WORDS, cpu_bits.inject_products, rows, bits.shape[0], masks,
            weighted.view(np.uint8), made, *out.shape, _ZERO[out.dtype]
        )  # fmt: skip
    else:
        _gpu("bits", "inject_products", bits, lam, weighted, out, writes=1)


def inject_terms(
    bits: Tensor, m: Tensor, mine: Tensor, shares: Tensor, weighted: Array, w: Tensor, c: Tensor, first: bool,
    out: Tensor,
) -> None:  # fmt: skip
    """Evaluator side of bit injection: this party's share of sum_k b_k (w_k x + c_k), added to out [n].

    bits [rows, W], m and mine [n], shares [rows + weighted, n], w and c [rows, 1 or n]. Sizes are not looked at.
    """
    if out.is_meta or not out.numel():
        return
    if bits.is_cpu:
        rows, known, masks, helped, factors, addends, made = addresses(bits, m, mine, shares, w, c, out)
        parallel_for(
            bits.shape[1], 64 * shares.shape[0] * _INJECT_S, WORDS, cpu_bits.inject_terms, rows, bits.shape[0], known,
            masks, helped, shares.shape[0], weighted.view(np.uint8), factors, w.shape[1], addends, c.shape[1], first,
            made, out.numel(), _ZERO[out.dtype]
        )  # fmt: skip
    else:
        _gpu("bits", "inject_terms", bits, m, mine, shares, weighted, w, c, first, out, writes=1)


def pack_fields(values: Tensor, f: int) -> Tensor:
    """The lowest 1 <= f <= 63 bits of int64 elements [n] as packed fields: [packed_words(n, f)] of 64 bits.

    Raises DomainError for another f or type.
    """
    words = shapes.pack_fields(values, f)
    if values.is_cpu:
        operands, made, count = addresses(values), addresses(words), values.numel()
        parallel_for(count, _FIELD_S, BLOCK, cpu_trunc.packed, *operands, f, count, _ZERO[torch.int64], *made)
    elif not values.is_meta:
        _gpu("trunc", "pack_fields", values, f, words, writes=1)
    return words


def unpack_fields(words: Tensor, count: int, f: int) -> Tensor:
    """The inverse of `pack_fields`: elements [count] from 0 to 2^f - 1, int64. Raises DomainError for other sizes."""
    values = shapes.unpack_fields(words, count, f)
    if words.is_cpu:
        operands, made = addresses(words), addresses(values)
        parallel_for(count, _FIELD_S, BLOCK, cpu_trunc.unpacked, *operands, f, count, _ZERO[torch.int64], *made)
    elif not words.is_meta:
        _gpu("trunc", "unpack_fields", words, count, f, values, writes=1)
    return values


def trunc_helper(
    error: Tensor, g1: Tensor, g2: Tensor, z1: Tensor, rho1: Tensor, zeta1: Tensor, zeta2: Tensor, f: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Party 0's step of the truncation: (a1, a2, z2, rho2).

    Elements [n] are divided by 2^f, 1 <= f <= bits - 3; rho and zeta are fields of 1 <= width <= f bits, packed into
    `packed_words(n, width)` words: results are right in their lowest bits - f + width bits. Nobody looks at sizes, f
    and width here.
    """
    made = shapes.trunc_helper(error, g1, g2, z1, rho1, zeta1, zeta2, f, width)
    if z1.is_cpu:
        operands, count = addresses(error, g1, g2, z1, rho1, zeta1, zeta2), z1.numel()
        parallel_for(
            count, 4 * _FIELD_S, BLOCK, cpu_trunc.helper, *operands, f, width, count, _ZERO[z1.dtype], *addresses(*made)
        )  # fmt: skip
    elif not z1.is_meta:
        _gpu("trunc", "trunc_helper", error, g1, g2, z1, rho1, zeta1, zeta2, f, width, *made, writes=4)
    return made


def trunc_open(
    mine: Tensor, theirs: Tensor, rho: Tensor, zeta: Tensor, f: int, width: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Evaluator's first step: (w [n], packed fields to exchange); operands as in `trunc_helper`."""
    made = w, packed = shapes.trunc_open(mine, theirs, rho, zeta, f, width)
    if w.is_cpu:
        (*operands, opened, fields), count = addresses(mine, theirs, rho, zeta, w, packed), w.numel()
        parallel_for(
            count, 3 * _FIELD_S, BLOCK, cpu_trunc.opened, *operands, f, width, count, _ZERO[w.dtype], opened, fields
        )
    elif not w.is_meta:
        _gpu("trunc", "trunc_open", mine, theirs, rho, zeta, f, width, *made, writes=2)
    return made


def trunc_close(
    w: Tensor, mine: Tensor, theirs: Tensor, z: Tensor, zeta: Tensor, f: int, width: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Evaluator's last step: (value plus the other's mask, own mask), [n] each; operands as in `trunc_helper`."""
    made = half, own = shapes.trunc_close(w, mine, theirs, z, zeta, f, width)
    if w.is_cpu:
        (*operands, value, mask), count = addresses(w, mine, theirs, z, zeta, half, own), w.numel()
        parallel_for(
            count, 3 * _FIELD_S, BLOCK, cpu_trunc.closed, *operands, f, width, count, _ZERO[w.dtype], value, mask
        )
    elif not w.is_meta:
        _gpu("trunc", "trunc_close", w, mine, theirs, z, zeta, f, width, *made, writes=2)
    return made


def chacha20(key: Tensor, counter: Tensor, offset: int, out: Tensor) -> None:
    """Overwrite out with the ChaCha20 key stream from block counter + offset on, all on one device.

    key [8] int32; counter [1] int64, which a GPU reads when it computes; out [words] int32, whole blocks of 16 words.
    A block has a number of 64 bits: the lower half is the counter of RFC 8439, the upper half its first word of nonce;
    the others are 0. The caller never uses a (key, number) twice. Raises DomainError for other shapes.
    """
    shapes.chacha20(key, counter, offset, out)
    if out.is_meta or not out.numel():
        return
    if key.is_cpu:
        cpu_prg.chacha20(key.numpy(), int(counter) + offset, out.numpy())
    else:
        _gpu("prg", "chacha20", key, counter, offset, out, writes=1)
