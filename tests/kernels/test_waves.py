"""The kernels of sums of waves compute what PyTorch's operations compute, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from private_llm.approx.bump import WaveSum, waves_of
from private_llm.approx.tables import GELU_ERF, SILU
from private_llm.kernels import waves
from private_llm.kernels.ops import packed_words
from private_llm.protocols.one_step import Waves, turns
from private_llm.ring.ring import RING64
from tests.kernels import reference
from tests.kernels.cases import Draw

SIZES = [1, 63, 511, 512, 513, 1600]


def operands(count: int, plan: Waves) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Elements, other elements, shares of secrets, and shares of wraps: extremes of the ring first."""
    draw = Draw(f"waves {count}")
    words = packed_words(count, 64 - plan.narrow)
    return draw.ring(RING64, count), draw.ring(RING64, count), draw.words(plan.words(count)), draw.words(2 * words)


@pytest.mark.parametrize("made", [SILU.waves, GELU_ERF.waves], ids=["silu", "gelu"])
@pytest.mark.parametrize("frac", [10, 18, 20])
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("threads", [1, 3])
def test_kernels_and_operations_agree(
    count: int, frac: int, made: WaveSum, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("private_llm.kernels.parallel.threads", lambda seconds: threads)
    monkeypatch.setattr("private_llm.kernels.parallel._SMALL_S", 0.0)
    plan = waves_of(made, frac)
    x, y, secrets, rest = operands(count, plan)
    table = turns()
    message = waves.hidden(x, secrets, plan, table)
    assert torch.equal(message, waves.hidden_by_operations(x, secrets, plan, table))
    assert not torch.equal(message, secrets)
    for first in (True, False):
        piece = waves.summed(x, secrets, plan, table, first)
        assert torch.equal(piece, waves.summed_by_operations(x, secrets, plan, table, plan.first if first else 0))
        total = x.clone()
        waves.widened(x, y, rest, plan, first, total)
        assert torch.equal(x - total, reference.widened(x, y, rest, plan, first))
    assert torch.equal(waves.wraps(x, y, rest, plan), reference.wraps(x, y, rest, plan))


@pytest.mark.parametrize("count", SIZES)
def test_kernels_of_gpus_agree(count: int) -> None:
    kernels = pytest.importorskip("private_llm.kernels.fields.triton")
    plan = waves_of(SILU.waves, 18)
    x, y, _, rest = operands(count, plan)
    message, sizes = torch.zeros_like(rest), (plan.shift, plan.narrow, (1 << plan.narrow) - 1)
    kernels.wraps(x, y, *rest.view(2, -1), *sizes, plan.above, *message.view(2, -1))
    assert torch.equal(message, reference.wraps(x, y, rest, plan))
    for first in (True, False):
        total = x.clone()
        kernels.widened(x, y, *rest.view(2, -1), *sizes, first, plan.above, total)
        assert torch.equal(x - total, reference.widened(x, y, rest, plan, first))


def test_nothing() -> None:
    plan = waves_of(SILU.waves, 18)
    none = torch.empty(0, dtype=torch.int64)
    assert waves.hidden(none, none, plan, turns()).shape == (0,)
    assert waves.summed(none, none, plan, turns(), True).shape == (0,)
    assert waves.wraps(none, none, none, plan).shape == (0,)


def test_meta_tensors_get_shapes() -> None:
    plan = waves_of(SILU.waves, 18)
    x, y, secrets, rest = (each.to("meta") for each in operands(100, plan))
    assert waves.hidden(x, secrets, plan, turns()).shape == secrets.shape
    assert waves.summed(x, secrets, plan, turns(), True).shape == x.shape
    assert waves.wraps(x, y, rest, plan).shape == rest.shape
    waves.widened(x, y, rest, plan, True, x)
