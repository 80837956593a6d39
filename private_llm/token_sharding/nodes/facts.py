"""Public facts that nodes share: what each attention call of a forward looks like, and where in the text a step is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import DomainError

MOST_TOKENS = 1 << 20
"""Positions of a text at most, and texts of a batch: nodes list positions before anything else could stop a step."""


@dataclass(frozen=True)
class AttentionCall:
    """One attention of a forward pass, in the order in which the model makes them.

    heads, groups: query heads and key/value heads. dim, value_dim: of a head. scale, softcap: of the scores.
    back, ahead: a query at position p sees keys from p - back to p + ahead (None: as far as the text goes).
    slopes: of each head (ALiBi; see `key_bias`). coarse: slope times position is a bfloat16 that `scale` multiplies.
    Raises DomainError for slopes that are not one a head, or beside a softcap.
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
class Step:
    """One forward: `new` positions after `past`, for `batch` texts.

    handle: the cache it continues (None: nothing is kept). padding: boolean [batch, past + new], False at padding.
    Raises DomainError for numbers that are none or beyond `MOST_TOKENS`.
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


def key_bias(call: AttentionCall, step: Step, keys: Sequence[int]) -> Tensor | None:
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
