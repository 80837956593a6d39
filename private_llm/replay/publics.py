"""Public tensors that change from call to call, such as rotary angles, and which ring elements are made of them."""

from __future__ import annotations

from torch import Tensor

Encoding = tuple[int, tuple[int, ...], tuple[int, ...], int, int]
"""Number of a public tensor; shape, strides and offset (from its first element) of a view of it; fractional bits."""


class Publics:
    """Those of one recording. made: ring elements of views of them."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.made: dict[Encoding, Tensor] = {}

    def encoding(self, values: Tensor, bits: int) -> Encoding | None:
        """How ring elements of `values` are made; None if they are no view of a public tensor."""
        place = values.untyped_storage().data_ptr()
        for number, each in enumerate(self.tensors):
            if each.untyped_storage().data_ptr() == place and each.dtype == values.dtype:
                offset = int(values.storage_offset() - each.storage_offset())
                return number, tuple(values.shape), values.stride(), offset, bits
        return None

    def all(self) -> list[Tensor]:
        """The tensors, and the ring elements that were made of them."""
        return [*self.tensors, *self.made.values()]

    def clear(self) -> None:
        """Let go of them."""
        self.tensors.clear()
        self.made.clear()
