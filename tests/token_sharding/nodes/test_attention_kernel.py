"""An AttnNode's pass against formulas written out, where PyTorch's kernel takes it and where it cannot."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from private_llm.token_sharding.nodes import facts


def truth(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Row by row, without a kernel and without a maximum."""
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, rows, _ = q.shape
    share = heads // k.shape[1]
    out, lse = torch.zeros(batch, heads, rows, v.shape[-1]).double(), torch.zeros(batch, heads, rows).double()
    for b, h, n in itertools.product(range(batch), range(heads), range(rows)):
        scores = k[b, h // share] @ q[b, h, n] * scale
        if bias is not None:
            scores = scores + bias.expand(batch, heads, -1)[b, h].double()
        weights = scores.exp()
        if allowed is not None:
            weights = weights * allowed.expand(batch, heads, rows, -1)[b, h, n]
        total = weights.sum()
        lse[b, h, n] = total.log()
        out[b, h, n] = weights @ v[b, h // share] / total if total else 0.0
    return out, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("value", "path"), [(16, "kernel"), (12, "products")])
@pytest.mark.parametrize(
    ("heads", "groups", "rows", "keys"), [(4, 4, 5, 9), (6, 2, 1, 33), (2, 1, 7, 1), (4, 2, 3, 70)]
)
@pytest.mark.parametrize("rule", ["all", "some", "by text", "bias", "both"])
def test_every_path_gives_the_formulas(
    dtype: torch.dtype, value: int, path: str, heads: int, groups: int, rows: int, keys: int, rule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    g = torch.Generator().manual_seed(heads * keys)
    # Strided as they come out of a message: [B, n, heads, D] with its middle dimensions exchanged.
    q = torch.randn(2, rows, heads, 16, generator=g, dtype=dtype).transpose(1, 2)
    k = torch.randn(2, keys, groups, 16, generator=g, dtype=dtype).transpose(1, 2)
    v = torch.randn(2, keys, groups, value, generator=g, dtype=dtype).transpose(1, 2)
    allowed, bias = None, None
    if rule in ("some", "both"):
        allowed = torch.rand(rows, keys, generator=g) < 0.5
    if rule == "by text":
        allowed = torch.rand(2, 1, rows, keys, generator=g) < 0.5
    if allowed is not None:
        allowed[..., 0, :] = False
    if rule in ("bias", "both"):
        bias = torch.randn(2 if rule == "both" else 1, heads, keys, generator=g, dtype=dtype)
    taken: list[str] = []
    kernel = facts._in_one_pass

    def noted(*arguments: object) -> tuple[Tensor, Tensor]:
        taken.append("kernel")
        return kernel(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(facts, "_in_one_pass", noted)
    out, lse = facts.attend(q, k, v, allowed, 0.4, None, bias)
    assert taken == (["kernel"] if path == "kernel" else [])
    expected = truth(q, k, v, allowed, 0.4, bias)
    limit = 3e-6 if dtype == torch.float32 else 1e-12
    assert (out.dtype, lse.dtype) == (dtype, dtype)
    assert float((out - expected[0]).abs().max()) < limit
    empty = expected[1].isinf()
    assert bool(empty.any()) is (allowed is not None)
    assert bool((lse[empty] == -torch.inf).all())
    assert bool(((lse - expected[1])[~empty].abs() < limit).all())
