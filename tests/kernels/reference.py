"""The ground truth of every kernel: plain torch, written from the definitions, slow on purpose.

No code is shared with the fast kernels. Boolean polynomials are expanded by machine (Möbius inversion,
products of sums) instead of by hand, and packed fields are moved bit by bit. Signatures are those of
`ops`; plans are any sequences of integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# -- words and bits ------------------------------------------------------------------------------------------


def _bits(words: Tensor) -> Tensor:
    """[..., W] words to [..., 64 W] bits (0 or 1, int64), least significant first."""
    places = torch.arange(64, device=words.device)
    return ((words.unsqueeze(-1) >> places) & 1).flatten(-2)


def _words(bits: Tensor) -> Tensor:
    """[..., n] bits to [..., ceil(n / 64)] words."""
    count = (bits.shape[-1] + 63) // 64
    full = torch.zeros(*bits.shape[:-1], 64 * count, dtype=torch.int64, device=bits.device)
    full[..., : bits.shape[-1]] = bits
    return (full.view(*bits.shape[:-1], count, 64) << torch.arange(64, device=bits.device)).sum(-1)


def _shift_right(x: Tensor, places: int) -> Tensor:
    """Logical shift of ring elements by 1 <= places."""
    width = x.element_size() * 8
    return (x >> places) & ((1 << (width - places)) - 1)


def _top(x: Tensor) -> Tensor:
    """The most significant bit, 0 or 1."""
    return (x < 0).to(x.dtype)


# -- products -------------------------------------------------------------------------------------------------


def ring_matmul(x: Tensor, y: Tensor) -> Tensor:
    """sum_k x[..., m, k] y[..., k, n] modulo the ring size."""
    return (x.unsqueeze(-1) * y.unsqueeze(-3)).sum(-2, dtype=x.dtype)


def ring_matmul_pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
    """x0 y0 + x1 y1."""
    return ring_matmul(x0, y0) + ring_matmul(x1, y1)


def ring_matmul_rows(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Output [m, i] is the sum over k of x[m, k] y[rows[i], k]."""
    out = x.new_zeros(len(x), len(rows))
    for i, row in enumerate(rows.tolist()):
        out[:, i] = (x * y[row]).sum(-1, dtype=x.dtype)
    return out


def ring_matmul_rows_pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor, rows: Tensor) -> Tensor:
    """x0 y0[rows]^T + x1 y1[rows]^T."""
    return ring_matmul_rows(x0, y0, rows) + ring_matmul_rows(x1, y1, rows)


def ring_matmul_lines(x: Tensor, y: Tensor, lines: Tensor) -> Tensor:
    """The sum over i of column i of x times row lines[i] of y."""
    out = x.new_zeros(len(x), y.shape[1])
    for i, line in enumerate(lines.tolist()):
        out += x[:, i : i + 1] * y[line]
    return out


def ring_matmul_lines_pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor, lines: Tensor) -> Tensor:
    """x0 y0[lines] + x1 y1[lines]."""
    return ring_matmul_lines(x0, y0, lines) + ring_matmul_lines(x1, y1, lines)


