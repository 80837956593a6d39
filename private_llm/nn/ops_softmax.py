"""Softmax over the last dimension and PyTorch's fused attention, on secrets with public masks."""

import torch
import torch.nn.functional as F
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.nn.attention import attend, pattern_of, soften
from private_llm.tensor.dispatch import implements
from private_llm.tensor.ops_pointwise import MINUS_INFINITY
from private_llm.tensor.secret import SecretTensor


@implements(F.softmax, torch.softmax, Tensor.softmax)
def softmax_rule(x: Tensor, dim: int | None = None, *_: object, **__: object) -> SecretTensor:
    """Softmax over the last dimension; entries that a mask set to minus infinity are skipped and get probability 0.

    `approx.softmax` on the others, at its cost. Raises UnsupportedOp for another dimension or a plain x.
    """
    if not isinstance(x, SecretTensor) or dim not in (-1, x.ndim - 1):
        raise UnsupportedOp(f"softmax over dimension {dim}; want a secret and its last dimension")
    shape = x.shape
    rows = (1, 1, shape[:-1].numel(), shape[-1])
    hidden = x.hidden
    allowed = None if hidden is None else ~hidden.reshape(rows)
    scores = x.shown().to_fixed()
    pattern = pattern_of(allowed, *rows, device=scores.share.parts[0].device)
    if pattern.select is None:
        return SecretTensor(soften(scores, pattern))
    at = pattern.select
    kept = scores.view(lambda part: part.reshape(-1)[at])
    return SecretTensor(soften(kept, pattern).view(lambda part: part.reshape(shape)))


@implements(F.scaled_dot_product_attention)
def attention_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> SecretTensor:
    """softmax(scale q k^T + mask) v for q [B, H, q, D], k [B, G, k, D] and v [B, G, k, Dv].

    The mask is public, boolean or additive. scale: default D^(-1/2). `attend`, at its cost. Raises UnsupportedOp for
    dropout, plain or other than 4-D operands.
    """
    operands = (query, key, value)
    if dropout_p or not all(isinstance(t, SecretTensor) and t.ndim == 4 for t in operands):
        raise UnsupportedOp("scaled_dot_product_attention needs 4-D secret q, k, v and no dropout")
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()[None, None]
    allowed, bias = read_mask(attn_mask)
    q, k, v = (t for t in operands if isinstance(t, SecretTensor))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return SecretTensor(attend(q.value(full=True), k.to_operand(), v.to_operand(), allowed, factor, bias=bias))


def read_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(allowed, bias) from a public mask, boolean or additive, or from a secret addend. Local.

    allowed: public booleans, True where attention is allowed; None: everywhere. bias: added to scores, or None.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    if isinstance(mask, SecretTensor):
        return None if mask.hidden is None else ~mask.hidden, mask.shown()
    held: tuple[Tensor, Tensor | None] | None = mask.__dict__.get("_private_mask")
    if held is None:
        allowed = mask > MINUS_INFINITY
        bias = mask.masked_fill(~allowed, 0.0)
        held = (allowed, bias if bool(bias.any()) else None)
        mask.__dict__["_private_mask"] = held
    return held
