"""Every local kernel under one name: cpu tensors get the Numba kernel, cuda tensors Triton, meta tensors shapes.

All tensors are signed torch integers; the kernels see them as unsigned. Rows and packed fields are int64 words.
Kernels have the names of their operations. What each computes is said once, in plain torch, in
`tests/kernels/reference.py`. All raise UnsupportedOp for operands on another device, or on a GPU without Triton, and
DomainError for those that are not contiguous where the CPU's kernels take addresses (kernels/address.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels import conv, matmul, shapes
from private_llm.kernels.address import ZERO, Array
from private_llm.kernels.bits import cpu as cpu_bits
from private_llm.kernels.devices import triton_module
from private_llm.kernels.fields import STEPS
from private_llm.kernels.fields import cpu as cpu_trunc
from private_llm.kernels.matmul import checked
from private_llm.kernels.matmul import narrow as cpu_narrow
from private_llm.kernels.parallel import addresses, parallel_for
from private_llm.kernels.seeded_tensor import KeyStream, dense
from private_llm.kernels.shapes import Pair
from private_llm.kernels.trace_hook import this_thread

_TRANSPOSE_S, _ROW_S, _INJECT_S = 2e-9, 1e-9, 1e-9
"""About what one thread takes: to transpose an element, for a word of a comparison's row, an element of an injection's.
"""
_NARROW_S, _DIGIT_S, _HIDE_S, _OPEN_S = 1e-10, 2e-9, 1e-8, 8e-9
"""About what one thread takes for a multiply-add with a 16-bit weight, and for an element: to take it apart for that,
to mask it, to put it together and check it.
"""
WORDS = 8  # threads take multiples of so many words of bits: whole lines of the cache


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
        return getattr(triton_module(f"{family}.triton"), name)(*given)


def _words(
    kernel: Callable[..., None], seconds: float, operands: tuple[Tensor, ...], plan: tuple[Any, ...],
    sizes: tuple[Any, ...],
) -> None:  # fmt: skip
    """Change the last operand on its device, by a kernel of rows of words, each of which takes one thread so long.

    Kernels of CPUs take the plan after the operands, and sizes, the last of which is the number of words.
    """
    if operands[0].is_cpu:
        parallel_for(sizes[-1], seconds, WORDS, kernel, *addresses(*operands), *plan, *sizes)
    elif not operands[0].is_meta:
        _gpu("bits", kernel.__name__, *operands[:-1], *plan, operands[-1], writes=1)


def packed_words(count: int, f: int) -> int:
    """64-bit words that hold `count` fields of f bits."""
    return (count * f + 63) // 64


def field_step(
    name: str, operands: tuple[Tensor, ...], numbers: tuple[int, ...], width: int, made: tuple[Tensor, ...] = (),
    count: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What a step of `kernels.fields` makes of [count] ring elements, and words of fields; or write to `made`."""
    step, like = STEPS[name], operands[0]
    if count is None:
        count = like.numel()
    if not made:
        room = like.new_zeros if like.is_cuda else like.new_empty  # ors bits in
        for each in step.writes:
            packed = each in step.packed
            made += (room(packed_words(count, width), dtype=torch.int64) if packed else like.new_empty(count),)
    if like.is_cpu:
        given = (*addresses(*operands, *made), *numbers, width, count, ZERO[like.dtype])
        parallel_for(count, step.seconds, cpu_trunc.BLOCK, cpu_trunc.KERNELS[name], *given)
    elif not like.is_meta:
        _gpu("fields", name, *operands, *numbers, width, *made, writes=len(made))
    return made


def ring_matmul(x: Tensor, y: Tensor) -> Tensor:
    """torch.matmul modulo the ring size, one CPU thread. Raises DomainError unless both are int64 or int32 and fit."""
    if x.is_cpu:
        return matmul.product(x, y)
    if x.is_meta:
        return shapes.ring_matmul(x, y)
    made: Tensor = _gpu("matmul", "product", x, y)
    return made


