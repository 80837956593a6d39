"""Programs of a GPU, without one: the same recorder and program, whose segments run node by node in main memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.kernels import exponential, ops, waves
from private_llm.kernels.library import SCHEMAS
from private_llm.kernels.watching import this_thread, watched_by
from private_llm.net.transport import Transport
from private_llm.replay import units
from private_llm.replay.graph_recorder import GraphRecorder
from private_llm.ring.prg import Prg
from private_llm.tensor import range_check
from tests.replay import test_middles, test_programs
from tests.replay.test_programs import CALLS, FUNCTIONS, run, some

WRITES = {"trunc_helper": 0, "trunc_open": 0, "trunc_close": 0}
"""Of kernels whose results are new tensors; others change their last argument if it is called `out`."""


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are told to who watches as those of a GPU are, and everything is recorded as graphs."""

    def announced(function: Callable[..., Any], writes: int) -> Callable[..., Any]:
        def alone(*arguments: Any) -> Any:
            with watched_by(None):
                return function(*arguments)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            watching = this_thread.watcher
            return function(*arguments) if watching is None else watching.computed(alone, arguments, writes)

        return call

    for schema in SCHEMAS:
        name = schema.split("(", 1)[0]
        monkeypatch.setattr(ops, name, announced(getattr(ops, name), int("Tensor(a!) out" in schema)))
    monkeypatch.setattr(range_check, "ring_matmul", ops.ring_matmul)

    def weighed(masked: Tensor, keep: Tensor, shares: Tensor, digits: Any, factors: Any) -> Tensor:
        piece = torch.empty_like(masked)
        exponential.weighed_by_operations(masked, keep, shares, digits, factors, piece)
        return piece

    monkeypatch.setattr(exponential, "weighed", weighed)
    monkeypatch.setattr(exponential, "placed", exponential.placed_by_operations)
    monkeypatch.setattr(waves, "hidden", waves.hidden_by_operations)
    monkeypatch.setattr(waves, "wraps", waves.wraps_by_operations)
    monkeypatch.setattr(
        waves, "summed",
        lambda masked, shares, plan, turns, first: waves.summed_by_operations(
            masked, shares, plan, turns, plan.first if first else 0
        ),
    )  # fmt: skip
    monkeypatch.setattr(waves, "widened", lambda *given: given[-1].sub_(waves.widened_by_operations(*given[:-1])))

    monkeypatch.setattr(units, "captures", lambda session: True)


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_repeated(name: str, protocol: str) -> None:
    inputs = some(1)
    config = PrivateConfig.from_dict({"protocol": protocol})
    made, held, ledgers = run(config, FUNCTIONS[name], inputs)
    for got, given in zip(made, inputs, strict=True):
        assert torch.allclose(got, FUNCTIONS[name](given).double(), atol=2e-3)  # type: ignore[arg-type]
    want = {"plain": 1, "recorded": 1, "checked": 1, "repeated": CALLS - 3}
    print([dict(each.refused) for each in held.values()])
    assert [dict(held[party].counts) for party in range(3)] == [want] * 3
    plain = run(PrivateConfig.from_dict({"protocol": protocol, "replay": False}), FUNCTIONS[name], inputs)
    assert ledgers == plain[2], "the same bytes, rounds and multiply-adds under the same names"


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_a_middle_that_differs_from_call_to_call(protocol: str) -> None:
    test_middles.test_a_middle_that_differs_from_call_to_call(protocol)


def test_masks_never_repeat() -> None:
    test_programs.test_masks_never_repeat()
