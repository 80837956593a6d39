"""Root-mean-square norm as one module: what replaces the families' own spellings of it."""

from __future__ import annotations

from torch import Tensor, nn

from private_llm.errors import PlaintextLeak
from private_llm.nn.ops_norm import rms_norm_rule
from private_llm.tensor.secret import SecretTensor


class PrivateRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (weight + offset), over the last dimension, by one fused protocol.

    `offset` is 1 for the families that store weight - 1 (Gemma). `weight` may be None (no gain).
    """

    def __init__(self, weight: nn.Parameter | None, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight: Tensor | None
        self.register_parameter("weight", weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize a secret [.., H]; same shape."""
        if not isinstance(hidden_states, SecretTensor):
            raise PlaintextLeak("a private norm got a plain tensor; its input must be secret")
        return rms_norm_rule(hidden_states, self.weight, self.eps, self.offset)

    def extra_repr(self) -> str:
        """Constants, no values."""
        return f"eps={self.eps}, offset={self.offset}"