def narrow_matmul(x: Tensor, weight: Tensor, rows: int) -> Tensor:
    """x weight^T modulo 2^40, packed, uint8 [5 M N]; x int64 [M, K], or packed; weight int16 [N, K], which is public.

    For an int8 weight all is modulo 2^32, and packed 4 bytes an element. rows: M. A weight with more columns, a
    multiple of 32 of them, is read where it lies: those beyond K meet zeros. On a GPU elements of an int16 weight stay
    below 32640. Raises DomainError for other shapes and types.
    """
    is_packed, columns = x.dtype is torch.uint8, len(weight)
    size = cpu_narrow.BYTES.get(8 * weight.element_size(), 0)
    inner = x.numel() // max(rows * (size if is_packed else 1), 1)
    if (
        rows < 0 or weight.dtype not in (torch.int16, torch.int8) or not (is_packed or x.dtype is torch.int64)
        or weight.dim() != 2 or x.numel() != rows * inner * (size if is_packed else 1) or inner > weight.shape[1]
    ):  # fmt: skip
        raise DomainError(
            f"narrow_matmul: got {x.dtype} {tuple(x.shape)} for {rows} rows and {weight.dtype} {tuple(weight.shape)}; "
            "want int64 [M, K], or its bytes uint8 [5 M K] or [4 M K], and int16 or int8 [N, K]"
        )
    if not x.is_cpu:
        x = unpacked(x, (rows, inner), size) if is_packed else x
        return packed(_gpu("matmul", "narrow", x, weight[:, :inner]), size)
    made = torch.empty(size * rows * columns, dtype=torch.uint8)
    if not inner:
        return made.zero_()
    weight = narrow_lines(weight)
    length = weight.shape[1]
    digits = torch.empty(rows * cpu_narrow.DIGITS[size] * length, dtype=torch.int16)
    wide = torch.empty(rows * columns if size == 5 else 0, dtype=torch.int64)
    of, to, *at = addresses(x, digits, weight, wide, made)
    parallel_for(rows, inner * _DIGIT_S, 1, cpu_narrow.narrow_digits, of, to, size, int(is_packed), inner, length)
    kernel, each = cpu_narrow.narrow_product, _NARROW_S * rows * inner
    parallel_for(columns, each, cpu_narrow.LINES, kernel, to, *at, size, rows, length, columns)
    return made


def packed(x: Tensor, size: int) -> Tensor:
    """Elements modulo 2^(8 size) as bytes, uint8 [size n]."""
    return x.contiguous().view(torch.uint8).view(-1, 8)[:, :size].contiguous().view(-1)


