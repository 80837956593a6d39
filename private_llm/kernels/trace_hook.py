"""Who watches what a thread computes, and what is told: kernels on addresses, drawn masks, values that leave PyTorch.

Nobody watches as a rule. `private_llm.replay` does, once, to learn a step that is going to be repeated.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor


class TraceHook(ABC):
    """What is told about one thread."""

    def addressed(self, tensors: Sequence[Tensor]) -> None:  # noqa: B027 - who follows nothing
        """The addresses of these tensors are taken, for a kernel."""

    def launched(self, kernel: Callable[..., None], arguments: Sequence[Any]) -> None:  # noqa: B027 - as above
        """This kernel is called next; tensors are addresses among the arguments."""

    def parallel_region(self, work: Callable[[int, int], None], ranges: Sequence[tuple[int, int]]) -> None:
        """Pieces of one operation that may run side by side; compute them here."""
        for first, last in ranges:
            work(first, last)

    def escaped(self, x: Tensor) -> None:  # noqa: B027 - as above
        """The values of this tensor are read by something else than PyTorch and kernels."""

    def encoded(self, values: Tensor, bits: int, make: Callable[[], Tensor]) -> Tensor:
        """What `make` makes of public values: ring elements with `bits` fractional bits."""
        return make()

    def computed(self, call: Callable[..., Any], arguments: Sequence[Any], writes: int) -> Any:  # noqa: ANN401
        """What a kernel of a GPU makes of its arguments, of which the last `writes` are written to; call it here."""
        return call(*arguments)

    @abstractmethod
    def masks_drawn(self, stream: object, out: Tensor) -> None:
        """These were the next bytes of a stream."""


class _Thread(threading.local):
    hook: TraceHook | None = None


this_thread = _Thread()  # its `hook` is told of what the thread that asks computes, or None


@contextmanager
def traced_by(each: TraceHook | None) -> Iterator[None]:
    """Tell `each`, or nobody, what this thread does inside."""
    before, this_thread.hook = this_thread.hook, each
    try:
        yield
    finally:
        this_thread.hook = before


def as_array(x: Tensor) -> np.ndarray[Any, Any]:
    """A tensor's values for NumPy, in the same memory if they are in main memory and contiguous."""
    hook = this_thread.hook
    if hook is not None:
        hook.escaped(x)
    made: np.ndarray[Any, Any] = x.cpu().contiguous().numpy()
    return made
