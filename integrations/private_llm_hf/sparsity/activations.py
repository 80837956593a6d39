"""Activations that make exact zeros, and the two that transformers has no name for."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ShiftedReLU(nn.Module):
    """relu(x - shift) (Mirzadeh et al., *ReLU Strikes Back*, section 5.3): sparser than ReLU from the start."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        """Element by element."""
        return (x - self.shift).relu()

    def extra_repr(self) -> str:
        """The shift."""
        return f"shift={self.shift}"


class ReLULinear(nn.Linear):
    """A linear layer with a ReLU behind it: the up projection of dReLU, relu(gate(x)) * relu(up(x)).

    It holds the weights under the names of the layer that it replaces.
    """

    def forward(self, x: Tensor) -> Tensor:
        """relu(x W^T + b)."""
        return super().forward(x).relu()

    @classmethod
    def of(cls, layer: nn.Linear) -> ReLULinear:
        """With the same parameters, not copies of them."""
        made = cls(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        made.weight, made.bias = layer.weight, layer.bias
        return made


def zeroes(activation: nn.Module) -> bool:
    """Whether an activation is exactly zero from -8 to -1, as ReLU and its relatives are and GELU and SiLU are not."""
    with torch.no_grad():
        return not bool(activation(torch.linspace(-8.0, -1.0, 29)).any())
