"""Few launches: the elementwise operations of a recorded step become as few kernels as their order allows.

Each of them is taken apart into statements: so many elements of a view, each computed of the same element of other
views. A launch is a batch of groups; a group is statements of equally many elements, of which later ones take what
earlier ones computed out of registers. What needs an element that another thread computes waits for a later launch.
Kernels stay what they are; whichever can run does so first, so that batches are large.

What is only read within its group is never stored. Memory is told apart by the storages of a run on real tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from private_llm.kernels import pointwise
from private_llm.kernels.pointwise import Operation, Place, Value, launch
from private_llm.kernels.seeded_tensor import SeededTensor
from private_llm.replay.events import GraphNode, Slot, TorchCall, leaves, slots_of
from private_llm.replay.layouts import storage_of, view_at
from private_llm.replay.statements import Name, Statement, View, statements_of, tensor_of


@dataclass(eq=False)
class _Unit:
    """A node, or one statement of it. waits: units launched before; joins: those of its own group or before."""

    node: GraphNode
    statement: Statement | None
    order: int
    waits: set[int] = field(default_factory=set)
    joins: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Touch:
    """Memory that a unit reads or writes: bytes from low to high of a storage; key: exactly which, in which order."""

    unit: int
    storage: int
    low: int
    high: int
    key: object
    count: int

    def same(self, other: _Touch) -> bool:
        """Whether each thread of one touches what the same thread of the other does."""
        return self.key is not None and self.key == other.key and self.count == other.count


def fused(
    nodes: Sequence[GraphNode], found: Mapping[Slot, Tensor], needed: Collection[Slot], fixed: Collection[Slot],
    device: torch.device,
) -> list[GraphNode]:  # fmt: skip
    """The same nodes in fewer launches.

    found: for each slot how its tensor lies (`Layouts`). needed: slots that are read afterwards. fixed: those that have
    memory from the beginning. device: where they will run.
    """
    units = _units(nodes, found)
    _link(units, found)
    return _Emission(nodes, found, needed, fixed, device).of(_scheduled(units))


def compile_launches(nodes: Sequence[GraphNode], found: Mapping[Slot, Tensor], device: torch.device) -> None:
    """Compile the kernels of all launches among these nodes."""
    pointwise.compile_all([
        (node.function.args[0], [_stand_in(tensor_of(x, found), device) for x in node.arguments])
        for node in nodes
        if isinstance(node.function, partial) and node.function.func is launch
    ])  # fmt: skip


def _stand_in(x: Tensor, device: torch.device) -> Tensor:
    """For a kernel that is compiled: a tensor of this type whose address has the same remainder by 16."""
    return torch.empty(16, dtype=x.dtype, device=device)[int(x.storage_offset()) % (16 // x.itemsize) :]


def _units(nodes: Sequence[GraphNode], found: Mapping[Slot, Tensor]) -> list[_Unit]:
    units: list[_Unit] = []
    for node in nodes:
        if not node.computes:
            continue
        statements: Sequence[Statement | None] = statements_of(node, found) or [None]
        for statement in statements:
            units.append(_Unit(node, statement, len(units)))
    return units


def _link(units: Sequence[_Unit], found: Mapping[Slot, Tensor]) -> None:
    readers: defaultdict[int, list[_Touch]] = defaultdict(list)
    writers: defaultdict[int, list[_Touch]] = defaultdict(list)
    for unit in units:
        reads, writes = _touched(unit, found)
        for each in reads:
            for other in writers[each.storage]:
                _order(unit, other, each)
        for each in writes:
            for other in writers[each.storage]:
                if units[other.unit].node is not unit.node:
                    _order(unit, other, each)
            for other in readers[each.storage]:  # joined only by who reads the same, so that it waits for its own load
                _order(unit, other, each, any(other.same(read) for read in reads))
        for each in reads:
            readers[each.storage].append(each)
        for each in writes:
            covered = [other for other in writers[each.storage] if not (each.same(other))]
            writers[each.storage] = [*covered, each]


def _order(unit: _Unit, other: _Touch, mine: _Touch, joins: bool = True) -> None:
    overlap = mine.storage == other.storage and mine.low <= other.high and other.low <= mine.high
    if other.unit != unit.order and overlap:
        (unit.joins if joins and mine.same(other) else unit.waits).add(other.unit)


def _touched(unit: _Unit, found: Mapping[Slot, Tensor]) -> tuple[list[_Touch], list[_Touch]]:
    if (made := unit.statement) is not None:

        def touch(view: View) -> _Touch:
            x, key = tensor_of(view.name, found), _key(view, found)
            return _touch(unit.order, x, view.offset, view.dims, key, made.count)

        return [touch(view) for view in made.views], [touch(made.out)]
    node = unit.node
    given = [
        found[name] if isinstance(name, Slot) else name for name in leaves((node.arguments, node.named), Slot, Tensor)
    ]
    read = [x for x in given if not isinstance(x, SeededTensor)]
    written = [found[slot] for slot in (*node.made, *node.written)]

    def whole(x: Tensor) -> _Touch:  # by a kernel, in an order of its own
        return _touch(unit.order, x, 0, zip(x.shape, x.stride(), strict=True), None, -1)

    return [whole(x) for x in read], [whole(x) for x in written]


def _touch(
    unit: int, x: Tensor, offset: int, dims: Iterable[tuple[int, int]], key: object, count: int
) -> _Touch:  # fmt: skip
    first = int(x.storage_offset()) + offset
    last = first + sum((size - 1) * stride for size, stride in dims)
    return _Touch(unit, storage_of(x), first * x.itemsize, (last + 1) * x.itemsize - 1, key, count)


FusedUnits = list[_Unit]


def _scheduled(units: Sequence[_Unit]) -> list[GraphNode | list[FusedUnits]]:
    """Kernels and batches in an order that keeps what waits for what."""
    left, done = list(units), set[int]()
    steps: list[GraphNode | list[FusedUnits]] = []
    while left:
        later = []
        for unit in left:
            if unit.statement is None and (unit.waits | unit.joins) <= done:
                steps.append(unit.node)
                done.add(unit.order)
            else:
                later.append(unit)
        if len(later) < len(left):
            left = later
            continue
        batch: list[_Unit] = []
        chosen = set(done)
        for unit in left:  # statements that may be launched now, together
            if unit.statement is not None and unit.waits <= done and unit.joins <= chosen:
                batch.append(unit)
                chosen.add(unit.order)
        steps.append(_groups(batch))
        done = chosen
        left = [unit for unit in left if unit.order not in done]
    return steps


def _groups(batch: Sequence[_Unit]) -> list[FusedUnits]:
    """Statements that share registers, in their order."""
    group_of: dict[int, FusedUnits] = {}
    for unit in batch:
        joined: FusedUnits = [unit]
        for other in {id(group_of[n]): group_of[n] for n in unit.joins if n in group_of}.values():
            joined = [*other, *joined]
        joined.sort(key=lambda each: each.order)
        for each in joined:
            group_of[each.order] = joined
    return list({id(group): group for group in group_of.values()}.values())


class _Emission:
    """The steps as nodes, each after what it needs: views, and the memory of what batches make."""

    def __init__(
        self, nodes: Sequence[GraphNode], found: Mapping[Slot, Tensor], needed: Collection[Slot],
        fixed: Collection[Slot], device: torch.device,
    ) -> None:  # fmt: skip
        self._found, self._needed, self._fixed, self._device = found, needed, fixed, device
        self._source: dict[Slot, GraphNode] = {}
        for node in nodes:
            inside = set(slots_of((node.arguments, node.named)))
            for slot in node.made:
                if slot not in inside:
                    self._source.setdefault(slot, node)
        self._there: set[Slot] = set(fixed)
        self._made: list[GraphNode] = []

    def of(self, steps: Sequence[GraphNode | list[FusedUnits]]) -> list[GraphNode]:
        drafts = [
            step if isinstance(step, TorchCall) else [_FusedGroup(g, self._found) for g in step] for step in steps
        ]
        kept = self._kept(drafts)
        for step in drafts:
            node = step if isinstance(step, TorchCall) else _launched(step, kept, self._found)
            if node is not None:
                self._demand(slots_of((node.arguments, node.named)))
                self._there.update(node.made)
                self._made.append(node)
        self._demand(self._needed)
        return self._made

    def _kept(self, drafts: Sequence[GraphNode | list[_FusedGroup]]) -> set[int]:
        """Storages that others than the group which writes them read."""
        names = [*self._needed, *self._fixed, *(slot for slot in self._found if slot not in self._source)]
        for step in drafts:
            if isinstance(step, TorchCall):
                names += [*slots_of((step.arguments, step.named)), *step.made]
        kept = {storage_of(self._found[slot]) for slot in names}
        for step in drafts:
            if not isinstance(step, TorchCall):
                kept |= {storage_of(x) for draft in step for x in draft.read}
        return kept

    def _demand(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            node = self._source.get(slot)
            if node is None or slot in self._there:
                continue
            if not node.computes:
                self._demand(slots_of((node.arguments, node.named)))
                self._there.update(node.made)
                self._made.append(node)
            elif statements_of(node, self._found):
                memory = self._memory(slot, node)
                self._demand(slots_of(memory.arguments))
                self._there.add(slot)
                self._made.append(memory)

    def _memory(self, slot: Slot, node: GraphNode) -> GraphNode:
        """Where a batch stores what a node made: memory of its own, or that of an argument."""
        x = self._found[slot]
        for each in slots_of((node.arguments, node.named)):
            if storage_of(self._found[each]) == storage_of(x):
                further = int(x.storage_offset() - self._found[each].storage_offset())
                return GraphNode(view_at, (each, x.shape, x.stride(), further), {}, (slot,), False)
        named = {"dtype": x.dtype, "device": self._device}
        return GraphNode(torch.empty_strided, (tuple(x.shape), x.stride()), named, (slot,), False)


class _FusedGroup:
    """A group as operations on values; read: tensors of which it loads."""

    def __init__(self, group: FusedUnits, found: Mapping[Slot, Tensor]) -> None:
        self.count = group[0].statement.count if group[0].statement else 0
        self.operations: list[tuple[Statement, list[View | Value | int]]] = []
        self.stored: dict[object, tuple[View, int]] = {}
        self.read: list[Tensor] = []
        values: dict[object, int] = {}
        for unit in group:
            if (made := unit.statement) is None:
                continue
            given: list[View | Value | int] = []
            for each in made.arguments:
                key = _key(each, found) if isinstance(each, View) else None
                if key in values:
                    given.append(Value(values[key]))
                    continue
                given.append(each)
                if isinstance(each, View):
                    self.read.append(tensor_of(each.name, found))
            key = _key(made.out, found)
            values[key] = len(self.operations)
            self.stored[key] = made.out, values[key]
            self.operations.append((made, given))


def _launched(drafts: Sequence[_FusedGroup], kept: set[int], found: Mapping[Slot, Tensor]) -> GraphNode | None:
    """The launch of a batch; None if nobody reads what it makes."""
    names: list[Name] = []
    numbers: dict[object, int] = {}

    def place(view: View) -> Place:
        x = tensor_of(view.name, found)
        number = numbers.setdefault((storage_of(x), x.dtype), len(names))
        if number == len(names):
            names.append(view.name)
        offset = int(x.storage_offset() - tensor_of(names[number], found).storage_offset()) + view.offset
        return Place(number, offset, view.dims, x.dtype)

    groups = []
    for draft in drafts:
        stores = [each for each in draft.stored.values() if storage_of(tensor_of(each[0].name, found)) in kept]
        if stores:
            operations = tuple(
                Operation(
                    made.operation, made.dtype, tuple(place(x) if isinstance(x, View) else x for x in given),
                    tensor_of(made.out.name, found).dtype,
                )
                for made, given in draft.operations
            )  # fmt: skip
            groups.append(
                pointwise.PointwiseGroup(draft.count, operations, tuple((place(view), n) for view, n in stores))
            )
    if not groups:
        return None
    return GraphNode(partial(launch, tuple(groups)), tuple(names), {}, ())


def _key(view: View, found: Mapping[Slot, Tensor]) -> object:
    """Equal for views of the same elements in the same order."""
    x = tensor_of(view.name, found)
    return storage_of(x), int(x.storage_offset()) + view.offset, view.dims, x.dtype