def ring_conv2d(
    x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:  # fmt: skip
    """Each output is the sum over one window, entry times weight."""
    (down, right), (top, left), (gap_h, gap_w) = stride, padding, dilation
    depth, reach_h, reach_w = w.shape[1], gap_h * (w.shape[2] - 1) + 1, gap_w * (w.shape[3] - 1) + 1
    wide = torch.nn.functional.pad(x, (left, left, top, top))
    lines = []
    for r in range(0, wide.shape[2] - reach_h + 1, down):
        line = []
        for c in range(0, wide.shape[3] - reach_w + 1, right):
            window = wide[:, :, r : r + reach_h : gap_h, c : c + reach_w : gap_w]
            blocks = zip(window.split(depth, 1), w.chunk(groups), strict=True)
            line.append(torch.cat([(b.unsqueeze(1) * k).sum((2, 3, 4), dtype=x.dtype) for b, k in blocks], 1))
        lines.append(torch.stack(line, -1))
    return torch.stack(lines, -2)


def ring_conv2d_pair(
    x0: Tensor, w0: Tensor, x1: Tensor, w1: Tensor, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """x0 * w0 + x1 * w1."""
    return ring_conv2d(x0, w0, stride, padding, dilation, groups) + ring_conv2d(
        x1, w1, stride, padding, dilation, groups
    )


# -- rows of bits ---------------------------------------------------------------------------------------------


def transpose_bits(x: Tensor, rows: int) -> Tensor:
    """Bit r of element 64 w + l becomes bit l of word [r, w]."""
    places = torch.arange(rows, device=x.device).unsqueeze(-1)
    return _words((x.reshape(1, -1).to(torch.int64) >> places) & 1)


def _and_all(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """Bitwise product; of nothing: ones."""
    product = torch.full_like(like, -1)
    for row in rows:
        product = product & row
    return product


def block_monomials(s: Tensor, low: int, blocks: Sequence[int], out: Tensor) -> None:
    """out ^= for each block of bits, the products of its non-empty subsets, subsets in binary order."""
    row, bit = 0, low
    for size in blocks:
        for subset in range(1, 1 << size):
            chosen = [s[bit + i] for i in range(size) if subset >> i & 1]
            out[row] ^= _and_all(chosen, s[0])
            row += 1
        bit += size


def _generate_propagate(m: Sequence[Tensor], s: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Carry out of m + s for carry in 0, and whether a carry in would pass through."""
    generate, propagate = torch.zeros_like(m[0]), torch.full_like(m[0], -1)
    for a, b in zip(m, s, strict=True):
        generate = (a & b) ^ ((a ^ b) & generate)
        propagate = propagate & (a ^ b)
    return generate, propagate


def block_carries(m: Tensor, low: int, blocks: Sequence[int], mono: Tensor, first: bool, out: Tensor) -> None:
    """out ^= this evaluator's share of generate and propagate, as polynomials in the shared monomials of s.

    The coefficient of a monomial T is the sum over subsets U of T of the function at s = U (Möbius inversion).
    """
    count = len(blocks)
    row, bit = 0, low
    for j, size in enumerate(blocks):
        known = [m[bit + i] for i in range(int(size))]
        at = []
        for subset in range(1 << size):
            s = [torch.full_like(m[0], -(subset >> i & 1)) for i in range(int(size))]
            at.append(_generate_propagate(known, s))
        for kind in range(2 if j > 0 else 1):
            target = out[j] if kind == 0 else out[count + j - 1]
            for subset in range(1 << size):
                coefficient = torch.zeros_like(m[0])
                for inner in range(1 << size):
                    if inner & subset == inner:
                        coefficient ^= at[inner][kind]
                if subset:
                    target ^= coefficient & mono[row + subset - 1]
                elif first:
                    target ^= coefficient
        row += (1 << size) - 1
        bit += size


_JOIN_PRODUCTS = {
    3: (["p2 g1 + p2 p1 g0", "p2 p1", "p2 g0", "p1 g0"], ["p2 p0", "p1 p0", "p2 p1 p0"]),
    2: (["p1 g0"], ["p1 p0"]),
}
"""Mask products of a group by its size: those of the generate, then those only the propagate needs. The first is a sum
since neither product enters anything but the generate, and that with coefficient 1."""
_JOIN_SUMS = {3: (["g2", "p2 g1", "p2 p1 g0"], ["p2 p1 p0"]), 2: (["g1", "p1 g0"], ["p1 p0"])}
"""The joined generate (a sum of products) and propagate."""


def _group_rows(table: Tensor, base: int, size: int, count: int) -> dict[str, Tensor]:
    """The rows of a group by name; block 0 has no propagate."""
    rows = {f"g{i}": table[base + i] for i in range(size)}
    rows.update({f"p{i}": table[count + base + i - 1] for i in range(size) if base + i > 0})
    return rows


def _named_products(index: int, size: int) -> list[str]:
    generate, propagate = _JOIN_PRODUCTS[size]
    return generate if index == 0 else [*generate, *propagate]


def join_products(lam: Tensor, groups: Sequence[int], count: int, out: Tensor) -> None:
    """out ^= the products of masks that each group's join needs."""
    row = base = 0
    for j, size in enumerate(groups):
        rows = _group_rows(lam, base, int(size), count)
        for name in _named_products(j, int(size)):
            for product in name.split(" + "):
                out[row] ^= _and_all([rows[factor] for factor in product.split()], lam[0])
            row += 1
        base += int(size)


def join_carries(
    b: Tensor, lam: Tensor, prod: Tensor, groups: Sequence[int], count: int, first: bool, out: Tensor
) -> None:
    """out ^= this evaluator's share of each join: every factor is (masked bit ^ mask), multiplied out."""
    row = base = 0
    for j, size in enumerate(groups):
        masked, masks = (_group_rows(table, base, int(size), count) for table in (b, lam))
        shares = {frozenset([name]): share for name, share in masks.items()}
        for name in _named_products(j, int(size)):
            shares[frozenset(name.split(" + ")[0].split())] = prod[row]  # a sum counts once
            row += 1
        if first:
            shares[frozenset()] = torch.full_like(b[0], -1)
        for kind in range(2 if j > 0 else 1):
            target = out[j] if kind == 0 else out[len(groups) + j - 1]
            for term in _JOIN_SUMS[int(size)][kind]:
                factors = term.split()
                for picks in itertools.product((True, False), repeat=len(factors)):
                    chosen = frozenset(f for f, pick in zip(factors, picks, strict=True) if pick)
                    known = [masked[f] for f, pick in zip(factors, picks, strict=True) if not pick]
                    if chosen in shares:
                        target ^= _and_all([*known, shares[chosen]], b[0])
        base += int(size)


# -- bits to numbers ------------------------------------------------------------------------------------------


def inject_products(bits: Tensor, lam: Tensor, weighted: Sequence[bool], out: Tensor) -> None:
    """out = (rows s_k, then s_k lam of the weighted rows) - out."""
    s = _bits(bits)[:, : out.shape[1]].to(out.dtype)
    rows = [*s, *(s[k] * lam for k in range(len(weighted)) if weighted[k])]
    out.copy_(torch.stack(rows) - out)


def inject_terms(
    bits: Tensor, m: Tensor, mine: Tensor, shares: Tensor, weighted: Sequence[bool], w: Tensor, c: Tensor,
    first: bool, out: Tensor,
) -> None:  # fmt: skip
    """out += share of sum_k b_k (w_k x + c_k), b = B ^ s = B + (1 - 2 B) s, x = m - lam; public parts at `first`."""
    known = _bits(bits)[:, : out.numel()].to(out.dtype)
    public = 1 if first else 0
    extra = bits.shape[0]
    for k in range(bits.shape[0]):
        sign = 1 - 2 * known[k]
        bit = public * known[k] + sign * shares[k]
        out += c[k] * bit
        if weighted[k]:
            bit_times_mask = known[k] * mine + sign * shares[extra]
            bit_times_m = bit * m
            out += w[k] * (bit_times_m - bit_times_mask)
            extra += 1


# -- truncation -----------------------------------------------------------------------------------------------

_BLOCK = 512
_LANES = 8


def _fields(words: Tensor, count: int, f: int) -> Tensor:
    """The f-bit fields of `count` elements: per 512 elements 8 interleaved bit streams, then one for the rest."""
    blocks = count // _BLOCK
    whole = words[: blocks * _LANES * f].reshape(blocks, f, _LANES)
    streams = _bits(whole.transpose(1, 2)).reshape(blocks, _LANES, _BLOCK // _LANES, f)
    rest = count - blocks * _BLOCK
    tail = _bits(words[blocks * _LANES * f :])[: rest * f].reshape(rest, f)
    bits = torch.cat([streams.transpose(1, 2).reshape(-1, f), tail])
    return (bits << torch.arange(f, device=words.device)).sum(-1)


def _packed(fields: Tensor, f: int) -> Tensor:
    """The inverse of `_fields`."""
    bits = (fields.unsqueeze(-1) >> torch.arange(f, device=fields.device)) & 1
    blocks = len(fields) // _BLOCK
    streams = bits[: blocks * _BLOCK].reshape(blocks, _BLOCK // _LANES, _LANES, f).transpose(1, 2)
    whole = _words(streams.reshape(blocks, _LANES, 64 * f)).transpose(1, 2)
    return torch.cat([whole.reshape(-1), _words(bits[blocks * _BLOCK :].reshape(-1))])


def pack_fields(values: Tensor, f: int) -> Tensor:
    """The lowest f bits of each element, packed."""
    return _packed(values & ((1 << f) - 1), f)


def unpack_fields(words: Tensor, count: int, f: int) -> Tensor:
    """The inverse."""
    return _fields(words, count, f)


def trunc_helper(
    error: Tensor, g1: Tensor, g2: Tensor, z1: Tensor, rho1: Tensor, zeta1: Tensor, zeta2: Tensor, f: int, width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """R = error + g1 + g2; (a1, a2, z2, rho2) with z1 + z2 = R >> f and rho1 + rho2 = msb(R) mod 2^width."""
    bits = z1.element_size() * 8
    count = z1.numel()
    r = error + g1 + g2
    z2 = _shift_right(r, f) - z1
    rho2 = (_top(r).to(torch.int64) - _fields(rho1, count, width)) & ((1 << width) - 1)
    a1 = z1 + (_fields(zeta1, count, width) << (bits - f)).to(z1.dtype)
    a2 = z2 + (_fields(zeta2, count, width) << (bits - f)).to(z1.dtype)
    return a1, a2, z2, _packed(rho2, width)


def trunc_open(
    mine: Tensor, theirs: Tensor, rho: Tensor, zeta: Tensor, f: int, width: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """w = mine + theirs + 2^(bits-2), and the packed fields (1 - msb(w)) rho + zeta mod 2^width."""
    bits = mine.element_size() * 8
    w = mine + theirs + (1 << (bits - 2))
    stays = 1 - _top(w).to(torch.int64)
    fields = (stays * _fields(rho, w.numel(), width) + _fields(zeta, w.numel(), width)) & ((1 << width) - 1)
    return w, _packed(fields, width)


def trunc_close(
    w: Tensor, mine: Tensor, theirs: Tensor, z: Tensor, zeta: Tensor, f: int, width: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """own = z + zeta 2^(bits-f); half = (w >> f) + (mine + theirs) 2^(bits-f) - 2^(bits-2-f) - own."""
    bits = w.element_size() * 8
    own = z + (_fields(zeta, w.numel(), width) << (bits - f)).to(w.dtype)
    wraps = _fields(mine, w.numel(), width) + _fields(theirs, w.numel(), width)
    half = _shift_right(w, f) + (wraps << (bits - f)).to(w.dtype) - (1 << (bits - 2 - f)) - own
    return half, own


# -- sums of waves --------------------------------------------------------------------------------------------


def wraps(g1: Tensor, g2: Tensor, drawn: Tensor, plan: Any) -> Tensor:
    """What masks [n] wrap by, where the upper bit opened is 0 and where it is 1, less `drawn`."""
    h = _kept(g1, plan) + _kept(g2, plan)
    over, top = h >> plan.narrow, (h >> (plan.narrow - 1)) & 1
    made = [
        pack_fields(value - _fields(fields, len(h), plan.above), plan.above)
        for value, fields in zip((over + top, over), drawn.view(2, -1), strict=True)
    ]
    return torch.cat(made)


def widened(opened: Tensor, g: Tensor, shares: Tensor, plan: Any, first: bool) -> Tensor:
    """What is subtracted: an evaluator's share of the value that `opened` [n] is masked."""
    m = _kept(opened, plan)
    zeros, ones = (_fields(row, len(m), plan.above) for row in shares.view(2, -1))
    wrap = torch.where((m >> (plan.narrow - 1)) == 1, ones, zeros)
    value = (wrap << plan.narrow) - _kept(g, plan)
    return value + m - (1 << (plan.narrow - 2)) if first else value


def _kept(values: Tensor, plan: Any) -> Tensor:
    """The bits that a division leaves."""
    return (values >> plan.shift) & ((1 << plan.narrow) - 1)


# -- streams --------------------------------------------------------------------------------------------------

_CHACHA_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_CHACHA_QUARTERS = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip


def chacha20(key: Tensor, counter: Tensor, offset: int, out: Tensor) -> None:
    """Overwrite out [words] int32, whole blocks, with the ChaCha20 key stream (RFC 8439, 2.3) from a block on.

    key [8] int32, counter [1] int64. The number of a block has 64 bits: the counter of the RFC is the lower half, its
    first word of nonce the upper half; the other words of nonce are 0.
    """
    low = 0xFFFFFFFF
    blocks = out.numel() // 16
    numbers = counter + offset + torch.arange(blocks, device=key.device)
    start = torch.zeros(blocks, 16, dtype=torch.int64, device=key.device)
    start[:, :4] = torch.tensor(_CHACHA_CONSTANTS, device=key.device)
    start[:, 4:12] = key.to(torch.int64) & low
    start[:, 12], start[:, 13] = numbers & low, numbers >> 32
    x = list(start.unbind(1))
    for _ in range(10):
        for a, b, c, d in _CHACHA_QUARTERS:
            for left, right, turned, places in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                x[left] = (x[left] + x[right]) & low
                mixed = x[turned] ^ x[left]
                x[turned] = ((mixed << places) | (mixed >> (32 - places))) & low
    out.copy_(((torch.stack(x, 1) + start) & low).reshape(-1).to(torch.int32))


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of table [R, W] at index [n]: [n, W]."""
    return table[index]
