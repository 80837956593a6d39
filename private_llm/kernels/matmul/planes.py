"""Ring matrix products on GPUs (Triton) over planes of int8 digits, for the tensor cores, and the choice of tiles.

x = sum_i d_i 256^i modulo 2^64 with balanced digits -128 <= d_i < 128: the bytes of x + 0x80..80, minus 128. Of
products of digits only those with a digit sum s = i + j < L (L = 8, or 4 for 32 bits) are not a multiple of the ring
size, so 36 (10) products of int8 matrices make one of ring matrices. A right operand of fewer digits takes fewer: nine
for 16 bits and L = 5.

Operands are taken apart once into planes [L, B, rows, K], K side by side, as the tensor cores want their tiles: no
digit is made twice, and none in registers between two products. Products of planes with one digit sum are shifted
alike, so they add up in one int32 accumulator: a program makes up to `share` of them, for one tile, and `add_up_kernel`
adds up what all made. At most L products of 2^14 meet for each of `CHUNK` steps of K: less than 2^31 in all. (Before
Hopper, and on some cards after it, tensor cores saturate instead of wrapping.)

Which tile is fastest is tried out once for each range of sizes on each GPU, by powers of two: decoding makes new sizes
at every step. Results do not depend on the tile, so parties need not choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

from private_llm.kernels.devices import ALONE


# -- tiles ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tile:
    """Outputs (BM x BN) of one program, steps of the inner dimension at a time, warps, and loads under way.

    share: of kernels whose tiles are sums of several products, how many of these one program makes.
    """

    rows: int
    columns: int
    inner: int = 32
    warps: int = 8
    stages: int = 2
    share: int = 1

    @property
    def constants(self) -> dict[str, int]:
        """As a kernel takes them."""
        return {
            "BM": self.rows, "BN": self.columns, "BK": self.inner, "num_warps": self.warps, "num_stages": self.stages
        }  # fmt: skip


def size_range(*sizes: int) -> tuple[int, ...]:
    """The power of two that holds each size."""
    return tuple(max(size - 1, 0).bit_length() for size in sizes)


def _briefly(run: Callable[[], None]) -> float:
    """Milliseconds of `run`, measured for a few of them: a model meets dozens of sizes."""
    made: float = do_bench(run, warmup=1, rep=4)
    return made


class Tuner:
    """Remembers the fastest of `tiles` for each key; the first one is used where nothing can be measured."""

    def __init__(self, tiles: Sequence[Tile], measure: Callable[[Callable[[], None]], float] = _briefly) -> None:
        self.tiles = tuple(tiles)
        self._measure = measure
        self._best: dict[object, Tile] = {}

    def best(self, key: object, launch: Callable[[Tile], None]) -> Tile:
        """The tile for `key`; `launch` must be harmless to repeat. Tiles that do not fit the GPU are passed over."""
        found = self._best.get(key)
        if found is None:
            with ALONE:  # parties may be threads
                found = self._best.get(key)
                if found is None:
                    found = self._best[key] = min(self.tiles, key=lambda tile: self._seconds(tile, launch))
        return found

    def _seconds(self, tile: Tile, launch: Callable[[Tile], None]) -> float:
        try:
            return self._measure(lambda: launch(tile))
        except OutOfResources:
            return float("inf")


# -- digits -----------------------------------------------------------------------------------------------------------
@triton.jit
def _digit(b_x, i: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Balanced digit i of numbers to which 0x80..80 has been added."""
    return (((b_x >> (8 * i)) & 0xFF) - 128).to(tl.int8)


