"""Which calls of a party are which of the others, for those that are computed together (`replay.joint`).

A party decides alone whether it has a program. Where one has none, Python computes what is within, too, which the
others never call: such calls have no points.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from private_llm.net.barrier import BarrierEnd, Point
from private_llm.protocols.session import Session
from private_llm.replay.graph_break import GraphBreak
from private_llm.replay.regions import WeightBinding, uses_cuda_graphs, with_break
from private_llm.tensor.fixed import Fixed


class CallPoints:
    """Of one session of one party."""

    def __init__(self) -> None:
        self._met: Counter[Hashable] = Counter()
        self._hidden = False

    def next(self, session: Session, within: bool, inputs: Sequence[Fixed], binding: WeightBinding) -> Point | None:
        """What a call is called at all parties; None for one that only this party makes, or that is no graph. within:
        whether it lies in a graph break.
        """
        if self._hidden or not uses_cuda_graphs(session):
            return None
        what = (binding.name, within, tuple([tuple(x.shape) for x in inputs]))
        self._met[what] += 1
        return what, self._met[what]

    @contextmanager
    def hiding(
        self, graph_break: GraphBreak | None, inside_break: Callable[[], AbstractContextManager[None]]
    ) -> Iterator[None]:
        """Inside, Python computes what others may repeat: calls have no points but in the graph break."""

        @contextmanager
        def shown() -> Iterator[None]:
            self._hidden = before
            with inside_break():
                yield
            self._hidden = True

        before, self._hidden = self._hidden, True
        if graph_break is not None:
            graph_break.outside = shown
        try:
            with with_break(graph_break):
                yield
        finally:
            self._hidden = before


def end_of(session: Session, end: BarrierEnd | None) -> BarrierEnd | None:
    """The barrier's end, unless threads of this process are nodes that are no parties."""
    return None if end is None or end.barrier.parties != session.config.parties else end
