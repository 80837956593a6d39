"""Attention at nodes: what each call of a forward looks like, where in the text a step is, and attention in pieces.

A piece is (out, lse): softmax over its own keys times their values, and the log of the sum of exponentials of its
scores. Combining pieces k is out = sum_k exp(lse_k - lse) out_k with lse = log sum_k exp(lse_k) (Cascade, equation
in section 5.2.3, with one number in place of the maximum and the sum: half the bytes and less information).
A row without any allowed key has lse = -inf and out = 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.kernels.devices import triton_module

MOST_TOKENS = 1 << 20  # positions of a text, and texts of a batch, at most: nodes list positions before a step stops

_WIDEST = 1 << 24  # heads of an attention call, and numbers of a head, at most


@dataclass(frozen=True)
class AttentionCall:
    """One attention of a forward pass, in the order in which the model makes them.

    heads, groups: query heads and key/value heads. dim, value_dim: of a head. scale, softcap: of the scores.
    back, ahead: a query at position p sees keys from p - back to p + ahead (None: as far as the text goes).
    slopes: of each head (ALiBi; see `key_bias`). coarse: slope times position is a bfloat16 that `scale` multiplies.
    Raises DomainError for sizes that no model has, and for slopes that are not one a head, or beside a softcap.
    """

    heads: int
    groups: int
    dim: int
    value_dim: int
    scale: float
    softcap: float | None = None
    back: int | None = None
    ahead: int | None = None
    slopes: tuple[float, ...] | None = None
    coarse: bool = False

    def __post_init__(self) -> None:
        sizes = (self.heads, self.groups, self.dim, self.value_dim)
        if not all(1 <= size <= _WIDEST for size in sizes):
            raise DomainError(f"attention call: got {sizes} heads, groups and sizes; want each 1 to {_WIDEST}")
        if self.slopes is None:
            return
        object.__setattr__(self, "slopes", tuple(self.slopes))  # JSON has lists
        if len(self.slopes) != self.heads or self.softcap is not None:
            raise DomainError(
                f"attention call: got {len(self.slopes)} slopes and softcap {self.softcap}; want a slope for each of "
                f"{self.heads} heads, and no softcap with them"
            )

    @property
    def row(self) -> int:
        """Numbers in one row of queries, keys and values."""
        return self.heads * self.dim + self.groups * (self.dim + self.value_dim)


@dataclass(frozen=True)
class ForwardStep:
    """One forward: `new` positions after `past`, for `batch` texts.

    handle: the cache it continues (None: nothing is kept). padding: boolean [batch, past + new], False at padding.
    Raises DomainError for what no text has: a node makes lists of positions, so it checks before.
    """

    handle: int | None
    batch: int
    past: int
    new: int
    padding: Tensor | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("past", 0), ("new", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= MOST_TOKENS:
                raise DomainError(f"{name} of a step: got {value!r}; want {least} to {MOST_TOKENS}")
        if self.total > MOST_TOKENS:
            raise DomainError(f"step: got {self.past} positions and {self.new} new ones; want up to {MOST_TOKENS}")
        mask = self.padding
        if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != (self.batch, self.total)):
            raise DomainError(f"padding: got {mask.dtype} {tuple(mask.shape)}; want bool {(self.batch, self.total)}")

    @property
    def total(self) -> int:
        """Positions so far."""
        return self.past + self.new


def allowed(call: AttentionCall, step: ForwardStep, queries: Sequence[int], keys: Sequence[int]) -> Tensor | None:
    """Which of `keys` (positions) each of `queries` sees: boolean, broadcastable to [B, H, q, k]; None: all of them."""
    q = torch.tensor(queries).view(-1, 1)
    k = torch.tensor(keys).view(1, -1)
    mask = torch.ones(len(queries), len(keys), dtype=torch.bool)
    if call.back is not None:
        mask &= q - k <= call.back
    if call.ahead is not None:
        mask &= k - q <= call.ahead
    if step.padding is not None:
        return mask.view(1, 1, len(queries), len(keys)) & step.padding[:, keys].view(step.batch, 1, 1, -1)
    return None if bool(mask.all()) else mask


def key_bias(call: AttentionCall, step: ForwardStep, keys: Sequence[int]) -> Tensor | None:
    """What ALiBi adds to the scores of each of `keys` (positions), [B or 1, H, k]; None for a call without slopes.

    slope x the number of unmasked positions before the key, as Bloom and Falcon count (transformers,
    `build_alibi_tensor`); all queries of a head get the same, because a constant for each query changes no softmax.
    """
    if call.slopes is None:
        return None
    counted = torch.ones(1, step.total, dtype=torch.int64) if step.padding is None else step.padding.long()
    before = ((counted.cumsum(1) - 1) * counted)[:, keys]
    numbers = torch.bfloat16 if call.coarse else torch.float32
    bias = torch.tensor(call.slopes, dtype=numbers).view(1, -1, 1) * before.unsqueeze(1).to(numbers)
    return bias.float() * call.scale if call.coarse else bias


# -- attention in pieces: an AttnNode's pass over some of the keys, and the combination at the CompNode ---------------
Piece = tuple[Tensor, Tensor]


def attend(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float, softcap: float | None = None,
    bias: Tensor | None = None,
) -> Piece:  # fmt: skip
    """q [B, H, n, D], k [B, G, s, D], v [B, G, s, E], allowed (boolean, broadcastable to [B, H, n, s]; None: all).

    bias [B or 1, H, s] is added to all scores of a key.
    H is a multiple of G (grouped queries). Returns out [B, H, n, E] and lse [B, H, n], in the dtype of q. One pass
    without a score matrix: float32 on a GPU (kernels/attention.py); on a CPU by PyTorch, where it can.
    """
    batch, heads, rows, _ = q.shape
    groups, keys = k.shape[1], k.shape[2]
    if not keys:
        return q.new_zeros(batch, heads, rows, v.shape[-1]), q.new_full((batch, heads, rows), -torch.inf)
    if q.is_cuda and q.dtype == torch.float32:
        made: Piece = triton_module("attention").attend(q, k, v, allowed, scale, softcap, bias)
        return made
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
    """`attend` by the kernel of scaled_dot_product_attention, which also knows the log-sum-exp."""
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
