"""Masks of programs of a GPU: whoever makes them, they are the next bytes of their streams."""

from __future__ import annotations

import torch

from private_llm.net.local import LocalMesh
from private_llm.replay.graphs import MaskDraw
from private_llm.replay.layouts import Pool, Rooms
from private_llm.replay.transports import LiveTransport
from private_llm.ring.prg import ChaCha, Prg


class Captured:
    """Stands for a CUDA graph: repeats the launches that were captured, with what lay in memory then."""

    def __init__(self, draw: MaskDraw) -> None:
        self.launches = MaskDraw(Rooms(Pool(), torch.device("cpu")))
        self.launches._rooms, self.launches._streams = draw._rooms, list(draw._streams)
        self.replayed = 0

    def replay(self) -> None:
        self.replayed += 1
        self.launches.launch()


def streams(label: str) -> list[Prg]:
    """Two, near the end of the lower half of a block's number."""
    made = [ChaCha(bytes([number] * 31) + label.encode()[:1]) for number in range(2)]
    for each in made:
        each._block = (1 << 32) - 9
    return list(made)


def test_a_captured_draw_goes_on_by_itself() -> None:
    """Also where other masks were drawn in between; another session's streams have another graph."""
    draw, transport = MaskDraw(Rooms(Pool(), torch.device("cpu"))), LocalMesh(2).transport(0)
    like = [torch.zeros(3, 5, dtype=torch.int64), torch.zeros(17, dtype=torch.int32)]
    views = [list(draw.add(number, 64, like[number:])) for number in range(2)]
    graphs: list[Captured] = []
    for label in ("one", "other", "in main memory"):
        mine, same = streams(label), streams(label)
        live = LiveTransport(transport, mine)
        if label == "in main memory":
            live.stream = lambda number: None  # type: ignore[assignment, method-assign, return-value]
        for number in range(4):
            draw.draw(live)
            for stream, made in zip(same, views, strict=True):
                want = [stream.draw(x.numel(), x.dtype, "cpu").view(x.shape) for x in made]
                assert all(map(torch.equal, made, want)), (label, number)
            if label != "in main memory" and not number:
                assert draw._graph is None
                graphs.append(Captured(draw))
                draw._graph = graphs[-1]  # type: ignore[assignment]
            if number == 2:
                assert all(torch.equal(a.words(3), b.words(3)) for a, b in zip(mine, same, strict=True))
    assert [graph.replayed for graph in graphs] == [3, 3]
