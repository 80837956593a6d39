"""Attention in pieces: an AttnNode's pass over some of the keys, and the combination at the CompNode.

A piece is (out, lse): softmax over its own keys times their values, and the log of the sum of exponentials of its
scores. Combining pieces k is out = sum_k exp(lse_k - lse) out_k with lse = log sum_k exp(lse_k) (Cascade, equation
in section 5.2.3, with one number in place of the maximum and the sum: half the bytes and less information).
A row without any allowed key has lse = -inf and out = 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Piece = tuple[Tensor, Tensor]


def attend(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float, softcap: float | None = None,
    bias: Tensor | None = None,
) -> Piece:  # fmt: skip
    """q [B, H, n, D], k [B, G, s, D], v [B, G, s, E], allowed (boolean, broadcastable to [B, H, n, s]; None: all).

    bias [B or 1, H, s] is added to all scores of a key.
    H is a multiple of G (grouped queries). Returns out [B, H, n, E] and lse [B, H, n], in the dtype of q. One pass
    without a score matrix: float32 on a GPU (kernels/backends/triton/attention.py); on a CPU PyTorch's own kernel,
    where it can.
    """
    batch, heads, rows, _ = q.shape
    groups, keys = k.shape[1], k.shape[2]
    if not keys:
        return q.new_zeros(batch, heads, rows, v.shape[-1]), q.new_full((batch, heads, rows), -torch.inf)
    if q.is_cuda and q.dtype == torch.float32:
        from private_llm.kernels.backends.triton import attention as triton_attention  # Triton is there where GPUs are

        return triton_attention.attend(q, k, v, allowed, scale, softcap, bias)
    if q.device.type == "cpu" and q.dtype.itemsize >= 4 and softcap is None and q.shape[-1] == v.shape[-1]:
        return _in_one_pass(q, k, v, allowed, scale, bias)
    grouped = q.reshape(batch, groups, heads // groups * rows, q.shape[-1])
    scores = torch.matmul(grouped, k.transpose(-1, -2)).view(batch, heads, rows, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.unsqueeze(2)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))
    out = torch.matmul(weights.view(batch, groups, -1, keys), v)
    return out.view(batch, heads, rows, v.shape[-1]), lse


def _in_one_pass(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float, bias: Tensor | None) -> Piece:
    """`attend` by the kernel behind scaled_dot_product_attention, which also knows the log-sum-exp."""
    added = None if bias is None else bias.unsqueeze(2)
    if allowed is not None:
        added = torch.where(allowed, q.new_zeros(()) if added is None else added, -torch.inf)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, k, v, 0.0, False, attn_mask=added, scale=scale)
    if allowed is not None:
        lse = lse.masked_fill(~allowed.any(-1), -torch.inf)  # the kernel says 0 of rows without keys
    return out, lse


def combine(pieces: Sequence[Piece]) -> Tensor:
    """The attention over all keys from pieces over disjoint keys, each (out [.., n, E], lse [.., n])."""
    if len(pieces) == 1:
        return pieces[0][0]
    lses = torch.stack([lse for _, lse in pieces])
    total = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(total.isinf(), 0.0, total))
    return torch.stack([out for out, _ in pieces]).mul_(weights.unsqueeze(-1)).sum(0)
