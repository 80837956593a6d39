"""The Triton attention pass (interpreter without a GPU) against the torch path: odd sizes, masks, empty rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from private_llm.token_sharding.nodes import facts

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Sums of at most 70 float32 products of magnitude about 1, in another order: below 70 units of 2^-24 times a few.
ERROR = 2e-5


def rows(batch: int, heads: int, groups: int, n: int, s: int, d: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(n * s + d)
    return (
        torch.randn(batch, heads, n, d, generator=g),
        torch.randn(batch, groups, s, d, generator=g),
        torch.randn(batch, groups, s, e, generator=g),
    )


def check(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, softcap: float | None = None, error: float = ERROR
) -> None:
    from private_llm.kernels.attention import attend

    expected = facts.attend(q, k, v, allowed, 0.3, softcap)
    mask = None if allowed is None else allowed.to(DEVICE)
    found = attend(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), mask, 0.3, softcap)
    assert float((found[0].cpu() - expected[0]).abs().max()) < error
    finite = ~expected[1].isinf()
    assert torch.equal(found[1].cpu().isinf(), ~finite)
    assert float((found[1].cpu() - expected[1])[finite].abs().max()) < error


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("n", "s", "d", "e"), [(1, 1, 8, 8), (37, 70, 20, 24), (33, 5, 64, 64)])
def test_without_a_mask(heads: int, groups: int, n: int, s: int, d: int, e: int) -> None:
    check(*rows(2, heads, groups, n, s, d, e), None)


def test_causal_with_softcap() -> None:
    check(*rows(2, 4, 2, 35, 35, 16, 16), torch.ones(35, 35, dtype=torch.bool).tril(), softcap=2.0)


def test_padding_by_text_and_rows_that_see_nothing() -> None:
    allowed = torch.ones(2, 1, 9, 40, dtype=torch.bool)
    allowed[1, :, :, 20:] = False
    allowed[0, :, 3] = False
    check(*rows(2, 2, 1, 9, 40, 16, 16), allowed)


def test_large_scores() -> None:
    """Scores of some thousands are known to 2^-11, and so are logarithms and weights near a tie."""
    q, k, v = rows(1, 2, 2, 6, 40, 16, 16)
    check(q * 30, k * 30, v, None, error=4 * 2.0**-11)
