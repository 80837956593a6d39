"""Public facts that nodes share: what each attention call of a forward looks like, and where in the text a step is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionCall:
    """One attention of a forward pass, in the order in which the model makes them.

    heads, groups: query heads and key/value heads. dim, value_dim: of a head. scale, softcap: of the scores.
    back, ahead: a query at position p sees keys from p - back to p + ahead (None: as far as the text goes).
    """

    heads: int
    groups: int
    dim: int
    value_dim: int
    scale: float
    softcap: float | None = None
    back: int | None = None
    ahead: int | None = None

    @property
    def row(self) -> int:
        """Numbers in one row of queries, keys and values."""
        return self.heads * self.dim + self.groups * (self.dim + self.value_dim)


@dataclass(frozen=True)
class Step:
    """One forward: `new` positions after `past`, for `batch` texts.

    handle: the cache it continues (None: nothing is kept). padding: boolean [batch, past + new], False at padding.
    """

    handle: int | None
    batch: int
    past: int
    new: int
    padding: Tensor | None = None

    @property
    def total(self) -> int:
        """Positions so far."""
        return self.past + self.new


def allowed(call: AttentionCall, step: Step, queries: Sequence[int], keys: Sequence[int]) -> Tensor | None:
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
