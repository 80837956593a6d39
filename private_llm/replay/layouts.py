"""How the tensors of a recorded GPU step lie in memory: found out by a run that holds no more of it than the step; in
rooms, which all programs of which none runs within another use again; and for a module that is alike, at other weights.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from private_llm.kernels.seeded_tensor import SeededTensor, StreamKey
from private_llm.replay.events import GraphNode, Slot, mapped, tensors_of

_LINE = 512  # bytes to whose multiples tensors are laid, as PyTorch's allocator does
_FREE: dict[torch.device, int] = {}  # bytes when a part of it was first asked for
Memories = tuple[torch.UntypedStorage | StreamKey, ...]  # where weights lie, or the keys of masks that are made


def compute(node: GraphNode, found: dict[Slot, Tensor]) -> None:
    """Run a node, and note what it makes."""
    arguments, named = mapped((node.arguments, node.named), Slot, found.__getitem__)
    made = node.function(*arguments, **named)
    results = made if isinstance(made, list | tuple) else (made,)
    for slot, x in zip(node.made, results if node.made else (), strict=True):
        found[slot] = x


def storage_of(x: Tensor) -> int:
    """Its number, as long as it lives."""
    return int(x.untyped_storage()._cdata)


def view_at(x: Tensor, shape: Sequence[int], strides: Sequence[int], further: int) -> Tensor:
    """Elements of x's memory that begin so many after its first one."""
    return x.as_strided(shape, strides, int(x.storage_offset()) + further)


class Layouts:
    """Tensors without memory, by slot: of those two share a storage if those of the run did while both were alive."""

    def __init__(self, fixed: Mapping[Slot, Tensor]) -> None:
        self.found: dict[Slot, Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        for slot, x in fixed.items():
            self.add(slot, x)

    def add(self, slot: Slot, x: Tensor) -> None:
        """A tensor of the run."""
        if isinstance(x, SeededTensor):
            self.found[slot] = x
            return
        number = storage_of(x)
        if number not in self._storages:
            room = torch.empty(x.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
            self._storages[number] = room.untyped_storage()
        bare = torch.empty(0, dtype=x.dtype, device="meta")
        self.found[slot] = bare.set_(self._storages[number], x.storage_offset(), x.shape, x.stride())

    def end(self, left: Iterable[Tensor]) -> None:
        """The run is over, and its memory gone but for these."""
        numbers = {storage_of(x) for x in left}
        self._storages = {number: x for number, x in self._storages.items() if number in numbers}

    def run(self, steps: Sequence[tuple[GraphNode, Sequence[Slot]]], there: dict[Slot, Tensor]) -> None:
        """Compute nodes on the tensors that are there, and after each forget the slots that no later one needs."""
        for node, dropped in steps:
            arguments = mapped((node.arguments, node.named), Slot, there.__getitem__)
            given = {storage_of(x) for x in tensors_of(arguments) if not isinstance(x, SeededTensor)}
            compute(node, there)
            made = {storage_of(there[slot]) for slot in node.made if not isinstance(there[slot], SeededTensor)}
            for number in made - given:  # it may have been that of memory which is gone
                self._storages.pop(number, None)
            for slot in node.made:
                self.add(slot, there[slot])
            del arguments
            for slot in dropped:
                there.pop(slot, None)


def part_of(device: torch.device, part: int, least: int) -> int:
    """A `part` of what is free of a GPU's memory, in bytes, and no less than `least`, which it is elsewhere."""
    if device.type != "cuda":
        return least
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = int(torch.cuda.mem_get_info(device)[0]) + held
    at_first = _FREE.setdefault(device, free)  # alike for all parties, as long as memory is not short
    return max(least, min(at_first // part, free // 2))


class Pool:
    """The memory that several programs share: of their graphs, and of what comes in and goes out."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []
        self.first: torch.cuda.CUDAGraph | None = None  # lives as long: PyTorch takes no pool whose graphs are all gone
        self._streams: dict[int, torch.cuda.Stream] = {}

    @functools.cached_property
    def handle(self) -> Any:  # noqa: ANN401 - PyTorch's
        """As a capture takes it."""
        return torch.cuda.graph_pool_handle()

    def stream(self, device: torch.device, number: int = 0) -> torch.cuda.Stream:
        """The same for each capture, because memory that is free is so for one stream only."""
        if number not in self._streams:
            self._streams[number] = torch.cuda.Stream(device)
        return self._streams[number]


class Rooms:
    """Memory of one program for what comes in and goes out, one tensor after the other: that of all of its pool."""

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self.pool, self.device = pool, device
        self._used: list[int] = []  # bytes of each block

    def take(self, size: int) -> Tensor:
        """So many zeros, uint8."""
        blocks, used, whole = self.pool.blocks, self._used, -(-size // _LINE) * _LINE
        used += [0] * (len(blocks) - len(used))
        fitting = (n for n, block in enumerate(blocks) if used[n] + whole <= len(block))
        if (number := next(fitting, None)) is None:
            more = max(whole, _LINE, sum(map(len, blocks)) // 2)
            blocks.append(torch.empty(more, dtype=torch.uint8, device=self.device))
            used.append(0)
            number = len(blocks) - 1
        first, used[number] = used[number], used[number] + whole
        return blocks[number][first : first + size].zero_()

    def like(self, x: Tensor) -> Tensor:
        """Zeros, laid out as x."""
        count = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        return self.take(count * x.itemsize).view(x.dtype).as_strided(x.shape, x.stride())


class Rebinding:
    """Of constants: views of one module's weights, and what was computed of them, become those of another module."""

    def __init__(self, old: Memories, new: Memories) -> None:
        """The memories of both in the same order."""
        pairs = list(zip(old, new, strict=True))
        self._keys = {x: y for x, y in pairs if isinstance(x, StreamKey) and isinstance(y, StreamKey)}
        self._storages = {
            int(x._cdata): y
            for x, y in pairs
            if isinstance(x, torch.UntypedStorage) and isinstance(y, torch.UntypedStorage)
        }
        self._made: dict[int, Tensor] = {}

    def derive(self, nodes: Sequence[GraphNode], constants: Mapping[Slot, Tensor]) -> dict[Slot, Tensor]:
        """Compute what the step takes as constants, of the other weights; nodes: which made them."""
        found: dict[Slot, Tensor] = {}
        for node in nodes:
            compute(self.node(node), found)
        self._made = {id(x): found[slot] for slot, x in constants.items()}
        return {slot: found[slot] for slot in constants}

    def node(self, node: GraphNode) -> GraphNode:
        """The same operation."""
        arguments, named = mapped((node.arguments, node.named), Tensor, self.tensor)
        return replace(node, arguments=arguments, named=named)

    def tensor(self, x: Tensor) -> Tensor:
        """A constant of the step."""
        if id(x) in self._made:
            return self._made[id(x)]
        if isinstance(x, SeededTensor):
            return x.with_lines([replace(piece, key=self._keys.get(piece.key, piece.key)) for piece in x.slices])
        memory = self._storages.get(storage_of(x))
        if memory is None:
            return x
        empty = torch.empty(0, dtype=x.dtype, device=x.device)
        return empty.set_(memory, x.storage_offset(), x.shape, x.stride())
