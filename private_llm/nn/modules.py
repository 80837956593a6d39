"""Norms and the quick GELU as one module each: what replaces the families' own spellings of them."""

import torch.nn.functional as F
from torch import Tensor, nn

from private_llm.errors import PlaintextLeak
from private_llm.nn.ops_norm import rms_norm_rule
from private_llm.tensor.secret import SecretTensor


class PrivateRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (weight + offset), one protocol; offset: 1 for weights stored less 1 (Gemma)."""

    def __init__(self, weight: nn.Parameter | None, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight: Tensor | None
        self.register_parameter("weight", weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize a secret [.., H]: `approx.norms.rms_norm`. Raises PlaintextLeak for a plain tensor."""
        if not isinstance(hidden_states, SecretTensor):
            raise PlaintextLeak("a private norm got a plain tensor; its input must be secret")
        return rms_norm_rule(hidden_states, self.weight, self.eps, self.offset)

    def extra_repr(self) -> str:
        """Constants, no values."""
        return f"eps={self.eps}, offset={self.offset}"


class PrivateLayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * (weight + offset) + bias, over the last dimension, by one fused protocol."""

    def __init__(
        self, weight: nn.Parameter | None, bias: nn.Parameter | None, eps: float, offset: float = 0.0
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight: Tensor | None
        self.bias: Tensor | None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize [.., H]; same shape. On a secret: `approx.norms.layer_norm`, with its cost and errors."""
        weight = self.weight
        if weight is not None and self.offset:
            weight = weight + self.offset
        return F.layer_norm(hidden_states, hidden_states.shape[-1:], weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        """Constants, no values."""
        return f"eps={self.eps}, offset={self.offset}"


class PrivateQuickGELU(nn.Module):
    """x * sigmoid(1.702 x), as silu(1.702 x) / 1.702."""

    def forward(self, input: Tensor) -> Tensor:
        """Pointwise, same shape; `silu` after one truncation: 157 bytes an element, 7 rounds (trio, 18 bits)."""
        return F.silu(input * 1.702) * (1.0 / 1.702)