def unpacked(raw: Tensor, shape: tuple[int, ...], size: int) -> Tensor:
    """The inverse of `packed`: int64 of this shape, from 0 to 2^(8 size) - 1."""
    wide = raw.new_zeros(raw.numel() // size, 8)
    wide[:, :size] = raw.view(-1, size)
    return wide.view(torch.int64).view(shape)


def narrow_length(inputs: int) -> int:
    """Elements of a line as `narrow_lines` makes it."""
    return inputs + -inputs % cpu_narrow.STEP


def narrow_lines(weight: Tensor) -> Tensor:
    """A weight as `narrow_matmul` reads it without a copy: its lines end with zeros, at a multiple of 32."""
    missing = narrow_length(weight.shape[1]) - weight.shape[1]
    return (torch.nn.functional.pad(weight, (0, missing)) if missing else weight).contiguous()


def hide_rows(
    x: Tensor, column_scales: Tensor, columns: Tensor, norm: float, mask: Tensor, out: Tensor, size: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Real rows [M, K] as whole numbers int64 and their scales float64 [M]; out: these minus a mask, packed.

    All as in `kernels.matmul.checked`; a row that is not finite has scale 0. Raises DomainError for other sizes.
    """
    whole, (rows, inputs) = torch.empty_like(mask), mask.shape
    at = _operands(
        "hide_rows", (x, rows * inputs, torch.float32), (column_scales, inputs, torch.float64),
        (columns, inputs, torch.float64), (mask, rows * inputs, torch.int64), (whole, rows * inputs, torch.int64),
        (out, size * rows * inputs, torch.uint8),
    )  # fmt: skip
    scales = torch.empty(rows, dtype=torch.float64)
    parallel_for(rows, inputs * _HIDE_S, 1, checked.hide_rows, *at, scales.data_ptr(), norm, size, inputs)
    return whole, scales


def _operands(name: str, *wanted: tuple[Tensor, int, torch.dtype]) -> list[int]:
    """Like `addresses`, of so many elements: what lies beyond a smaller operand would leave, or be overwritten."""
    for x, count, dtype in wanted:
        if x.numel() != count or x.dtype is not dtype:
            found = ", ".join(f"{x.numel()} x {x.dtype}" for x, _, _ in wanted)
            raise DomainError(f"{name}: got operands of {found}; want {', '.join(f'{n} x {d}' for _, n, d in wanted)}")
    return addresses(*[x for x, _, _ in wanted])


def open_rows(
    parts: Sequence[Tensor], whole: Tensor, sums: Tensor, folded: Tensor, scales: Tensor, factors: Tensor,
    size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The product of rows from both parts, packed, float32 [M, N], and uint8 [M]: whether its secret sums are right.

    All as in `kernels.matmul.checked`. Raises DomainError for other sizes.
    """
    (lines, outputs), (rows, inputs) = sums.shape, whole.shape
    packed = size * rows * outputs
    at = _operands(
        "open_rows", (parts[0], packed, torch.uint8), (parts[1], packed, torch.uint8),
        (whole, rows * inputs, torch.int64), (sums, lines * outputs, torch.int64),
        (folded, lines * inputs, torch.int64), (scales, rows, torch.float64), (factors, outputs, torch.float64),
    )  # fmt: skip
    # other threads may change torch's default dtype, as transformers does while it loads a checkpoint
    out, right = torch.empty(rows, outputs, dtype=torch.float32), torch.empty(rows, dtype=torch.uint8)
    at += out.data_ptr(), right.data_ptr()
    parallel_for(rows, outputs * _OPEN_S, 1, checked.open_rows, *at, size, lines, inputs, outputs)
    return out, right


def ring_matmul_pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
    """x0 y0 + x1 y1, both of one shape, as in `ring_matmul`, without a temporary of y's size."""
    if x0.shape != x1.shape or y0.shape != y1.shape:
        raise shapes.unlike_pair(x0, y0, x1, y1)
    if x0.is_cpu:
        return matmul.product(x1, y1, matmul.product(x0, y0))
    if x0.is_meta:
        return shapes.ring_matmul(x0, y0)
    made: Tensor = _gpu("matmul", "pair", x0, y0, x1, y1)
    return made


def pair_of(product: Callable[..., Tensor], x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor, *how: Any) -> Tensor:  # noqa: ANN401
    """product(x0, y0, *how) + product(x1, y1, *how), both of one shape, of one of the three products below."""
    if x0.shape != x1.shape or y0.shape != y1.shape:
        raise shapes.unlike_pair(x0, y0, x1, y1)
    return product(x1, y1, *how, onto=product(x0, y0, *how))


def ring_matmul_rows(x: Tensor, y: Tensor, rows: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y[rows]^T modulo the ring size: [M, R] of x [M, K], y [N, K] and public row numbers [R], in any order.

    Of a y whose rows are contiguous, only these are read. Added onto `onto` (contiguous, changed in place) if given.
    Raises DomainError for a number outside 0 .. N-1.
    """
    return _listed("ring_matmul_rows", x, y, rows, onto)


def ring_matmul_lines(x: Tensor, y: Tensor, lines: Tensor, onto: Tensor | None = None) -> Tensor:
    """x y[lines]: [M, N] of x [M, R], y [K, N], public numbers [R] below K, else DomainError. As `ring_matmul_rows`."""
    return _listed("ring_matmul_lines", x, y, lines, onto)


def _listed(name: str, x: Tensor, y: Tensor, listed: Tensor, onto: Tensor | None) -> Tensor:
    if x.is_cpu:
        return matmul.listed_product(name, x, y, listed, onto)
    if x.is_meta:
        return x.new_empty(shapes.listed_size(name, x, y, listed))
    matmul.check_inside(name, listed, len(y))
    return _onto("matmul", "listed_product", onto, x, y, listed.to(x.device), name == "ring_matmul_rows")


def _onto(family: str, name: str, onto: Tensor | None, *arguments: Any) -> Tensor:  # noqa: ANN401
    """A product of GPUs, added onto `onto` if given."""
    made: Tensor = _gpu(family, name, *arguments) if onto is None else _gpu(family, name, *arguments, onto, writes=1)
    return made


def ring_conv2d(
    x: Tensor, w: Tensor, stride: Pair, padding: Pair, dilation: Pair, groups: int, onto: Tensor | None = None
) -> Tensor:  # fmt: skip
    """torch's conv2d of x [B, C, H, W] and w [O, C / groups, kh, kw] modulo the ring size; CPU: one thread.

    Added onto `onto` (contiguous, changed in place) if given. Raises DomainError for sizes that do not fit each other.
    """
    if x.is_cpu:
        return conv.product(x, w, stride, padding, dilation, groups, onto)
    if x.is_meta:
        return shapes.ring_conv2d(x, w, stride, padding, dilation, groups)
    return _onto("conv", "product", onto, x, w, stride, padding, dilation, groups)


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of table [R, W] at public numbers index [n], int64, on the table's device: [n, W].

    Raises DomainError for other shapes, and for a number outside 0 .. R-1.
    """
    if table.dim() != 2 or index.dim() != 1 or index.dtype != torch.int64:
        raise DomainError(
            f"gather_rows: got a table {tuple(table.shape)} and {index.dtype} numbers {tuple(index.shape)}; want "
            "[rows, width] and int64 [n]"
        )
    if table.is_meta or not len(index):
        return table.new_empty((len(index), table.shape[1]))
    if int(index.min()) < 0 or int(index.max()) >= table.shape[0]:
        raise DomainError(f"gather_rows: a number lies outside 0 .. {table.shape[0] - 1}")
    return table.index_select(0, index.to(table.device))


def transpose_bits(x: Tensor, rows: int) -> Tensor:
    """Elements [n] to bit rows [rows, ceil(n/64)], least significant bit first."""
    words = (x.numel() + 63) // 64
    out = torch.empty((rows, words), dtype=torch.int64, device=x.device)
    if not out.is_meta and out.numel():
        x = x.contiguous().view(-1)
        _words(cpu_bits.transpose_bits, 64 * _TRANSPOSE_S, (x, out), (rows,), (x.numel(), ZERO[x.dtype], words))
    return out


def block_monomials(s: Tensor, low: int, blocks: Array, out: Tensor) -> None:
    """All 2^n - 1 monomials of each block of n (1 to 3) rows of s [rows, W], from `low` on, xored into out. Helper."""
    rows = out.shape[0]
    _words(cpu_bits.block_monomials, rows * _ROW_S, (s, out), (low, blocks), (s.shape[0], rows, s.shape[1]))


def block_carries(m: Tensor, low: int, blocks: Array, mono: Tensor, first: bool, out: Tensor) -> None:
    """Shares of (generate, propagate) of each block from public bits m and shared monomials, xored into out.

    m [rows, W], mono as `block_monomials` makes it, out [2 blocks - 1, W]: all generates, then the propagates of all
    blocks but the first. first: whether this evaluator adds the terms without monomials.
    """
    rows = mono.shape[0]
    sizes = (m.shape[0], rows, m.shape[1])
    _words(cpu_bits.block_carries, rows * _ROW_S, (m, mono, out), (low, blocks, first), sizes)


def join_products(lam: Tensor, groups: Array, count: int, out: Tensor) -> None:
    """Products of masks that a level of joins needs, xored into out [products, W]. Helper side.

    lam [2 count - 1, W]: masks of the generates and propagates of `count` blocks. groups: how many join, 2 or 3 each.
    """
    rows = out.shape[0]
    _words(cpu_bits.join_products, rows * _ROW_S, (lam, out), (groups, count), (rows, lam.shape[1]))


def join_carries(
    b: Tensor, lam: Tensor, prod: Tensor, groups: Array, count: int, first: bool, out: Tensor
) -> None:  # fmt: skip
    """Shares of the joined (generate, propagate) from masked rows, mask shares and product shares, xored into out.

    b, lam [2 count - 1, W], prod as `join_products` makes it, out [2 groups - 1, W].
    """
    rows = prod.shape[0]
    seconds = (rows + 2 * b.shape[0]) * _ROW_S
    _words(cpu_bits.join_carries, seconds, (b, lam, prod, out), (groups, count, first), (rows, b.shape[1]))


def inject_products(bits: Tensor, lam: Tensor, weighted: Array, out: Tensor) -> None:
    """The helper's side of bits [rows, W]: out = (rows s_k, then s_k lam where weighted) - out; lam [n] if weighted."""
    if not out.is_meta and out.numel():
        sizes = (bits.shape[0], *out.shape, ZERO[out.dtype], bits.shape[1])
        plan = (weighted.view(np.uint8),)
        _words(cpu_bits.inject_products, 64 * out.shape[0] * _INJECT_S, (bits, lam, out), plan, sizes)


def inject_terms(
    bits: Tensor, m: Tensor, mine: Tensor, shares: Tensor, weighted: Array, w: Tensor, c: Tensor, first: bool,
    out: Tensor,
) -> None:  # fmt: skip
    """Evaluator side of bit injection: this party's share of sum_k b_k (w_k x + c_k), added to out [n].

    bits [rows, W], m and mine [n], shares [rows + weighted, n], w and c [rows, 1 or n]. Sizes are not looked at.
    """
    if not out.is_meta and out.numel():
        rows = shares.shape[0]
        sizes = (bits.shape[0], rows, w.shape[1], c.shape[1], out.numel(), ZERO[out.dtype], bits.shape[1])
        operands, plan = (bits, m, mine, shares, w, c, out), (weighted.view(np.uint8), first)
        _words(cpu_bits.inject_terms, 64 * rows * _INJECT_S, operands, plan, sizes)


def pack_fields(values: Tensor, f: int) -> Tensor:
    """Lowest 1 <= f <= 63 bits of int64 [n] as fields: [packed_words(n, f)]. Raises DomainError for other f or type."""
    if not 1 <= f <= 63:
        raise DomainError(f"fields: got {f} bits; want 1 to 63")
    if values.dtype != torch.int64:
        raise DomainError(f"fields: got {values.dtype}; want int64")
    return field_step("pack_fields", (values,), (), f)[0]


def unpack_fields(words: Tensor, count: int, f: int) -> Tensor:
    """The inverse of `pack_fields`: elements [count] from 0 to 2^f - 1, int64. Raises DomainError for other sizes."""
    if not 1 <= f <= 63:
        raise DomainError(f"fields: got {f} bits; want 1 to 63")
    if words.dtype != torch.int64 or words.numel() != packed_words(count, f):
        raise DomainError(
            f"fields: got {words.numel()} {words.dtype}; want {packed_words(count, f)} int64 for {count} of {f} bits"
        )
    return field_step("unpack_fields", (words,), (), f, count=count)[0]


def trunc_helper(
    error: Tensor, g1: Tensor, g2: Tensor, z1: Tensor, rho1: Tensor, zeta1: Tensor, zeta2: Tensor, f: int, width: int
) -> tuple[Tensor, ...]:
    """Party 0's step of the truncation: (a1, a2, z2, rho2).

    Elements [n] are divided by 2^f, 1 <= f <= bits - 3; rho and zeta are fields of 1 <= width <= f bits, packed into
    `packed_words(n, width)` words: results are right in their lowest bits - f + width bits. Nothing is checked.
    """
    return field_step("trunc_helper", (error, g1, g2, z1, rho1, zeta1, zeta2), (f,), width)


def trunc_open(mine: Tensor, theirs: Tensor, rho: Tensor, zeta: Tensor, f: int, width: int) -> tuple[Tensor, ...]:
    """Evaluator's first step: (w [n], packed fields to exchange); operands as in `trunc_helper`."""
    return field_step("trunc_open", (mine, theirs, rho, zeta), (f,), width)


def trunc_close(
    w: Tensor, mine: Tensor, theirs: Tensor, z: Tensor, zeta: Tensor, f: int, width: int
) -> tuple[Tensor, ...]:
    """Evaluator's last step: (value plus the other's mask, own mask), [n] each; operands as in `trunc_helper`."""
    return field_step("trunc_close", (w, mine, theirs, z, zeta), (f,), width)


def chacha20(key: Tensor, counter: Tensor, offset: int, out: Tensor) -> None:
    """Overwrite out with the ChaCha20 key stream from block counter + offset on, all on one device.

    key [8] int32; counter [1] int64, which a GPU reads when it computes; out [words] int32, whole blocks of 16 words.
    A block has a number of 64 bits: the lower half is the counter of RFC 8439, the upper half its first word of nonce;
    the others are 0. The caller never uses a (key, number) twice. Raises DomainError for other shapes.
    """
    for name, x, count, dtype in (("key", key, 8, torch.int32), ("counter", counter, 1, torch.int64)):
        if x.numel() != count or x.dtype != dtype:
            raise DomainError(f"chacha20: got a {name} of {x.numel()} {x.dtype}; want {count} {dtype}")
    if out.dtype != torch.int32 or out.numel() % 16 or not out.is_contiguous():
        raise DomainError(
            f"chacha20: got room for {out.numel()} {out.dtype}, strides {out.stride()}; want contiguous int32 words in "
            "whole blocks of 16"
        )
    if out.is_meta or not out.numel():
        return
    if key.is_cpu:
        stream = KeyStream(key.numpy().astype("<i4").tobytes())
        stream.write(int(counter) + offset, out.numpy().view(np.uint8))
    else:
        _gpu("prg", "chacha20", key, counter, offset, out, writes=1)
