"""A recorded GPU step for a module like the one that it was recorded with: the same operations on other weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from private_llm.kernels.seeded_tensor import SeededTensor, StreamKey
from private_llm.replay.events import GraphNode, Slot, mapped
from private_llm.replay.layouts import compute, storage_of

Memories = tuple[torch.UntypedStorage | StreamKey, ...]  # where weights lie, or the keys of masks that are made


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
