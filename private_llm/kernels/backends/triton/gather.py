"""Rows of a table by public numbers on GPUs (Triton): whole lines are read and written."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORDS = 1024
"""Elements of one row per program."""


@triton.jit
def gather_kernel(table, index, out, width, BW: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """out[i] = table[index[i]] for rows of `width` elements."""
    i_r, i_w = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_w = i_w * BW + tl.arange(0, BW)
    m_w = o_w < width
    i_from = tl.load(index + i_r)
    # [BW]
    tl.store(out + i_r * width + o_w, tl.load(table + i_from * width + o_w, mask=m_w), mask=m_w)


def gather_rows(table: Tensor, index: Tensor, out: Tensor) -> None:
    """See `ops.gather_rows`; the numbers were checked."""
    rows, width = out.shape
    gather_kernel[(rows, triton.cdiv(width, WORDS))](table, index, out, width, BW=WORDS)
