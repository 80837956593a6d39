"""A region with a graph_break: in its midst it leaves something to Python, whose program is another one.

A decoder layer is the same at every step but for its attention, which depends on the length of the cache and writes to
it. So the layer's program stops there, Python appends and attends (by a program of that length), and it goes on.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from private_llm.tensor.fixed import Fixed


class GraphBreak(ABC):
    """One call's graph break. `ProgramCache.run` sets what surrounds it; without that, Python computes as always.

    What is set never refers back to this object, which holds a layer's weights and a cache: they must go with their
    session, and Python would free a circle much later.

    publics: public tensors that change. reason: why this region stays as it is. met: whether its graph break was run.
    """

    def __init__(self, publics: Sequence[Tensor]) -> None:
        self.publics = tuple(publics)
        self.reason: str | None = None
        self.reached = False
        self.unhook()

    def unhook(self) -> None:
        """Nobody surrounds this graph_break: not yet, or not any more."""
        self.outside: Callable[[], AbstractContextManager[None]] = nullcontext
        """What is computed inside is no part of the region."""
        self.enter: Callable[[], str | None] = lambda: None
        """Why this region must stay as it is, of what only whoever surrounds the graph break knows."""
        self.exit: Callable[[Sequence[Fixed], Fixed], Fixed] = lambda values, made: made
        """Told of the values that the graph break took and what it made; what the region goes on with."""

    @abstractmethod
    def recompute(self, values: Sequence[Fixed]) -> Fixed:
        """What Python computes when the rest is a program, of the values that the region makes for it."""

    def refuse(self, reason: str) -> None:
        """This region does something that no program with a graph break could."""
        self.reason = self.reason or reason

    def run(self, values: Sequence[Fixed], compute: Callable[[], Fixed]) -> Fixed:
        """The graph break, with the values that it takes from the region."""
        if self.reached:
            self.refuse("two graph breaks")
        if self.reason is not None:
            return compute()
        self.reached = True
        try:
            self.reason = self.enter()
        except Exception as error:  # noqa: BLE001 - who watches a graph break never ends it
            self.refuse(f"its begin: {error}")
        with self.outside():
            made = compute()
        try:
            return self.exit(values, made)
        except Exception as error:  # noqa: BLE001 - as above
            self.refuse(f"its end: {error}")
            return made


class _CallState(threading.local):
    graph_break: GraphBreak | None = None


this_call = _CallState()  # its `graph_break` is that of the region which this thread computes in Python, or None


@contextmanager
def with_break(graph_break: GraphBreak | None) -> Iterator[None]:
    """Inside, what is called may meet this graph break."""
    before, this_call.graph_break = this_call.graph_break, graph_break
    try:
        yield
    finally:
        this_call.graph_break = before
