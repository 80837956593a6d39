"""Attention over some of the keys on GPUs (Triton), with the log-sum-exp of each row: one pass, no score matrix.

Real numbers, float32: for token sharding, not for shares. Online softmax as in FlashAttention (Dao et al. 2022).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, KEYS = 32, 32  # rows of queries and keys of one step


@triton.jit
def attention_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN201
    q, k, v, allowed, bias, out, lse, heads, share, n, s, allowed_batch, bias_batch, scale, cap,  # noqa: ANN001
    D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr,
    BIASED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A block of rows of one head: q [B H, n, D], k [B H / share, s, D], v [.., s, E], allowed [B or 1, n, s].

    bias [B or 1, H, s]. A text's part of `allowed` and `bias` starts allowed_batch, bias_batch after the one before.
    """
    i_m, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_m, o_d, o_e = i_m * BM + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BE)
    m_m = o_m < n
    # [BM, BD]
    b_q = tl.load(q + (i_h * n + o_m[:, None]) * D + o_d[None, :], mask=m_m[:, None] & (o_d < D)[None, :], other=0.0)
    i_g, i_b = i_h // share, i_h // heads
    b_top = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    b_out = tl.zeros([BM, BE], tl.float32)
    for i_n in range(0, s, BN):
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < s
        # [BD, BN]
        b_k = tl.load(
            k + (i_g * s + o_n[None, :]) * D + o_d[:, None], mask=m_n[None, :] & (o_d < D)[:, None], other=0.0
        )
        b_s = tl.dot(b_q, b_k, input_precision="ieee") * scale
        if CAPPED:
            b_s = cap * (2.0 * tl.sigmoid(2.0 * b_s / cap) - 1.0)
        if BIASED:
            b_s += tl.load(bias + i_b * bias_batch + i_h % heads * s + o_n, mask=m_n, other=0.0)[None, :]
        m_s = m_m[:, None] & m_n[None, :]
        if MASKED:
            b_a = tl.load(allowed + i_b * allowed_batch + o_m[:, None] * s + o_n[None, :], mask=m_s, other=0)
            m_s = m_s & (b_a != 0)
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_new = tl.maximum(b_top, tl.max(b_s, 1))
        b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp(b_s - b_safe[:, None])
        b_keep = tl.exp(b_top - b_safe)
        # [BN, BE]
        b_v = tl.load(
            v + (i_g * s + o_n[:, None]) * E + o_e[None, :], mask=m_n[:, None] & (o_e < E)[None, :], other=0.0
        )
        b_sum = b_sum * b_keep + tl.sum(b_p, 1)
        b_out = b_out * b_keep[:, None] + tl.dot(b_p, b_v, input_precision="ieee")
        b_top = b_new
    b_empty = b_sum == 0.0
    b_whole = tl.where(b_empty, 1.0, b_sum)
    tl.store(
        out + (i_h * n + o_m[:, None]) * E + o_e[None, :], b_out / b_whole[:, None],
        mask=m_m[:, None] & (o_e < E)[None, :],
    )  # fmt: skip
    tl.store(lse + i_h * n + o_m, tl.where(b_empty, float("-inf"), b_top + tl.log(b_whole)), mask=m_m)


def attend(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float, softcap: float | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `private_llm.token_sharding.nodes.attn_node.attend`; float32, allowed [n, s] or [B, 1, n, s]."""
    batch, heads, n, size = q.shape
    s, width = k.shape[2], v.shape[3]
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = q.new_empty(batch, heads, n, width)
    lse = q.new_empty(batch, heads, n)
    mask = q if allowed is None else allowed.to(torch.uint8).contiguous()
    addend = q if bias is None else bias.contiguous()
    each = 0 if allowed is None or allowed.dim() == 2 or allowed.shape[0] == 1 else n * s
    each_bias = 0 if bias is None or bias.shape[0] == 1 else heads * s
    grid = (triton.cdiv(n, ROWS), batch * heads)
    attention_kernel[grid](
        q, k, v, mask, addend, out, lse, heads, heads // k.shape[1], n, s, each, each_bias, scale, softcap or 0.0,
        D=size, E=width, BD=max(16, triton.next_power_of_2(size)), BE=max(16, triton.next_power_of_2(width)),
        MASKED=allowed is not None, CAPPED=softcap is not None, BIASED=bias is not None, BM=ROWS, BN=KEYS,
    )  # fmt: skip
    return out, lse
