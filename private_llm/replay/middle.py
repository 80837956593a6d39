"""A unit with a middle: in its midst it leaves something to Python, whose program is another one.

A decoder layer is the same at every step but for its attention, which depends on the length of the cache and writes to
it. So the layer's program stops there, Python appends and attends (by a program of that length), and the program goes
on with what came of it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from private_llm.tensor.fixed import Fixed


class Middle(ABC):
    """One call's middle. `Replays.run` sets what surrounds it; without that, Python computes as always.

    What is set never refers back to this object, which holds a layer's weights and a cache: they must go with their
    session, and Python would free a circle much later.

    publics: public tensors that change from call to call. reason: why this unit must stay as it is. met: whether its
    middle was run.
    """

    def __init__(self, publics: Sequence[Tensor]) -> None:
        self.publics = tuple(publics)
        self.reason: str | None = None
        self.met = False
        self.unwatched()

    def unwatched(self) -> None:
        """Nobody surrounds this middle: not yet, or not any more."""
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext
        """What is computed inside is no part of the unit."""
        self.begins: Callable[[], str | None] = lambda: None
        """Why this unit must stay as it is, of what only whoever surrounds the middle knows."""
        self.ends: Callable[[Sequence[Fixed], Fixed], Fixed] = lambda values, made: made
        """Told of the values that the middle took and what it made; what the unit goes on with."""

    @abstractmethod
    def again(self, values: Sequence[Fixed]) -> Fixed:
        """What Python computes when the rest is a program, of the values that the unit makes for it."""

    def refuse(self, reason: str) -> None:
        """This unit does something that no program with a middle could."""
        self.reason = self.reason or reason

    def run(self, values: Sequence[Fixed], compute: Callable[[], Fixed]) -> Fixed:
        """The middle, with the values that it takes from the unit."""
        if self.met:
            self.refuse("two middles")
        if self.reason is not None:
            return compute()
        self.met = True
        try:
            self.reason = self.begins()
        except Exception as error:  # noqa: BLE001 - who watches a middle never ends it
            self.refuse(f"its begin: {error}")
        with self.aside():
            made = compute()
        try:
            return self.ends(values, made)
        except Exception as error:  # noqa: BLE001 - as above
            self.refuse(f"its end: {error}")
            return made


class _Thread(threading.local):
    middle: Middle | None = None


this_call = _Thread()
"""Its `middle` is that of the unit which this thread computes in Python, or None."""
