"""Mixtures of experts: which experts a token goes to is secret, so every token goes to all of them.

transformers spells them as a router, which chooses k experts for each token and their weights, and as one module that
holds the matrices of all experts. Here the router gives secret weights for all experts, zero for those that were not
chosen, and two products compute all experts at once. Work and traffic of the products are n / k times those of the
plaintext model.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from private_llm.errors import UnsupportedOp
from private_llm.tensor.secret import SecretTensor

_CLAMPED = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


class PrivateExperts(nn.Module):
    """All experts on all tokens: act(x gate) * (x up), times the token's weight of the expert, times down, summed."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.act_fn = original.get_submodule("act_fn")
        self.gate_up_proj: Tensor
        self.down_proj: Tensor
        self.register_parameter("gate_up_proj", original.get_parameter("gate_up_proj"))
        self.register_parameter("down_proj", original.get_parameter("down_proj"))

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Secret tokens [T, H] and the router's weights [T, n] (given twice) to [T, H].

        All n experts are computed. Raises UnsupportedOp for weights of another shape, or plain ones.
        """
        count, double, width = self.gate_up_proj.shape
        tokens = hidden_states.shape[0]
        _check(weights, (tokens, count))
        both = F.linear(hidden_states, self.gate_up_proj.reshape(count * double, width))
        gate, up = both.reshape(tokens, count, double).chunk(2, dim=-1)
        inner = self.act_fn(gate) * up * weights.unsqueeze(-1)
        down = self.down_proj.transpose(0, 1).reshape(width, count * (double // 2))
        return F.linear(inner.reshape(tokens, -1), down)


class PrivateClampedExperts(nn.Module):
    """All experts of GPT-OSS on all tokens: clamped gates and ups in turns, biases, matrices as [n, from, to]."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.alpha, self.limit = float(original.alpha), float(original.limit)  # type: ignore[arg-type]
        self.gate_up_proj: Tensor
        self.gate_up_proj_bias: Tensor
        self.down_proj: Tensor
        self.down_proj_bias: Tensor
        for name in _CLAMPED:
            self.register_parameter(name, original.get_parameter(name))

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Secret tokens [T, H] and the router's weights [T, n] (given twice) to [T, H].

        (up + 1) gate sigmoid(alpha gate), gate at most `limit`, up at most that in size: 141 bytes for the clamps.
        Raises UnsupportedOp for weights of another shape, or plain ones.
        """
        count, width, double = self.gate_up_proj.shape
        tokens = hidden_states.shape[0]
        _check(weights, (tokens, count))
        matrix = self.gate_up_proj.transpose(1, 2).reshape(count * double, width)
        both = F.linear(hidden_states, matrix, self.gate_up_proj_bias.reshape(count * double))
        pairs = both.reshape(tokens, count, double // 2, 2)
        gate, up = pairs[..., 0].clamp(max=self.limit), pairs[..., 1].clamp(min=-self.limit, max=self.limit)
        inner = F.silu(gate * self.alpha) * (1 / self.alpha) * (up + 1) * weights.unsqueeze(-1)
        down = self.down_proj.reshape(count * (double // 2), width)
        return F.linear(inner.reshape(tokens, -1), down.t()) + F.linear(weights, self.down_proj_bias.t())


def _check(weights: Tensor, shape: tuple[int, int]) -> None:
    if not isinstance(weights, SecretTensor) or tuple(weights.shape) != shape:
        raise UnsupportedOp(
            f"experts: got weights of shape {tuple(weights.shape)}; want secret ones for each token and expert, "
            f"{shape}, from a private router"
        )


# -- what a module is -----------------------------------------------------------------------------------------------
def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the matrices of all experts as [n, 2 I, H] and [n, H, I], and nothing else.

    What its forward does with them is for the comparison with plaintext to find out.
    """
    held = {name: value for name, value in module._parameters.items() if value is not None}
    if set(held) != {"gate_up_proj", "down_proj"} or set(dict(module.named_children())) != {"act_fn"}:
        return False
    up, down = held["gate_up_proj"].shape, held["down_proj"].shape
    return len(up) == len(down) == 3 and up[0] == down[0] and up[1] == 2 * down[2] and up[2] == down[1]


def is_clamped_experts(module: nn.Module) -> bool:
    """Whether a module holds all experts as GPT-OSS does: [n, H, 2 I] and [n, I, H] with biases, and two numbers."""
    held = {name: value for name, value in module._parameters.items() if value is not None}
    if set(held) != set(_CLAMPED) or any(True for _ in module.children()):
        return False
    if not all(isinstance(getattr(module, name, None), float | int) for name in ("alpha", "limit")):
        return False
    count, width, double = held["gate_up_proj"].shape
    wanted = ((count, width, double), (count, double), (count, double // 2, width), (count, width))
    return double % 2 == 0 and all(tuple(held[n].shape) == size for n, size in zip(_CLAMPED, wanted, strict=True))
