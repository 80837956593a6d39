"""Mixtures of experts: which experts a token goes to is secret, so every token goes to all of them.

transformers spells them as a router, which chooses k experts for each token and their weights, and as one module that
holds the matrices of all experts. Here the router gives secret weights for all experts, zero for those that were not
chosen, and two products compute all experts at once. Work and traffic of the products are n / k times those of the
plaintext model; a router costs n (n - 1) / 2 comparisons a token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from private_llm.approx.reciprocal import reciprocal
from private_llm.errors import PlaintextLeak, UnsupportedOp
from private_llm.exact.topk import among_largest
from private_llm.tensor.secret import SecretTensor

_ROWS, _WIDTH = 5, 16
"""Tokens that a router is tried on, and their size."""
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Routing:
    """Softmax over all experts, the k largest of it; `normal`: divided by their sum; times `scale`."""

    k: int
    normal: bool
    scale: float

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        """The formula itself: weights of all experts [T, n]."""
        scores = F.linear(x, weight).softmax(-1)
        values, index = scores.topk(self.k, dim=-1)
        values = values / values.sum(-1, keepdim=True) if self.normal else values
        return torch.zeros_like(scores).scatter_(-1, index, values * self.scale)


class PrivateRouter(nn.Module):
    """Secret weights of all experts for each token, by one softmax and one choice of the k largest."""

    def __init__(self, weight: nn.Parameter, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.weight: Tensor
        self.register_parameter("weight", weight)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Secret tokens [.., H] to (logits, weights, weights), each [T, n], secret; zero where not chosen.

        The sum of the k largest of n probabilities lies between k / n and 1, which is all that dividing by it needs.
        """
        if not isinstance(hidden_states, SecretTensor):
            raise PlaintextLeak("a private router got a plain tensor; its input must be secret")
        logits = F.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
        probabilities = logits.softmax(-1)
        if not isinstance(probabilities, SecretTensor) or not isinstance(logits, SecretTensor):
            raise PlaintextLeak("a private router's weights became plain")
        chosen = probabilities.to_operand().mul(among_largest(logits.to_operand(), self.routing.k))
        if self.routing.normal and self.routing.k < logits.shape[-1]:
            low = self.routing.k / logits.shape[-1]
            chosen = chosen.mul(reciprocal(chosen.sum(-1, keepdim=True), 0.99 * low, 1.01))
        weights: Tensor = SecretTensor(chosen)
        weights = weights if self.routing.scale == 1.0 else weights * self.routing.scale
        return logits, weights, weights

    def extra_repr(self) -> str:
        """What is public of it."""
        return repr(self.routing)


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


def routing_of(module: nn.Module) -> Routing | None:
    """The routing that a module spells, found by trying it on random tokens; None if it is another module."""
    held = {name: value for name, value in module._parameters.items() if value is not None}
    k = getattr(module, "top_k", None)
    weight = held.get("weight")
    if set(held) != {"weight"} or weight is None or weight.ndim != 2 or not isinstance(k, int):
        return None
    count = weight.shape[0]
    if any(True for _ in module.children()) or not 0 < k <= count:
        return None
    random = np.random.default_rng(count)
    tried = torch.from_numpy(random.normal(0.0, 0.5, (count, _WIDTH))).float()
    rows = torch.from_numpy(random.normal(0.0, 1.0, (_ROWS, _WIDTH))).float()
    found = _weights(module, tried, rows)
    if found is None:
        return None
    for routing in _candidates(module, k):
        if torch.allclose(found, routing.plain(rows, tried), rtol=_TOLERANCE, atol=_TOLERANCE):
            return routing
    return None


def _weights(module: nn.Module, weight: Tensor, rows: Tensor) -> Tensor | None:
    """Weights of all experts that a copy of the router with this matrix gives; None if it gives something else."""
    tried = copy.copy(module)
    tried._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    for name in ("hidden_dim", "hidden_size"):
        if name in vars(tried):
            setattr(tried, name, _WIDTH)
    forward: Callable[[Tensor], object] = type(module).forward.__get__(tried)
    try:
        with torch.no_grad():
            made = forward(rows.clone())
        if not isinstance(made, tuple) or len(made) != 3:
            return None
        _, values, index = made
        return torch.zeros(len(rows), len(weight)).scatter_(-1, index, values.float())
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None


def _candidates(module: nn.Module, k: int) -> Iterator[Routing]:
    scales = {1.0, *(float(v) for n, v in vars(module).items() if "scal" in n and isinstance(v, float | int))}
    for scale in sorted(scales):
        for normal in (True, False):
            yield Routing(k, normal, scale)
