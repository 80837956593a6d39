"""`Guarded`: what all tensors without readable values have in common: every way out is shut.

Functions go through the closed table of `dispatch`; what gets past `__torch_function__` is refused by
`__torch_dispatch__`; pickling, numpy, dlpack and printing of values are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from private_llm.errors import PlaintextLeak
from private_llm.tensor.dispatch import TorchArg, dispatch, op_name


class Guarded(torch.Tensor):
    """A wrapper tensor whose values no code may read; subclasses answer for shape and dtype."""

    __slots__ = ()

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PlaintextLeak("a share never leaves its party through pickle or torch.save; write a share file")

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise PlaintextLeak("numpy: a share is not an array; reveal it to the client on purpose")

    def __dlpack__(self, *_: object, **__: object) -> NoReturn:
        raise PlaintextLeak("dlpack: a share is not exported; reveal it to the client on purpose")

    def __dlpack_device__(self) -> NoReturn:
        raise PlaintextLeak("dlpack: a share is not exported; reveal it to the client on purpose")

    @classmethod
    def __torch_function__(
        cls,
        func: TorchArg,
        types: Sequence[type],
        args: Sequence[TorchArg] = (),
        kwargs: Mapping[str, TorchArg] | None = None,
    ) -> TorchArg:
        """The meaning of every function: the closed table."""
        return dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: TorchArg,
        types: Sequence[type],
        args: Sequence[TorchArg] = (),
        kwargs: Mapping[str, TorchArg] | None = None,
    ) -> TorchArg:
        """What bypassed the table reads or moves values behind its back: refused."""
        raise PlaintextLeak(
            f"{op_name(func)} reached a secret tensor below the table of private rules; "
            "this operation would need its values"
        )
