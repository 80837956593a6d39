"""Arrays over tensors' memory inside Numba kernels.

A small operation spends most of its time on turning tensors into NumPy arrays (1 to 4 µs each, against 5 µs for the
truncation of 768 elements). Kernels with many operands take addresses instead; `addresses` is the only
place where a tensor becomes one, and it refuses what a flat array would misread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels.compiling import compiled
from private_llm.kernels.trace_hook import this_thread


def addresses(*tensors: Tensor) -> list[int]:
    """Addresses of contiguous CPU tensors; the caller keeps the tensors alive during the kernel.

    Raises UnsupportedOp for a tensor elsewhere, DomainError for one that is not contiguous. Sizes are not looked at.
    """
    hook = this_thread.hook
    if hook is not None:
        hook.addressed(tensors)
    found = []
    for t in tensors:
        if not t.is_cpu:
            raise UnsupportedOp(f"an operand is on {t.device}, another on the CPU; want all on one device")
        if not t.is_contiguous():
            shape = tuple(t.shape)
            raise DomainError(f"a kernel's operand of shape {shape} is not contiguous; call .contiguous() first")
        found.append(t.data_ptr())
    return found


@intrinsic
def flat(typing_context, address, count, zero):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Array [count] of the type of `zero` over the memory at `address`."""
    array = types.Array(zero, 1, "C")
    signature = array(address, count, zero)

    def codegen(context: Any, builder: Any, _: Any, arguments: Any) -> Any:  # noqa: ANN401
        place, length, _ = arguments
        made = make_array(array)(context, builder)
        size = context.get_constant(types.intp, zero.bitwidth // 8)
        pointer = builder.inttoptr(place, made.data.type)
        populate_array(made, pointer, [length], [size], size, meminfo=None)
        return made._getvalue()

    return signature, codegen


WORD = np.uint64(0)
"""The `zero` of words."""


@compiled
def table(address: int, rows: int, words: int) -> np.ndarray[Any, Any]:
    """Array [rows, words] of 64-bit words."""
    made: np.ndarray[Any, Any] = flat(address, rows * words, WORD).reshape(rows, words)
    return made
