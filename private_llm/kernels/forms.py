"""Bilinear forms: what a protocol can multiply in one step, whatever the inner size.

A protocol needs of a form only that it is linear in each operand: it multiplies shares, adds what each party holds, and
finishes an output-sized result. A new bilinear layer is a new form here; no protocol changes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.kernels import matmul, ops, shapes
from private_llm.kernels.shapes import Size


class BilinearForm(ABC):
    """B(x, y), linear in x and in y, over tensors of ring elements (int32 or int64; any device, meta included)."""

    tag: str  # name under which the ledger books its messages

    @abstractmethod
    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """B(x, y) modulo the ring size."""

    def pair(self, x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
        """B(x0, y0) + B(x1, y1), both of one shape, without a temporary of an operand's size."""
        return self.product(x0, y0).add_(self.product(x1, y1))

    @abstractmethod
    def real(self, x: Tensor, y: Tensor) -> Tensor:
        """B(x, y) of floating-point tensors."""

    @abstractmethod
    def macs(self, x_shape: Size, y_shape: Size) -> int:
        """Multiply-adds of one product."""

    def narrowed(self) -> tuple[BilinearForm, Callable[[Tensor], Tensor]] | None:
        """A form of the entries of y that take part, and how to take them out; None: all, as masks of whole y need."""
        return None


@dataclass(frozen=True)
class Matmul(BilinearForm):
    """torch.matmul of x [..., M, K] and y [..., K, N]."""

    tag = "matmul"
    product = staticmethod(ops.ring_matmul)
    pair = staticmethod(ops.ring_matmul_pair)
    macs = staticmethod(matmul.macs)

    def real(self, x: Tensor, y: Tensor) -> Tensor:
        """x y."""
        return torch.matmul(x, y)


MATMUL = Matmul()


@dataclass(frozen=True)
class Conv2d(BilinearForm):
    """torch's conv2d of x [B, C, H, W] and w [O, C / groups, kh, kw]; sizes are (down, right), padding is zeros."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    tag = "conv2d"

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """x * w."""
        return ops.ring_conv2d(x, y, self.stride, self.padding, self.dilation, self.groups)

    def pair(self, x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
        """x0 * w0 + x1 * w1."""
        how = (self.stride, self.padding, self.dilation, self.groups)
        return ops.pair_of(ops.ring_conv2d, x0, y0, x1, y1, *how)

    def real(self, x: Tensor, y: Tensor) -> Tensor:
        """x * w."""
        return torch.nn.functional.conv2d(x, y, None, self.stride, self.padding, self.dilation, self.groups)

    def macs(self, x_shape: Size, y_shape: Size) -> int:
        """Outputs times the products of a window."""
        made = shapes.conv2d_size(x_shape, y_shape, self.stride, self.padding, self.dilation, self.groups)
        return math.prod(made) * math.prod(y_shape[1:])


@dataclass(frozen=True)
class InnerAndScaled(BilinearForm):
    """Of x [R, W] and y [R + 1, W]: x_r . y_r for each row, then x_r times the last row of y: [R, 1 + W]."""

    tag = "rows"

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        """[x . y, x w]."""
        made = torch.empty((*x.shape[:-1], 1 + x.shape[-1]), dtype=x.dtype, device=x.device)
        torch.sum(x * y[:-1], -1, keepdim=True, dtype=x.dtype, out=made[..., :1])
        torch.mul(x, y[-1], out=made[..., 1:])
        return made

    def real(self, x: Tensor, y: Tensor) -> Tensor:
        """The same of floating-point numbers."""
        return self.product(x, y)

    def macs(self, x_shape: Size, y_shape: Size) -> int:
        """Two for each entry of x."""
        return 2 * math.prod(x_shape)
