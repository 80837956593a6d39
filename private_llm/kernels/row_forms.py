"""A bilinear form of rows: their inner products with others, and their products with one row for all, in one step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.kernels.forms import Form
from private_llm.kernels.shapes import Size


@dataclass(frozen=True)
class InnerAndScaled(Form):
    """Of x [R, W] and y [R + 1, W]: x_r . y_r for each row, then x_r times the last row of y: [R, 1 + W]."""

    tag = "rows"

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """[x . y, x w]."""
        made = torch.empty((*x.shape[:-1], 1 + x.shape[-1]), dtype=x.dtype, device=x.device)
        torch.sum(x * y[:-1], -1, keepdim=True, dtype=x.dtype, out=made[..., :1])
        torch.mul(x, y[-1], out=made[..., 1:])
        return made

    def pair(self, x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
        """The sum of both."""
        return self.product(x0, y0).add_(self.product(x1, y1))

    def real(self, x: Tensor, y: Tensor) -> Tensor:
        """The same of floating-point numbers."""
        return self.product(x, y)

    def macs(self, x_shape: Size, y_shape: Size) -> int:
        """Two for each entry of x."""
        return 2 * math.prod(x_shape)