@triton.jit
def digit_products(accs, b_x, b_y, LIMBS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """accs[s] += sum over i + j = s of digit i of x [BM, BK] times digit j of y [BK, BN]."""
    new = ()
    for s in tl.static_range(LIMBS):
        b_acc = accs[s]
        for i in tl.static_range(s + 1):
            b_acc = tl.dot(_digit(b_x, i), _digit(b_y, s - i), b_acc, out_dtype=tl.int32)
        new = new + (b_acc,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no starred expressions)
    return new


@triton.jit
def no_products(BM: tl.constexpr, BN: tl.constexpr, LIMBS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN201
    """Accumulators [BM, BN] of zero, one for each sum of digit numbers."""
    b_zero = tl.zeros((BM, BN), dtype=tl.int32)
    accs = ()
    for _ in tl.static_range(LIMBS):
        accs = accs + (b_zero,)  # type: ignore[assignment]  # noqa: RUF005
    return accs


@triton.jit
def add_up(b_out, accs, LIMBS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """b_out + sum over s of accs[s] 256^s."""
    for s in tl.static_range(LIMBS):
        b_out += accs[s].to(b_out.dtype) << (8 * s)
    return b_out


def digit_shift(limbs: int) -> int:
    """0x80..80 as a signed ring element."""
    return int.from_bytes(bytes([0x80] * limbs), "little", signed=True)


TUNER = Tuner(
    (
        Tile(64, 64, 128, 4, 4, 4), Tile(64, 128, 128, 4, 4, 4), Tile(64, 128, 128, 4, 4, 8),
        Tile(128, 128, 128, 8, 3, 4), Tile(128, 128, 128, 8, 3, 8),
    )
)  # fmt: skip
"""Tiles to try: of 24, one of these was fastest, or within 10 % of it, for each of twelve sizes on an H200."""
STEP = 128
"""K is filled up with zeros to a multiple of it."""
CHUNK = 16384 - STEP
"""k steps whose products one accumulator can take."""
BYTES = 1 << 30
"""Of planes of an operand that are held at a time: larger ones are taken apart piece by piece."""
SUMS = 1 << 26
"""Sums of pieces that are held at a time, int32: more outputs are made one part of the rows after the other."""
_LINES, _PLACES, _ELEMENTS = 32, 64, 1024


@triton.jit
def take_apart_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    x, out, R, K, whole, x_batch, x_row, x_col, plane,  # noqa: ANN001
    LIMBS: tl.constexpr, SHIFT: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out [LIMBS, B, R, whole] int8: balanced digits of x [B, R, K] (any strides), zeros from K on."""
    i_r, i_k, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_r = (i_r * BR + tl.arange(0, BR)).to(tl.int64)
    o_k = (i_k * BK + tl.arange(0, BK)).to(tl.int64)
    inside = (o_r < R)[:, None] & (o_k < K)[None, :]
    # [BR, BK]
    b_x = tl.load(x + i_b * x_batch + o_r[:, None] * x_row + o_k[None, :] * x_col, mask=inside, other=0) + SHIFT
    p_out = out + (i_b * R + o_r[:, None]) * whole + o_k[None, :]
    m_out = (o_r < R)[:, None] & (o_k < whole)[None, :]
    for i in tl.static_range(LIMBS):
        b_digit = (((b_x >> (8 * i)) & 0xFF) - 128).to(tl.int8)
        tl.store(p_out + tl.cast(i, tl.int64) * plane, b_digit, mask=m_out)


@triton.jit
def planes_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    x, y, sums, M, N, K, pitch, x_plane, y_plane, x_batch, y_batch, count,  # noqa: ANN001
    LIMBS: tl.constexpr, OTHERS: tl.constexpr, SHARE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """sums [pieces, B, M, N] int32: each piece sums up to SHARE products x_i y_j^T of one i + j, from LIMBS - 1 down.

    x [LIMBS, B, .., K], y [OTHERS, B, .., K] int8, lines `pitch` apart; count = B M N.
    """
    i_tile, i_piece, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tiles = tl.cdiv(M, BM)
    i_m, i_n = i_tile % tiles, i_tile // tiles
    # the longest sums first, so that what is left for the last processors is short
    s, i_first = LIMBS - 1, i_piece
    while i_first >= tl.cdiv(min(s + 1, OTHERS), SHARE):
        i_first -= tl.cdiv(min(s + 1, OTHERS), SHARE)
        s -= 1
    i_first *= SHARE
    o_m, o_n, o_k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    left_m, left_n = M - i_m * BM, N - i_n * BN
    x += i_b * x_batch + (i_m * BM).to(tl.int64) * pitch
    y += i_b * y_batch + (i_n * BN).to(tl.int64) * pitch
    # rows beyond the last are read from others, and not stored
    p_x = x + ((o_m % left_m)[:, None] * pitch + o_k[None, :])
    p_y = y + ((o_n % left_n)[:, None] * pitch + o_k[None, :])
    b_acc = tl.zeros((BM, BN), dtype=tl.int32)
    steps = K // BK
    for at in range(min(SHARE, min(s + 1, OTHERS) - i_first) * steps):
        j = at // steps
        i_k = (at - j * steps) * BK
        j += i_first
        # [BM, BK], [BN, BK]
        b_x = tl.load(p_x + (tl.cast(s - j, tl.int64) * x_plane + i_k))
        b_y = tl.load(p_y + (tl.cast(j, tl.int64) * y_plane + i_k))
        b_acc = tl.dot(b_x, b_y.T, b_acc, out_dtype=tl.int32)
    p_sums = sums + i_piece.to(tl.int64) * count + (i_b * M + i_m * BM) * N + i_n * BN
    tl.store(p_sums + (o_m[:, None] * N + o_n[None, :]), b_acc, mask=(o_m < left_m)[:, None] & (o_n < left_n)[None, :])


@triton.jit
def add_up_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    sums, out, count, LIMBS: tl.constexpr, OTHERS: tl.constexpr, SHARE: tl.constexpr, ADD: tl.constexpr,  # noqa: ANN001
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out [count] (+)= the sums of all pieces, each times 256^s."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = o < count
    b_out = tl.zeros((BLOCK,), dtype=out.dtype.element_ty)
    if ADD:
        b_out = tl.load(out + o, mask=inside, other=0)
    for place in tl.static_range(LIMBS):
        for _ in tl.static_range(((LIMBS - place if LIMBS - place < OTHERS else OTHERS) + SHARE - 1) // SHARE):
            b_out += tl.load(sums + o, mask=inside, other=0).to(b_out.dtype) << (8 * (LIMBS - 1 - place))
            sums += count
    tl.store(out + o, b_out, mask=inside)


def pieces(limbs: int, others: int, share: int) -> int:
    """Programs of a tile."""
    return sum(triton.cdiv(min(s + 1, others), share) for s in range(limbs))


def take_apart(x: Tensor, limbs: int | None = None) -> Tensor:
    """Digit planes [L, B, R, K'] int8 of x [B, R, K], any strides; K' is K filled up with zeros.

    limbs: how many of the lowest digits; None: all.
    """
    batch, rows, inner = x.shape
    limbs, whole = limbs or x.element_size(), triton.cdiv(inner, STEP) * STEP
    out = torch.empty((limbs, batch, rows, whole), dtype=torch.int8, device=x.device)
    grid = (triton.cdiv(rows, _LINES), triton.cdiv(whole, _PLACES), batch)
    take_apart_kernel[grid](
        x, out, rows, inner, whole, *x.stride(), out.stride(0), LIMBS=limbs, SHIFT=digit_shift(limbs), BR=_LINES,
        BK=_PLACES,
    )  # fmt: skip
    return out


def take_columns_apart(y: Tensor, first: int, last: int) -> Tensor:
    """Digit planes of columns first .. last - 1 of y [B, K, N]."""
    return take_apart(y[:, :, first:last].mT)


def add_product(
    x: Tensor, y: Tensor, out: Tensor, adds: bool, apart: Callable[[Any, int, int], Tensor] = take_columns_apart
) -> None:
    """out [B, M, N] (contiguous) (+)= x y for x [B, M, K], y [B, K, N] of any strides; any y that `apart` takes."""
    batch, rows, inner = x.shape
    columns = out.shape[2]
    line = x.element_size() * triton.cdiv(inner, STEP) * STEP
    most = max(BYTES // line // STEP, 1) * STEP  # lines at a time
    if batch > 1 and batch * max(rows, columns) > most:
        for b in range(batch):
            add_product(x[b : b + 1], y[b : b + 1], out[b : b + 1], adds)
        return
    for n in range(0, columns, most):
        right = apart(y, n, min(n + most, columns))
        whole = columns <= most
        part = out if whole else torch.empty_like(out[:, :, n : n + most], memory_format=torch.contiguous_format)
        for m in range(0, rows, most):
            product_of_planes(take_apart(x[:, m : m + most]), right, part[:, m : m + most], adds and whole)
        if not whole:
            made = out[:, :, n : n + most]
            made.add_(part) if adds else made.copy_(part)


def product_of_planes(x: Tensor, y: Tensor, out: Tensor, adds: bool) -> None:
    """out [B, M, N] (+)= x y^T modulo 256^L for planes x [L, B, M, K'], y [at most L, B, N, K']."""
    limbs, batch, rows, inner = x.shape
    others, _, columns, _ = y.shape

    def launch(tile: Tile, into: Tensor, add: bool) -> None:
        most = max(SUMS // (pieces(limbs, others, tile.share) * columns), 1)  # rows at a time
        high, deep = min(rows, triton.cdiv(most, tile.rows) * tile.rows), max(most // rows, 1)
        for b in range(0, batch, deep):
            for m in range(0, rows, high):
                for k in range(0, inner, CHUNK):
                    left, right = x[:, b : b + deep, m : m + high, k : k + CHUNK], y[:, b : b + deep, :, k : k + CHUNK]
                    _launch(tile, left, right, into[b : b + deep, m : m + high], add or k > 0)

    tile = TUNER.tiles[0]
    if out.is_cuda:
        key = (out.device, limbs, others, size_range(batch, rows, inner, columns))
        tile = TUNER.best(key, lambda tried: launch(tried, torch.empty_like(out), False))
    launch(tile, out, adds)


def _launch(tile: Tile, x: Tensor, y: Tensor, out: Tensor, adds: bool) -> None:
    """One part of the outputs, and of K; `out` lies in one piece."""
    limbs, batch, rows, inner = x.shape
    others, _, columns, _ = y.shape
    count, made = out.numel(), pieces(limbs, others, tile.share)
    sums = torch.empty((made, count), dtype=torch.int32, device=x.device)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns), made, batch)
    planes_kernel[grid](
        x, y, sums, rows, columns, inner, x.stride(2), x.stride(0), y.stride(0), x.stride(1), y.stride(1), count,
        LIMBS=limbs, OTHERS=others, SHARE=tile.share, **tile.constants,
    )  # fmt: skip
    add_up_kernel[(triton.cdiv(count, _ELEMENTS),)](
        sums, out, count, LIMBS=limbs, OTHERS=others, SHARE=tile.share, ADD=adds, BLOCK=_ELEMENTS
    )  # fmt: skip
