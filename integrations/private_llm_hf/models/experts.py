"""Experts of mixtures: which a token goes to is secret, so all compute it, or each takes equally many tokens.

transformers spells them as a router, which chooses k experts for each token and their weights, and as one module that
holds the matrices of all experts. Here the router gives secret weights for all experts, zero for those that were not
chosen, and two products compute all experts at once. Work and traffic of both are n / k times the plaintext model's.

With `PrivateConfig.expert_capacity` each expert takes the tokens of largest weight for it, as many as it has places
(`oblivious.dispatch`); what others would have got of it is left out.
"""

import math
from abc import abstractmethod

import torch.nn.functional as F
from torch import Tensor, nn

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PlaintextLeak, UnsupportedOp
from private_llm.oblivious.dispatch import queues_of
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.ops_matmul import linears
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.models.routers import secret

LEAST_PLACES = 16
"""Of an expert, however short a row is: a few tokens, such as those of a draft, are always computed in full."""


def places(capacity: float | None, tokens: int, chosen: int, experts: int) -> int:
    """Tokens of a row of `tokens` that each expert takes, of which each token chose so many. Public."""
    return (
        tokens if capacity is None else min(tokens, max(LEAST_PLACES, math.ceil(capacity * tokens * chosen / experts)))
    )


class _Experts(nn.Module):
    """`forward` as of transformers' experts, with a private router's weights."""

    gate_up_proj: Tensor

    @abstractmethod
    def _all_on_all(self, tokens: SecretTensor, weights: SecretTensor) -> Tensor:
        """All experts on all tokens [T, H], times weights [T, n], summed: [T, H]."""

    @abstractmethod
    def _each_on_its_own(self, rows: SecretTensor) -> Tensor:
        """Each expert on its own rows: [n, M, H] to [n, M, H]."""

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Secret tokens [T, H] and the router's weights [T, n] to [T, H]. index: of shape [T, k].

        Raises UnsupportedOp for weights of another shape, PlaintextLeak for plain tokens or weights.
        """
        if not (isinstance(hidden_states, SecretTensor) and isinstance(weights, SecretTensor)):
            raise PlaintextLeak("private experts got plain tokens or weights; a private router's are secret")
        count = self.gate_up_proj.shape[0]
        wanted = (hidden_states.shape[0], count)
        if tuple(weights.shape) != wanted:
            raise UnsupportedOp(
                f"experts: got weights of shape {tuple(weights.shape)}; want {wanted}, of a private router"
            )
        present = weights.session.numerics.tokens
        if present is None or present.numel() != wanted[0]:
            return self._all_on_all(hidden_states, weights)
        taken = places(weights.session.config.expert_capacity, present.shape[1], index.shape[-1], count)
        if taken == present.shape[1]:
            return self._all_on_all(hidden_states, weights)
        return SecretTensor(self._queued(hidden_states.to_operand(), weights.to_operand(), present, taken))

    def _queued(self, tokens: Fixed, weights: Fixed, present: Tensor, taken: int) -> Fixed:
        """present: [B, S], 1 or 0: padding, which takes no place from a token. Rows of a batch have places each."""
        by_row = [x.view(lambda part: part.unflatten(0, present.shape)) for x in (tokens, weights)]
        by = by_row[1].scale_int(present.unsqueeze(-1).to(by_row[1].share.parts[0]))
        queues = queues_of(by, taken)
        rows = queues.gathered(by_row[0]).view(lambda part: part.transpose(0, 1).flatten(1, 2))
        made = secret(self._each_on_its_own(SecretTensor(rows))).to_operand()
        back = made.view(lambda part: part.unflatten(1, (len(present), taken)).transpose(0, 1))
        return queues.combined(back, by).view(lambda part: part.flatten(0, 1))


class PrivateExperts(_Experts):
    """act(x gate) * (x up), times the token's weight of the expert, times down, summed."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.act_fn = original.get_submodule("act_fn")
        self.gate_up_proj = original.get_parameter("gate_up_proj")
        self.down_proj = original.get_parameter("down_proj")

    def _all_on_all(self, tokens: SecretTensor, weights: SecretTensor) -> Tensor:
        count, double, width = self.gate_up_proj.shape
        both = F.linear(tokens, self.gate_up_proj.reshape(count * double, width))
        gate, up = both.reshape(-1, count, double).chunk(2, dim=-1)
        inner = self.act_fn(gate) * up * weights.unsqueeze(-1)
        down = self.down_proj.transpose(0, 1).reshape(width, count * (double // 2))
        return F.linear(inner.reshape(tokens.shape[0], -1), down)

    def _each_on_its_own(self, rows: SecretTensor) -> Tensor:
        gate, up = linears(rows, self.gate_up_proj).chunk(2, dim=-1)
        return linears(self.act_fn(gate) * up, self.down_proj)


class PrivateClampedExperts(_Experts):
    """Experts of GPT-OSS: clamped gates and ups in turns, biases, matrices as [n, from, to].

    (up + 1) gate sigmoid(alpha gate), gate at most `limit`, up at most that in size: 141 bytes for the clamps.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.alpha, self.limit = float(original.alpha), float(original.limit)  # type: ignore[arg-type]
        self.gate_up_proj_bias: Tensor
        self.down_proj: Tensor
        self.down_proj_bias: Tensor
        for name in _CLAMPED:
            self.register_parameter(name, original.get_parameter(name))

    def _gated(self, both: Tensor) -> Tensor:
        pairs = both.unflatten(-1, (-1, 2))
        gate, up = pairs[..., 0].clamp(max=self.limit), pairs[..., 1].clamp(min=-self.limit, max=self.limit)
        made: Tensor = F.silu(gate * self.alpha) * (1 / self.alpha) * (up + 1)
        return made

    def _all_on_all(self, tokens: SecretTensor, weights: SecretTensor) -> Tensor:
        count, width, double = self.gate_up_proj.shape
        matrix = self.gate_up_proj.transpose(1, 2).reshape(count * double, width)
        both = F.linear(tokens, matrix, self.gate_up_proj_bias.reshape(count * double))
        inner = self._gated(both.reshape(-1, count, double)) * weights.unsqueeze(-1)
        down = self.down_proj.reshape(count * (double // 2), width)
        return F.linear(inner.reshape(tokens.shape[0], -1), down.t()) + F.linear(weights, self.down_proj_bias.t())

    def _each_on_its_own(self, rows: SecretTensor) -> Tensor:
        both = linears(rows, self.gate_up_proj.transpose(1, 2)) + self.gate_up_proj_bias.unsqueeze(1)
        made: Tensor = linears(self._gated(both), self.down_proj.transpose(1, 2)) + self.down_proj_bias.unsqueeze(1)
        return made


# -- what a module is -----------------------------------------------------------------------------------------------
_CLAMPED = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds all experts as [n, 2 I, H] and [n, H, I], and nothing else (comparison shows the rest)."""
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


def check_capacity(model: nn.Module, config: PrivateConfig) -> None:
    """Raises ConfigError for a capacity of experts in a model without any (plain or private ones)."""
    held = config.expert_capacity is None or any(
        isinstance(part, _Experts) or is_experts(part) or is_clamped_experts(part) for part in model.modules()
    )
    if not held:
        raise ConfigError(
            f"expert_capacity: got {config.expert_capacity:g}, but {type(model).__name__} has no experts that it could "
            "hold for; leave it out"
        )
