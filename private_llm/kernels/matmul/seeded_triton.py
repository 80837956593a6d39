"""Ring products with a matrix that is slices of ChaCha20 streams, on GPUs (Triton): it is never in memory.

A lane makes blocks of 64 bytes of the stream, E elements (8, or 16 for 32 bits) side by side in a line of the matrix,
in registers. Few rows of x are multiplied by them there and then (`turned_rows_kernel`, `rows_kernel`); for more rows
their digits are written as planes (`take_apart_kernel`), which `planes` multiplies. Lines are of any length and begin
anywhere in a stream, so a block may hold ends of lines, whose other elements count as nothing.

A key lies in device memory as long as its `StreamKey` lives, so these kernels may be part of a captured graph.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from private_llm.kernels.matmul import planes
from private_llm.kernels.matmul.planes import Tile, Tuner, size_range
from private_llm.kernels.prg.triton import block_words, chacha20
from private_llm.kernels.seeded_tensor import SeededTensor, StreamSlice

BLOCK = 64
"""Bytes of a block of the stream."""
TUNER = Tuner(
    tuple(
        Tile(lines, blocks, warps=4, share=share)
        for lines, blocks, share in ((4, 32, 4), (16, 8, 8), (16, 8, 16), (32, 4, 8))
    )
)
"""Tiles to try: `rows` lines of the matrix by `columns` blocks, one a lane; a program makes `share` of them. Lanes on
different lines read the same elements of x, and those on one line neighbours of a matrix beside it."""
_LINES, _BLOCKS = 32, 4


@triton.jit
def _blocks(key, o_block):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The 16 words of the blocks number o_block, int64 of any shape."""
    return block_words(key, (o_block >> 32).to(tl.uint32), 0, 0, o_block.to(tl.uint32))


