"""Recorded operations in few launches: the same values, and how many launches a decoded token takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from private_llm_hf import patch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from private_llm.config import PrivateConfig
from private_llm.kernels import pointwise
from private_llm.replay.events import GraphNode, Slot, tensors_of
from private_llm.replay.fusion import fused
from private_llm.replay.layouts import compute
from private_llm.replay.program_cache import ProgramCache
from private_llm.replay.recording import all_written_by
from private_llm.ring.prg import Seed
from tests.replay.test_graphs import _as_on_a_gpu, met, small_llama  # noqa: F401 - fixtures

CPU = torch.device("cpu")
MOST_LAUNCHES = 340
"""Of one party for a decoder layer of a decoded token."""


class Nodes(TorchDispatchMode):
    """Operations as nodes; tensors of before are slots that come from outside."""

    def __init__(self, outside: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[GraphNode] = []
        self.tensors = list(outside)
        self.slots = {id(x): Slot(n) for n, x in enumerate(outside)}

    def slot(self, x: Tensor) -> Slot:
        if id(x) not in self.slots:
            self.slots[id(x)] = Slot(len(self.tensors))
            self.tensors.append(x)
        return self.slots[id(x)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))

        def named(each: Any) -> Any:
            if isinstance(each, list | tuple):
                return type(each)(map(named, each))
            return self.slots.get(id(each), each) if isinstance(each, Tensor) else each

        written = all_written_by(func, args, kwargs or {})
        results = list(tensors_of([made]))
        memories = {x.untyped_storage().data_ptr() for x in tensors_of([*args])}
        view = not written and all(x.untyped_storage().data_ptr() in memories for x in results)
        used = named(tuple(args)), {key: named(each) for key, each in (kwargs or {}).items()}
        slots = tuple(map(self.slot, results))
        self.made.append(GraphNode(func, *used, slots, not view, tuple(map(self.slot, written))))
        return made


def elements(rows: int) -> Tensor:
    return Seed(bytes(32)).stream("fusion").words(rows * 6).view(rows, 6)


INDEX = torch.tensor([0, 1])
STEPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x + y, lambda x, y: x - y[:1], lambda x, y: (x * y) >> 7, lambda x, y: x ^ y.flip(0),
    lambda x, y: torch.where(x > 3, x, y), lambda x, y: -x, lambda x, y: torch.cat([x[:, 3:], y[:, :3]], 1),
    lambda x, y: torch.stack([x, y])[1], lambda x, y: torch.nn.functional.pad(x, (1, 2))[:, 2:8],
    lambda x, y: x.add_(y), lambda x, y: x[1:].mul_(3).new_zeros(x.shape) + x, lambda x, y: y.copy_(x) & 255,
    lambda x, y: x.t().contiguous().t() | y, lambda x, y: x.repeat(2, 1)[1 : 1 + len(x)], lambda x, y: x << 2,
    lambda x, y: x.index_add_(0, INDEX, y[:2].clone()), lambda x, y: (x == y).to(torch.int64) - 1,
    lambda x, y: x.reshape(-1).view(3, -1).clone().view(x.shape), lambda x, y: 5 - x, lambda x, y: y.cumsum(0),
    lambda x, y: torch.add(x.to(torch.int32), 2**31 - 1, out=torch.empty(x.shape, dtype=torch.int64)),
    lambda x, y: (x.clone(), x.add_(1))[0].clone(),
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9)), max_size=14))
@example([(20, 0, 1), (21, 0, 1)])  # computed in a narrower type than the result's; what was there before a change
def test_the_same_values_in_no_more_launches(chosen: list[tuple[int, int, int]]) -> None:
    """Any operations, views and changes in place, one after the other."""
    outside = [elements(3), elements(3) * 5]
    before = [x.clone() for x in outside]
    nodes, values = Nodes(outside), list(outside)
    with nodes:
        for step, left, right in chosen:
            values.append(STEPS[step](values[left % len(values)], values[right % len(values)]))
    found = {slot: x for x, slot in zip(nodes.tensors, map(Slot, range(len(nodes.tensors))), strict=True)}
    needed = {nodes.slot(x) for x in values}
    made = fused(nodes.made, found, needed - {Slot(0), Slot(1)}, (), CPU)
    assert sum(node.computes for node in made) <= sum(node.computes for node in nodes.made)
    again = {Slot(n): x.clone() for n, x in enumerate(before)}
    for node in made:
        compute(node, again)
    for slot in needed | {Slot(0), Slot(1)}:
        assert torch.equal(again[slot], found[slot])


def test_what_follows_in_registers_is_one_launch_without_memory() -> None:
    x, y = elements(4), elements(4) + 1
    nodes = Nodes([x, y])
    with nodes:
        out = torch.cat([((x + y) * 3 - y) >> 2, x ^ y])
    found = {Slot(n): each for n, each in enumerate(nodes.tensors)}
    launched = [node for node in fused(nodes.made, found, {nodes.slot(out)}, (), CPU) if node.computes]
    assert len(launched) == 1
    assert launched[0].function.func is pointwise.launch  # type: ignore[attr-defined]
    assert len(launched[0].arguments) == 3, "two operands and the result"


def launches(programs: ProgramCache) -> list[int]:
    """Of each program."""
    found = [region.compiled.program for region in programs._regions.values() if region.compiled is not None]
    return [sum(node.computes for part in each.segments for node in part.nodes) for each in found]  # type: ignore[union-attr]


def test_launches_of_a_decoder_layer(met: list[ProgramCache]) -> None:  # noqa: F811
    """With its attention: the layer is the longest program of a party, attention the next."""
    ids = torch.arange(1, 12)[None]
    with torch.no_grad(), patch(small_llama(), PrivateConfig(calibrate=False)) as private:
        made = private(ids[:, :3], use_cache=True)
        for at in range(3, 10):
            made = private(ids[:, at : at + 1], past_key_values=made.past_key_values, use_cache=True)
    counts = [sum(sorted(launches(each))[-2:]) for each in met]
    assert len(counts) == 3
    assert all(100 < each <= MOST_LAUNCHES for each in counts), counts
