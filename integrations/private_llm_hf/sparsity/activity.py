"""What counts as active: neurons that reach the next layer, heads that an attention block's output cannot do without.

A **neuron** is active at a position if what the layer after it receives is not zero: act(FC1 x), act(gate) * up, or
relu(gate) * relu(up).

A **head** is inactive at a position if it is one of the heads that may be left out together: with c_i = |W_i h_i| the
norm of head i's part of the block's output (h_i its output vector, W_i its columns of the output projection), heads are
left out from the smallest c_i on, as long as the sum of their norms is at most `tolerance` times the norm of the whole
output |sum_i W_i h_i|. By the triangle inequality the output then moves by no more than that share of its norm, however
many heads are left out. The bias of the projection counts on neither side.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def active_neurons(reached: Tensor) -> Tensor:
    """bool [N, neurons] of what the layer after the activation receives, [N, neurons]."""
    return reached != 0


class HeadActivity:
    """Which heads are active, for the output projection of one attention block."""

    def __init__(self, projection: nn.Module, heads: int, tolerance: float) -> None:
        weight = projection.weight.detach().float()  # type: ignore[operator]
        weight = weight.T if isinstance(projection, Conv1D) else weight  # [out, heads * size]
        self._weight, self._tolerance = weight, tolerance
        parts = weight.unflatten(1, (heads, -1)).permute(1, 2, 0)  # [heads, size, out]
        self._squares = parts @ parts.mT  # |W_i h|^2 = h^T (W_i^T W_i) h

    def __call__(self, outputs: Tensor) -> Tensor:
        """bool [N, heads] of the heads' output vectors side by side, [N, heads * size]."""
        outputs = outputs.float()
        parts = outputs.unflatten(1, (len(self._squares), -1))
        squares = torch.einsum("nhi,hij,nhj->nh", parts, self._squares, parts)
        norms = squares.clamp_min(0).sqrt()
        whole = (outputs @ self._weight.T).norm(dim=1, keepdim=True)
        ordered, order = norms.sort(dim=1)
        needed = ordered.cumsum(1) > self._tolerance * whole
        return torch.zeros_like(needed).scatter_(1, order, needed)


def block_counts(active: Tensor, block: int) -> Tensor:
    """Active neurons per block of `block` neighbours, float32 [N, blocks] of bool [N, neurons]."""
    if block == 1:
        return active.float()
    missing = -active.shape[1] % block
    counts: Tensor = nn.functional.pad(active.float(), (0, missing)).unflatten(1, (-1, block)).sum(2)
    return counts
