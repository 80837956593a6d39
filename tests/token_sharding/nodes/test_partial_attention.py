"""Attention in pieces equals attention at once, for any cut of the keys, and stays finite at the edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from private_llm.token_sharding.nodes.facts import attend, combine


def tensors(heads: int, groups: int, rows: int, keys: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(2, heads, rows, 16, generator=g, dtype=torch.float64)
    k, v = (torch.randn(2, groups, keys, 16, generator=g, dtype=torch.float64) for _ in range(2))
    return q, k, v


def at_once(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("cut", [[37], [0, 5, 1, 31], [10, 10, 17]])
def test_pieces_combine_to_the_whole(heads: int, groups: int, cut: list[int]) -> None:
    q, k, v = tensors(heads, groups, 37, 37)
    allowed = torch.ones(37, 37, dtype=torch.bool).tril()
    pieces, start = [], 0
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1))
    for size in cut:
        keys = order[start : start + size]
        pieces.append(attend(q, k[:, :, keys], v[:, :, keys], allowed[:, keys], 0.25))
        start += size
    assert float((combine(pieces) - at_once(q, k, v, allowed, 0.25)).abs().max()) < 1e-12


def test_no_mask_and_softcap() -> None:
    q, k, v = tensors(2, 2, 5, 9)
    whole, _ = attend(q, k, v, None, 0.3, softcap=2.0)
    scores = 2.0 * torch.tanh(torch.einsum("bhnd,bhsd->bhns", q, k) * 0.3 / 2.0)
    assert float((whole - scores.softmax(-1) @ v).abs().max()) < 1e-12


def test_rows_without_keys_are_zero_and_weigh_nothing() -> None:
    q, k, v = tensors(2, 2, 3, 4)
    nothing = attend(q, k, v, torch.zeros(3, 4, dtype=torch.bool), 1.0)
    assert bool((nothing[0] == 0).all())
    assert bool((nothing[1] == -torch.inf).all())
    some = attend(q, k, v, None, 1.0)
    assert torch.equal(combine([nothing, some]), some[0])
    assert torch.equal(combine([nothing, nothing]), nothing[0])


def test_large_scores_do_not_overflow() -> None:
    q, k, v = (t.float() for t in tensors(2, 2, 3, 4))
    pieces = [attend(q * 100, k[:, :, i : i + 1] * 100, v[:, :, i : i + 1], None, 1.0) for i in range(4)]
    whole, _ = attend(q * 100, k * 100, v, None, 1.0)
    assert torch.allclose(combine(pieces), whole, atol=1e-5)
