"""The kernels of exponentials compute what PyTorch's operations compute, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from private_llm.kernels import waves
from private_llm.protocols.one_step import TOTAL_BITS, Exponential

EDGES = [0, 1, -1, 1 << 62, -(1 << 62), (1 << 63) - 1, -(1 << 63), 15 << 10, 16 << 10, (16 << 10) - 1, 31 << 10]


def words(count: int, seed: int) -> Tensor:
    """Numbers of all sizes, with edges first."""
    high, low = (torch.randint(1 << 32, (count,), generator=torch.Generator().manual_seed(seed + n)) for n in (0, 1))
    made = (high << 32) ^ low
    made[: len(EDGES)] = torch.tensor(EDGES)[:count]
    return made


@pytest.mark.parametrize("frac", [0, 1, 10, 18, 20, 27])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000, (1 << 16) + 3])
@pytest.mark.parametrize("threads", [1, 3])
def test_kernels_and_operations_agree(frac: int, count: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("private_llm.kernels.parallel.threads", lambda seconds: threads)
    monkeypatch.setattr("private_llm.kernels.parallel._SMALL_S", 0.0)
    plan = Exponential(frac, TOTAL_BITS - 18)
    x, keep, shares = words(count, 1), words(-(-count // 64), 3)[None], words(4 * count, 5).view(4, count)
    piece = torch.empty_like(x)
    waves.weighed_by_operations(x, keep, shares, plan.digits, plan.factors, piece)
    assert torch.equal(waves.weighed(x, keep, shares, plan.digits, plan.factors), piece)
    messages = [shares.clone(), shares.clone()]
    waves.placed(x, keep, messages[0], plan.digits, plan.secrets)
    waves.placed_by_operations(x, keep, messages[1], plan.digits, plan.secrets)
    assert torch.equal(*messages)
    assert not torch.equal(messages[0], shares)


def test_nothing() -> None:
    plan = Exponential(18, 20)
    none = torch.empty(0, dtype=torch.int64)
    made = waves.weighed(none, none[None], none.view(4, 0), plan.digits, plan.factors)
    assert made.shape == (0,)
    waves.placed(none, none[None], none.view(4, 0), plan.digits, plan.secrets)
