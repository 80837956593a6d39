"""Linear layers that read the same input as one product: query, key and value; gate and up.

The bytes are those of the separate products, the rounds those of one. Weights are laid one below the other, each
layer's weight stays a view of its rows; or they are read for each product and not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from private_llm.kernels.seeded_tensor import SeededTensor
from private_llm.protocols.session import Session
from private_llm.protocols.share import Share
from private_llm.tensor.secret import SecretTensor

ReadWeights = Callable[[nn.Module], tuple[Tensor, Tensor | None]]  # gives a layer's weight and bias


class SharedProducts:
    """What several layers give for one input: made for all when the first asks, handed out once, and not kept then.

    A piece is good for the very tensor it was made from; a layer that is called with another input, or twice, has
    all made anew, so the result never depends on the order of calls.
    """

    def __init__(self) -> None:
        self._source: tuple[Tensor, object] | None = None
        self._made: list[Tensor | None] = []
        self._left = 0

    def take(self, index: int, x: Tensor, make: Callable[[Tensor], Sequence[Tensor]]) -> Tensor:
        """The piece of layer `index` for input x. make: all layers' pieces for an input."""
        source = self._source
        there = source is not None and source[0] is x and source[1] is content_of(x)
        found = self._made[index] if there else None
        if found is None:
            made = list(make(x))
            self._made, self._source, self._left = [*made], (x, content_of(x)), len(made)
            found = made[index]
        self._made[index] = None
        self._left -= 1
        if not self._left:
            self._source = None
        return found


class SharedInput:
    """Computes all layers of a group when the first is called, and hands the others their piece (`Pieces`)."""

    def __init__(
        self, layers: Sequence[nn.Linear], name: str, session: Session, read: ReadWeights | None = None
    ) -> None:
        """layers: linear layers of one input size K.

        With `read`, which gives a layer's weight and bias, each product reads anew. name: the product's module.
        """
        self.sizes = sizes = [layer.weight.shape[0] for layer in layers]
        self.kept: tuple[Tensor, Tensor | None] | None = None
        """The joined weight and bias, unless each product reads them."""
        if read is None:
            kept = self.kept = joined([(layer.weight, layer.bias) for layer in layers])
            for layer, rows in zip(layers, kept[0].split(sizes), strict=True):
                layer.weight = nn.Parameter(rows, requires_grad=False)

            def weights() -> tuple[Tensor, Tensor | None]:
                return kept

        else:

            def weights() -> tuple[Tensor, Tensor | None]:
                return joined([read(layer) for layer in layers])

        self._pieces = SharedProducts()

        def product(x: Tensor) -> Sequence[Tensor]:
            with session.module(name):
                made: Sequence[Tensor] = F.linear(x, *weights()).split(sizes, dim=-1)
            return made

        self.product: Callable[[Tensor], Sequence[Tensor]] = product
        """Of an input, the outputs of all layers. It does not refer to this object, or weights would stay for long."""

    def piece(self, index: int, x: Tensor) -> Tensor:
        """Output [.., N_index] of layer `index` for x [.., K]; the first call sends for all layers, as one `linear`."""
        return self._pieces.take(index, x, self.product)


def joined(layers: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Weights one below the other, without a copy if they lie so already, and the biases end to end. Local."""
    biases = [bias for _, bias in layers if bias is not None]
    weights = [weight for weight, _ in layers]
    whole = _one_below_the_other(weights)
    return torch.cat(weights) if whole is None else whole, torch.cat(biases) if biases else None


def lie_together(weights: Sequence[Tensor]) -> bool:
    """Whether secret weights are one matrix in memory, so that joining them copies nothing; one alone is."""
    return len(weights) == 1 or _one_below_the_other(weights) is not None


def _one_below_the_other(weights: Sequence[Tensor]) -> SecretTensor | None:
    """The weights as one, without a copy, if their shares lie one below the other (another session has joined them)."""
    fixed = [weight.value(full=True) for weight in weights if isinstance(weight, SecretTensor)]
    if len(fixed) < len(weights) or len({value.frac for value in fixed}) > 1:
        return None
    parts = [_whole(rows) for rows in zip(*(value.share.parts for value in fixed), strict=True)]
    whole = tuple(part for part in parts if part is not None)
    return SecretTensor(fixed[0].with_share(Share(whole))) if len(whole) == len(parts) else None


def _whole(rows: Sequence[Tensor]) -> Tensor | None:
    """The tensor [R1 + R2 + .., K] that matrices [R, K] were split from, if they follow each other in its memory."""
    if all(isinstance(row, SeededTensor) for row in rows):
        return torch.cat(list(rows))
    first, at = rows[0], rows[0].storage_offset()
    for row in rows:
        if not row.is_contiguous() or row.storage_offset() != at or row.device != first.device:
            return None
        if _memory(row) != _memory(first):
            return None
        at += row.numel()
    return first.as_strided((sum(len(row) for row in rows), first.shape[1]), (first.shape[1], 1))


def _memory(x: Tensor) -> int:
    """Equal for tensors of one device in the same memory; on the meta device, of the same storage."""
    return x.untyped_storage()._cdata if x.is_meta else x.untyped_storage().data_ptr()


def content_of(x: Tensor) -> object:
    """What changes when a secret tensor is assigned to in place."""
    return x.value(masked=True) if isinstance(x, SecretTensor) else x


def can_share(layers: Sequence[nn.Module]) -> bool:
    """Whether these are two or more linear layers of one input size, all with or all without a bias."""
    if len(layers) < 2 or not all(type(layer) is nn.Linear for layer in layers):
        return False
    kinds = {(layer.in_features, layer.bias is None) for layer in layers if isinstance(layer, nn.Linear)}
    return len(kinds) == 1
