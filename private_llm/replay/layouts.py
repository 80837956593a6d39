"""How the tensors of a recorded GPU step lie in memory, found out by a run that holds no more of it than the step."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from private_llm.kernels.seeded_tensor import SeededTensor
from private_llm.replay.events import GraphNode, Slot, mapped, tensors_of


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
