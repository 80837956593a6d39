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
        """Secret tokens [T, H] and the router's weights [T, n] (given twice) to [T, H]."""
        count, double, width = self.gate_up_proj.shape
        tokens = hidden_states.shape[0]
        if not isinstance(weights, SecretTensor) or tuple(weights.shape) != (tokens, count):
            raise UnsupportedOp(
                f"experts: got weights of shape {tuple(weights.shape)}; want secret ones for each token and expert, "
                f"{(tokens, count)}, from a private router"
            )
        both = F.linear(hidden_states, self.gate_up_proj.reshape(count * double, width))
        gate, up = both.reshape(tokens, count, double).chunk(2, dim=-1)
        inner = self.act_fn(gate) * up * weights.unsqueeze(-1)
        down = self.down_proj.transpose(0, 1).reshape(width, count * (double // 2))
        return F.linear(inner.reshape(tokens, -1), down)


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
