"""The predictor: two linear layers of low rank and a threshold (Comet, section 4.1 and figure 7a)."""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor, nn

from private_llm.errors import ConfigError
from private_llm_hf.sparsity.activity import block_counts
from private_llm_hf.sparsity.settings import PredictorConfig


class Predictor(nn.Module):
    """y = W2 a(W1 x + b1) + b2 > threshold, for x: [..., width] and y: [..., units].

    width: of the input. neurons: neurons or heads; units: blocks of them, the last block may be short. Parameters:
    fc1.weight [rank, width], fc1.bias [rank], fc2.weight [units, rank], fc2.bias [units], float32. New weights depend
    on `seed` alone. grouping: int32 [neurons], a permutation: unit u is the neurons grouping[u * block : (u + 1) *
    block] (`grouping.py`); None: neighbours. Raises ConfigError for a rank above the width, where the two layers save
    nothing, and for a grouping that is no permutation.
    """

    grouping: Tensor | None

    def __init__(
        self, width: int, neurons: int, config: PredictorConfig, seed: int = 0, grouping: Tensor | None = None
    ) -> None:
        super().__init__()
        if width < 1 or neurons < 1:
            raise ConfigError(f"predictor: got width {width} and {neurons} neurons; want at least 1 of each")
        if config.rank > width:
            raise ConfigError(
                f"rank: got {config.rank} for inputs of width {width}; want at most {width}, or nothing is saved"
            )
        if grouping is not None and not _is_permutation(grouping, neurons):
            raise ConfigError(
                f"grouping: {grouping.dtype} {tuple(grouping.shape)} is no int32 permutation of {neurons} neurons; "
                "train again"
            )
        self.config, self.width, self.neurons = config, width, neurons
        self.units = math.ceil(neurons / config.block)
        self.fc1 = nn.Linear(width, config.rank)
        self.fc2 = nn.Linear(config.rank, self.units)
        self.register_buffer("grouping", grouping)
        chance = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in (self.fc1, self.fc2):
                layer.weight.normal_(0.0, layer.in_features**-0.5, generator=chance)
                layer.bias.zero_()

    @property
    def most(self) -> int:
        """Units that may be active at one position: all of them without a budget, and at least one."""
        return self.units if self.config.budget is None else max(1, int(self.config.budget * self.units))

    def forward(self, x: Tensor) -> Tensor:
        """Scores [..., units] in float32, before the threshold."""
        hidden: Tensor = self.fc1(x.float())
        found: Tensor = self.fc2(hidden.relu() if self.config.hidden == "relu" else hidden)
        return found

    def predict(self, x: Tensor, chance: torch.Generator | None = None) -> Tensor:
        """Which units a run computes, bool [..., units]: `select` of the scores of x."""
        return self.select(self(x), chance)

    def select(self, scores: Tensor, chance: torch.Generator | None = None) -> Tensor:
        """Units whose scores [..., units] exceed the threshold; with a budget exactly that many, as a private run does.

        It leaves out units at random where too many are predicted, and fills up with others at random where too few
        are: the highest scores are known to nobody. chance: draws them (default: PyTorch's generator).
        """
        active = scores > self.config.threshold
        if self.config.budget is None:
            return active
        order = active.float() + torch.empty(scores.shape).uniform_(generator=chance).to(scores.device)
        return torch.zeros_like(active).scatter_(-1, order.topk(self.most, dim=-1).indices, True)

    def expand(self, active: Tensor) -> Tensor:
        """Units [..., units] as neurons [..., neurons]."""
        whole = active.repeat_interleave(self.config.block, dim=-1)[..., : self.neurons]
        return whole if self.grouping is None else whole[..., self.grouping.argsort()]

    def counts(self, active: Tensor) -> Tensor:
        """Active neurons of each unit, float32 [N, units], of bool [N, neurons]."""
        ordered = active if self.grouping is None else active[:, self.grouping.long().cpu()]
        return block_counts(ordered, self.config.block)

    def parameters_count(self) -> int:
        """Number of weights and biases."""
        return sum(value.numel() for value in self.parameters())

    def with_config(self, config: PredictorConfig) -> Self:
        """The same weights under another threshold or budget. Raises ConfigError for another shape."""
        made = type(self)(self.width, self.neurons, config, grouping=self.grouping)
        if (made.units, config.rank) != (self.units, self.config.rank):
            raise ConfigError(
                f"predictor: got rank {config.rank} and block {config.block} for weights of rank {self.config.rank} "
                f"and block {self.config.block}; train another predictor for another shape"
            )
        made.load_state_dict(self.state_dict())
        return made


def _is_permutation(grouping: Tensor, neurons: int) -> bool:
    return grouping.dtype == torch.int32 and grouping.sort().values.tolist() == list(range(neurons))