@triton.jit
def _element(b_words, e: tl.constexpr, BYTES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Ring element e of each block."""
    if BYTES == 4:
        b_x = b_words[e].to(tl.int32, bitcast=True)
    else:
        b_high = b_words[2 * e + 1].to(tl.uint64) << 32
        b_x = (b_words[2 * e].to(tl.uint64) | b_high).to(tl.int64, bitcast=True)
    return b_x


@triton.jit
def turned_rows_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    key, x, z, y, out, start: tl.int64, lines, width, M, N, blocks, x_row, x_col, z_row, z_col, y_line, y_col,  # noqa: ANN001
    BYTES: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr, BL: tl.constexpr,
    BJ: tl.constexpr,
):  # fmt: skip
    """out [M, lines], rows N apart, += x w^T for x [M, width], w [lines, width] from element `start` of the stream on.

    blocks: of a line, at most. HELD: += z y^T, too, for y [lines, width] in memory.
    """
    i_l, i_part = tl.program_id(0), tl.program_id(1)
    E: tl.constexpr = 64 // BYTES
    # [BL, 1], [BL, BJ]
    o_l = (i_l * BL + tl.arange(0, BL)).to(tl.int64)[:, None]
    m_l = o_l < lines
    o_first = start + o_l * width
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros((BL, BJ), dtype=out.dtype.element_ty),)  # type: ignore[assignment]  # noqa: RUF005
    for at in range(min(SHARE, tl.cdiv(blocks, BJ) - i_part * SHARE)):
        o_block = o_first // E + ((i_part * SHARE + at) * BJ + tl.arange(0, BJ))[None, :]
        b_words = _blocks(key, o_block)
        for e in tl.static_range(E):
            o_k = o_block * E + e - o_first
            inside = m_l & (o_k >= 0) & (o_k < width)
            b_w, new = _element(b_words, e, BYTES), ()
            if HELD:
                b_y = tl.load(y + o_l * y_line + o_k * y_col, mask=inside, other=0)
            for m in tl.static_range(ROWS):
                b_sum = sums[m] + b_w * tl.load(x + m * x_row + o_k * x_col, mask=inside & (m + 0 * o_k < M), other=0)
                if HELD:
                    b_sum += b_y * tl.load(z + m * z_row + o_k * z_col, mask=inside & (m + 0 * o_k < M), other=0)
                new = new + (b_sum,)  # type: ignore[assignment]  # noqa: RUF005
            sums = new
    o_out = i_l * BL + tl.arange(0, BL)
    for m in tl.static_range(ROWS):
        p_out = out + m * N + o_out
        tl.atomic_add(p_out, tl.sum(sums[m], axis=1), mask=(o_out < lines) & (m + 0 * o_out < M), sem="relaxed")


@triton.jit
def rows_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    key, x, z, y, out, start: tl.int64, lines, width, M, N, period, x_row, x_col, z_row, z_col, y_line,  # noqa: ANN001
    y_col, BYTES: tl.constexpr, HELD: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr, BL: tl.constexpr,  # noqa: ANN001
    BJ: tl.constexpr,
):  # fmt: skip
    """out [M, width], rows N apart, += x w for x [M, lines], w [lines, width] from element `start` of the stream on.

    A program takes every `period`-th line, at one place of a block. HELD: += z y, y [lines, width] in memory.
    """
    i_j, i_part, i_phase = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    E: tl.constexpr = 64 // BYTES
    shift = (start + i_phase * width) % E
    # [1, BJ], [BL, BJ]
    o_j = (i_j * BJ + tl.arange(0, BJ)).to(tl.int64)[None, :]
    sums = ()
    for _ in tl.static_range(ROWS * E):
        sums = sums + (tl.zeros((BL, BJ), dtype=out.dtype.element_ty),)  # type: ignore[assignment]  # noqa: RUF005
    for at in range(min(SHARE, tl.cdiv(tl.cdiv(lines, period), BL) - i_part * SHARE)):
        o_l = i_phase + ((i_part * SHARE + at) * BL + tl.arange(0, BL)).to(tl.int64)[:, None] * period
        m_l, new = o_l < lines, ()
        b_words = _blocks(key, (start + o_l * width) // E + o_j)
        for m in tl.static_range(ROWS):
            b_x = tl.load(x + m * x_row + o_l * x_col, mask=m_l & (m + 0 * o_l < M), other=0)
            if HELD:
                b_z = tl.load(z + m * z_row + o_l * z_col, mask=m_l & (m + 0 * o_l < M), other=0)
            for e in tl.static_range(E):
                b_sum = sums[m * E + e] + _element(b_words, e, BYTES) * b_x
                if HELD:
                    o_n = o_j * E + e - shift
                    inside = m_l & (o_n >= 0) & (o_n < width)
                    b_sum += tl.load(y + o_l * y_line + o_n * y_col, mask=inside, other=0) * b_z
                new = new + (b_sum,)  # type: ignore[assignment]  # noqa: RUF005
        sums = new
    for m in tl.static_range(ROWS):
        for e in tl.static_range(E):
            o_out = (i_j * BJ + tl.arange(0, BJ)) * E + e - shift
            inside = (o_out >= 0) & (o_out < width) & (m + 0 * o_out < M)
            tl.atomic_add(out + m * N + o_out, tl.sum(sums[m * E + e], axis=0), mask=inside, sem="relaxed")


def few_rows(x: Tensor, w: SeededTensor, out: Tensor, z: Tensor | None = None, y: Tensor | None = None) -> None:
    """out [M, N] (contiguous) += x w for x [M, K], w [K, N], and + z y for y in memory like w; few rows M."""
    for piece, first, last in _pieces(w):
        mine = (slice(None), slice(first, last))
        if w.turned:
            _launch(piece, w, x, out[mine], z, None if y is None else y[mine].mT)
        else:
            _launch(piece, w, x[mine], out, None if z is None else z[mine], None if y is None else y[first:last])


def _launch(
    piece: StreamSlice, w: SeededTensor, x: Tensor, out: Tensor, z: Tensor | None, y: Tensor | None
) -> None:  # fmt: skip
    """One slice; y [lines, width]."""
    (width,), size, rows = w.line, w.itemsize, len(x)
    elements = BLOCK // size
    key, held = piece.key.words(x.device), z is not None and y is not None
    z, y = (z, y) if z is not None and y is not None else (x, x)

    def launch(tile: Tile, into: Tensor) -> None:
        constants = {
            "BYTES": size, "HELD": held, "ROWS": triton.next_power_of_2(rows), "SHARE": tile.share, "BL": tile.rows,
            "BJ": tile.columns, "num_warps": tile.warps,
        }  # fmt: skip
        sizes = (piece.start, piece.lines, width, rows, into.stride(0))
        strides = (*x.stride(), *z.stride(), *y.stride())
        blocks = _blocks_of(piece.start, width, width, elements)
        grid: tuple[int, ...]
        if w.turned:
            grid = (triton.cdiv(piece.lines, tile.rows), triton.cdiv(blocks, tile.columns * tile.share))
            turned_rows_kernel[grid](key, x, z, y, into, *sizes, blocks, *strides, **constants)
        else:
            period = elements // math.gcd(elements, width)
            each = triton.cdiv(triton.cdiv(piece.lines, period), tile.rows * tile.share)
            grid = (triton.cdiv(blocks, tile.columns), each, min(period, piece.lines))
            rows_kernel[grid](key, x, z, y, into, *sizes, period, *strides, **constants)

    tile = TUNER.tiles[0]
    if out.is_cuda:
        of = (out.device, out.dtype, w.turned, held, size_range(rows, piece.lines, width))
        tile = TUNER.best(of, lambda tried: launch(tried, torch.zeros_like(out)))
    launch(tile, out)


def _blocks_of(start: int, pitch: int, width: int, elements: int) -> int:
    """Blocks that a line may touch: one more where lines begin within a block."""
    within = start % elements or pitch % elements
    return int(triton.cdiv(width + (elements - 1 if within else 0), elements))


def _pieces(w: SeededTensor) -> list[tuple[StreamSlice, int, int]]:
    """Slices that are not empty, each with the numbers of its first line and of the one after its last."""
    found, at = [], 0
    for piece in w.slices:
        if piece.lines and w.line.numel():
            found.append((piece, at, at + piece.lines))
        at += piece.lines
    return found


# -- many rows ----------------------------------------------------------------------------------------------------
@triton.jit
def _exchanged(a, b, places: tl.constexpr, mask: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Two words that have swapped the bits of a above `places`, and of b below it, where the mask says."""
    b_swapped = ((a >> places) ^ b) & mask
    return a ^ (b_swapped << places), b ^ b_swapped


@triton.jit
def bytes_turned(b0, b1, b2, b3, b4, b5, b6, b7):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Words of uint64, of which number i has the bytes number i of all eight, in their order."""
    b0, b4 = _exchanged(b0, b4, 32, 0x00000000FFFFFFFF)
    b1, b5 = _exchanged(b1, b5, 32, 0x00000000FFFFFFFF)
    b2, b6 = _exchanged(b2, b6, 32, 0x00000000FFFFFFFF)
    b3, b7 = _exchanged(b3, b7, 32, 0x00000000FFFFFFFF)
    b0, b2 = _exchanged(b0, b2, 16, 0x0000FFFF0000FFFF)
    b1, b3 = _exchanged(b1, b3, 16, 0x0000FFFF0000FFFF)
    b4, b6 = _exchanged(b4, b6, 16, 0x0000FFFF0000FFFF)
    b5, b7 = _exchanged(b5, b7, 16, 0x0000FFFF0000FFFF)
    b0, b1 = _exchanged(b0, b1, 8, 0x00FF00FF00FF00FF)
    b2, b3 = _exchanged(b2, b3, 8, 0x00FF00FF00FF00FF)
    b4, b5 = _exchanged(b4, b5, 8, 0x00FF00FF00FF00FF)
    b6, b7 = _exchanged(b6, b7, 8, 0x00FF00FF00FF00FF)
    return b0, b1, b2, b3, b4, b5, b6, b7


@triton.jit
def _eight(b_words, e: tl.constexpr, BYTES: tl.constexpr, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Number e of eight words of digits of a block: element e + SHIFT, or of 32 bits elements e and e + 8."""
    if BYTES == 8:
        b_x = (_element(b_words, e, 8) + SHIFT).to(tl.uint64, bitcast=True)
    else:
        b_high = (_element(b_words, e + 8, 4) + SHIFT).to(tl.uint32, bitcast=True).to(tl.uint64) << 32
        b_x = (_element(b_words, e, 4) + SHIFT).to(tl.uint32, bitcast=True).to(tl.uint64) | b_high
    return b_x


@triton.jit
def seeded_planes_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    key, out, start: tl.int64, lines, pitch, width, plane: tl.int64, o_line, o_place,  # noqa: ANN001
    BYTES: tl.constexpr, SHIFT: tl.constexpr, TURNED: tl.constexpr, PACKED: tl.constexpr, BL: tl.constexpr,
    BJ: tl.constexpr,
):  # fmt: skip
    """Balanced digits (`planes`) of elements start + pitch l + n of the stream at out + plane i + o_line l + o_place n.

    TURNED: o_place is 1. PACKED: then lines are whole blocks, too, so that eight digits are stored at once.
    """
    E: tl.constexpr = 64 // BYTES
    o_l = (tl.program_id(0) * BL + tl.arange(0, BL)).to(tl.int64)
    o_j = (tl.program_id(1) * BJ + tl.arange(0, BJ)).to(tl.int64)
    # [BL, BJ] or [BJ, BL]: what lies side by side in out is made by lanes side by side
    o_l, o_j = (o_l[:, None], o_j[None, :]) if TURNED else (o_l[None, :], o_j[:, None])
    o_first = start + o_l * pitch
    o_block = o_first // E + o_j
    b_words = _blocks(key, o_block)
    if PACKED:
        b_rows = bytes_turned(
            _eight(b_words, 0, BYTES, SHIFT), _eight(b_words, 1, BYTES, SHIFT), _eight(b_words, 2, BYTES, SHIFT),
            _eight(b_words, 3, BYTES, SHIFT), _eight(b_words, 4, BYTES, SHIFT), _eight(b_words, 5, BYTES, SHIFT),
            _eight(b_words, 6, BYTES, SHIFT), _eight(b_words, 7, BYTES, SHIFT),
        )  # fmt: skip
        for i in tl.static_range(8):
            p_out = out + (i % BYTES) * plane + o_l * o_line + o_j * E + (i // BYTES) * 8
            b_eight = (b_rows[i] ^ 0x8080808080808080).to(tl.int64, bitcast=True)
            tl.store(p_out.to(tl.pointer_type(tl.int64)), b_eight, mask=(o_l < lines) & (o_j * E < width))
    else:
        for e in tl.static_range(E):
            o_n = o_block * E + e - o_first
            inside = (o_l < lines) & (o_n >= 0) & (o_n < width)
            b_x = _element(b_words, e, BYTES) + SHIFT
            for i in tl.static_range(BYTES):
                b_digit = (((b_x >> (8 * i)) & 0xFF) - 128).to(tl.int8)
                tl.store(out + i * plane + o_l * o_line + o_n * o_place, b_digit, mask=inside)


def take_apart(w: SeededTensor, first: int, last: int) -> Tensor:
    """Digit planes [L, 1, last - first, K'] int8 (`planes.take_apart`) of columns first .. last - 1 of w [K, N]."""
    (inner, _), size = w.shape, w.itemsize
    whole = triton.cdiv(inner, planes.STEP) * planes.STEP
    room = torch.empty if inner == whole else torch.zeros
    out = room((size, 1, last - first, whole), dtype=torch.int8, device=w.device)
    for piece, at, end in _pieces(w):
        if w.turned:
            low, high = max(first, at), min(last, end)
            if low < high:
                _apart(piece, w, low - at, high - low, (0, inner), out[:, 0, low - first :])
        else:
            _apart(piece, w, 0, piece.lines, (first, last - first), out[:, 0, :, at:])
    return out


def _apart(piece: StreamSlice, w: SeededTensor, line: int, lines: int, window: tuple[int, int], out: Tensor) -> None:
    """Lines line .. line + lines - 1 of a slice, of each a window (first element, how many), into out [L, N, K']."""
    (pitch,), size, (skipped, width) = w.line, w.itemsize, window
    elements, start = BLOCK // size, piece.start + line * pitch + skipped
    packed = w.turned and not (start % elements or pitch % elements)
    blocks = _blocks_of(start, pitch, width, elements)
    low, high = (_BLOCKS, _LINES) if w.turned else (_LINES, _BLOCKS)
    grid = (triton.cdiv(lines, low), triton.cdiv(blocks, high))
    across, along = out.stride()[1:] if w.turned else out.stride()[:0:-1]
    seeded_planes_kernel[grid](
        piece.key.words(w.device), out, start, lines, pitch, width, out.stride(0), across, along, BYTES=size,
        SHIFT=planes.digit_shift(size), TURNED=w.turned, PACKED=packed, BL=low, BJ=high,
    )  # fmt: skip


def made(w: SeededTensor) -> Tensor:
    """The whole tensor, in memory of its own."""
    parts, elements = [torch.empty(0, dtype=w.dtype, device=w.device)], BLOCK // w.itemsize
    for piece, first, last in _pieces(w):
        skipped, count = piece.start % elements, (last - first) * w.line.numel()
        room = torch.empty(triton.cdiv(skipped + count, elements) * 16, dtype=torch.int32, device=w.device)
        start = torch.full((1,), piece.start // elements, dtype=torch.int64, device=w.device)
        chacha20(piece.key.words(w.device), start, 0, room)
        parts.append(room.view(w.dtype)[skipped : skipped + count])
    whole = (parts[-1] if len(parts) < 3 else torch.cat(parts)).view(w.shape[::-1] if w.turned else w.shape)
    return whole.mT if w.turned else whole
