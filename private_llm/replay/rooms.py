"""The memory of a GPU's programs: of which none runs within another, those use the same again."""

import functools
from typing import Any

import torch
from torch import Tensor

_LINE = 512  # bytes to whose multiples tensors are laid, as PyTorch's allocator does


def part_of(device: torch.device, part: int, least: int) -> int:
    """A `part` of what is free of a GPU's memory, in bytes, and no less than `least`, which it is elsewhere."""
    if device.type != "cuda":
        return least
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = int(torch.cuda.mem_get_info(device)[0]) + held
    at_first = _FREE.setdefault(device, free)  # alike for all parties, as long as memory is not short
    return max(least, min(at_first // part, free // 2))


_FREE: dict[torch.device, int] = {}  # bytes when a part of it was first asked for


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
