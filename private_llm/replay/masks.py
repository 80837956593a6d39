"""Masks of a program of a GPU: a ChaCha20 stream is made there, any other in main memory and copied.

A captured draw reads the number of its first block from a counter on the GPU and moves it on, so each replay makes the
next masks. Python counts along (`ChaCha.advance`) and sets the counter where something else was drawn in between. The
launches are a graph of their own, not part of the segment that needs the masks: a program that is checked takes masks
that were written down, and one call costs a tenth of what two launches a stream cost from Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.kernels.devices import ALONE
from private_llm.replay.capture import Pool, captured
from private_llm.replay.program import ProgramTransport
from private_llm.ring.prg import ChaCha


class MaskDraw:
    """What a program draws at once: at its beginning, or after a graph break."""

    def __init__(self, device: torch.device, pool: Pool) -> None:
        self._device, self._pool = device, pool
        self._rooms: dict[int, Tensor] = {}  # by stream
        self._streams: list[ChaCha] = []  # whose keys and counters the launches read
        self._graph: torch.cuda.CUDAGraph | None = None

    def add(self, stream: int, block: int, like: Sequence[Tensor]) -> Iterator[Tensor]:
        """Room for masks of a stream, in whole blocks of `block` bytes each: views of one tensor, shaped as given."""
        starts = [0]
        for x in like:
            starts.append(starts[-1] - -x.numel() * x.element_size() // block * block)
        self._rooms[stream] = room = torch.zeros(starts[-1], dtype=torch.uint8, device=self._device)
        for start, x in zip(starts, like, strict=False):
            yield room[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape)

    def draw(self, transport: ProgramTransport) -> None:
        """The next masks of each stream: bytes as Python would draw them."""
        streams = [transport.stream(number) for number in self._rooms]
        here = [each for each in streams if isinstance(each, ChaCha)]
        if len(here) < len(streams):
            self._copy(transport)
            return
        for stream, room in zip(here, self._rooms.values(), strict=True):
            stream.advance(room.numel(), room.device)
        if self._graph is not None and here == self._streams:
            self._graph.replay()
            return
        self._streams, self._graph = here, None
        self.launch()  # compiled and loaded before it is captured
        if self._device.type == "cuda":
            self._capture()

    def launch(self) -> None:
        """Start what makes the masks from the counters on: two launches a stream, which may be captured."""
        for stream, room in zip(self._streams, self._rooms.values(), strict=True):
            stream.write_next(room.view(torch.int32))

    def _capture(self) -> None:
        with ALONE, torch.cuda.stream(torch.cuda.Stream(self._device)), suppress(UnsupportedOp, RuntimeError):
            self._graph = captured(self._pool, self.launch)  # without a graph, Python goes on with the launches

    def _copy(self, transport: ProgramTransport) -> None:
        for number, room in self._rooms.items():
            here = torch.empty(room.numel(), dtype=torch.uint8, pin_memory=room.is_cuda)
            transport.fill(number, here.numpy())
            room.copy_(here, non_blocking=True)  # PyTorch keeps pinned memory until it is copied
