"""Linear layers that read the same input as one product: query, key and value; gate and up.

The bytes are those of the separate products, the rounds those of one. Weights are laid one below the other, each
layer's weight stays a view of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from private_llm.net.ledger import Ledger
from private_llm.tensor.secret import SecretTensor


class SharedInput:
    """Computes all layers of a group when the first is called, and hands the others their piece.

    A piece is good for the very tensor it was made from; a layer that is called with another input, or twice, has
    the group computed anew, so the result never depends on the order of calls.
    """

    def __init__(self, layers: Sequence[nn.Linear], name: str, ledger: Ledger) -> None:
        self._name, self._ledger = name, ledger
        self._sizes = [layer.weight.shape[0] for layer in layers]
        weights: list[Tensor] = [layer.weight for layer in layers]
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        self._weight = torch.cat(weights)
        self._bias = torch.cat(biases) if biases else None
        for layer, rows in zip(layers, self._weight.split(self._sizes), strict=True):
            layer.weight = nn.Parameter(rows, requires_grad=False)
        self._source: tuple[Tensor, object] | None = None
        self._pieces: list[Tensor | None] = []

    def piece(self, index: int, x: Tensor) -> Tensor:
        """The output of layer `index` for input x [.., K]."""
        found = self._pieces[index] if self._source is not None and self._made_from(x) else None
        if found is None:
            with self._ledger.scope(self._name):
                made = F.linear(x, self._weight, self._bias).split(self._sizes, dim=-1)
            self._pieces, self._source = list(made), (x, _content(x))
            found = made[index]
        self._pieces[index] = None
        if not any(piece is not None for piece in self._pieces):
            self._source = None
        return found

    def _made_from(self, x: Tensor) -> bool:
        return self._source is not None and self._source[0] is x and self._source[1] is _content(x)


def _content(x: Tensor) -> object:
    """What changes when a secret tensor is assigned to in place."""
    return x._fixed if isinstance(x, SecretTensor) else x


def can_share(layers: Sequence[nn.Module]) -> bool:
    """Whether these modules are linear layers of one input size, all with or all without a bias."""
    if len(layers) < 2 or not all(type(layer) is nn.Linear for layer in layers):
        return False
    kinds = {(layer.in_features, layer.bias is None) for layer in layers if isinstance(layer, nn.Linear)}
    return len(kinds) == 1
