"""The predictor: two linear layers of low rank and a threshold (Comet, section 4.1 and figure 7a), and its measures."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from private_llm.errors import ConfigError
from private_llm_hf.sparsity.settings import PredictorConfig


class Predictor(nn.Module):
    """y = W2 a(W1 x + b1) + b2 > threshold, for x: [..., width] and y: [..., units].

    width: of the input. neurons: neurons or heads; units: blocks of them, the last block may be short. Parameters:
    fc1.weight [rank, width], fc1.bias [rank], fc2.weight [units, rank], fc2.bias [units], float32. New weights depend
    on `seed` alone. grouping: int32 [neurons], a permutation: unit u is the neurons grouping[u * block : (u + 1) *
    block] (`training.py`); None: neighbours. Raises ConfigError for a rank above the width, where the two layers save
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
        whole = grouping is None or sorted(grouping.tolist()) == list(range(neurons))
        if grouping is not None and not (whole and grouping.dtype == torch.int32):
            raise ConfigError(
                f"grouping: got {grouping.dtype} {tuple(grouping.shape)}; want an int32 permutation of {neurons} "
                "neurons: train again"
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


# -- what counts as active -------------------------------------------------------------------------------------------
# A **neuron** is active where the layer after it receives no zero: act(FC1 x), act(gate) * up, relu(gate) * relu(up).
#
# A **head** is inactive at a position if it is one of the heads that may be left out together: with c_i = |W_i h_i| the
# norm of head i's part of the block's output (h_i its output vector, W_i its columns of the output projection), heads
# are left out from the smallest c_i on, as long as the sum of their norms is at most `tolerance` times the norm of the
# whole output |sum_i W_i h_i|. By the triangle inequality the output then moves by no more than that share of its norm,
# however many heads are left out. The bias of the projection counts on neither side.
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


# -- recall and precision of predictions, and the threshold that reaches a recall -------------------------------------
# Counted are units (neurons, heads, or blocks of neurons). Where units are blocks, recall weighs each by its active
# neurons: it is the share of the active *neurons* that are computed. Precision is the share of predicted units that are
# active. With a budget, which of the predicted units a run leaves out, or fills up with, is random: both are then those
# in the mean over what it may draw.
_BINS = 1 << 16

Scored = Callable[[], Iterator[tuple[Tensor, Tensor]]]  # the data anew: scores, active neurons per unit [N, units]


@dataclass(frozen=True)
class Measures:
    """rows: positions. activity, predicted: shares of units that are, or are predicted, active.

    most: units predicted at the busiest position; predicted and most are at most a budget. Recall is 1 where nothing
    is active, precision where nothing is predicted.
    """

    rows: int
    recall: float
    precision: float
    activity: float
    predicted: float
    most: int

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        return 2 * self.precision * self.recall / max(self.precision + self.recall, 1e-12)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def measures_of(found: Iterable[tuple[Tensor, Tensor]], budget: int | None = None) -> Measures:
    """Of predictions bool [N, units], scores above the threshold, and active neurons per unit [N, units], in batches.
    budget: units that every position computes, drawn as a run draws them; None: those that are predicted.
    """
    rows = units = active_units = predicted_units = most = 0
    every = reached = right = 0.0
    for predicted, counts in found:
        active, many = counts > 0, predicted.sum(1, keepdim=True).double()
        within = many if budget is None else many.clamp(max=budget)
        others = counts.shape[1] - many
        filled = torch.zeros_like(many) if budget is None else (budget - within) / others.clamp_min(1)
        chances = torch.where(predicted, within / many.clamp_min(1), filled)
        rows, units, active_units = rows + len(counts), units + counts.numel(), active_units + int(active.sum())
        right += float((chances * (predicted & active)).sum())
        predicted_units += int(within.sum())
        most = max(most, int(within.max())) if len(counts) else most
        every += float(counts.sum())
        reached += float((chances * counts).sum())
    recall = reached / every if every else 1.0
    precision = right / predicted_units if predicted_units else 1.0
    return Measures(rows, recall, precision, active_units / max(1, units), predicted_units / max(1, units), most)


def threshold_for(recall: float, scored: Scored) -> float:
    """The threshold with the best F1 of those that reach this recall; of 2^16 between the active units' scores.

    Where few units are inactive, that is below the one that just reaches it. 0 if nothing is active. Goes over the
    data twice; memory does not grow with it.
    """
    low, high, total = float("inf"), float("-inf"), 0.0
    for scores, counts in scored():
        hits = scores[counts > 0]
        if len(hits):
            low, high, total = min(low, float(hits.min())), max(high, float(hits.max())), total + float(counts.sum())
    if not total:
        return 0.0
    step = (high - low) / _BINS or 1e-6
    neurons, active, inactive = (torch.zeros(_BINS + 1, dtype=torch.float64) for _ in range(3))
    for scores, counts in scored():
        bins = ((scores.double() - low) / step).floor().clamp(-1, _BINS).long()
        hits, misses = counts > 0, (counts == 0) & (bins >= 0)
        neurons += torch.bincount(bins[hits], counts[hits].double(), minlength=_BINS + 1)
        active += torch.bincount(bins[hits], minlength=_BINS + 1)
        inactive += torch.bincount(bins[misses], minlength=_BINS + 1)
    neurons, active, inactive = (found.flip(0).cumsum(0).flip(0) for found in (neurons, active, inactive))
    found_share, right_share = neurons / total, active / (active + inactive).clamp_min(1)
    f1 = 2 * found_share * right_share / (found_share + right_share).clamp_min(1e-12)
    best = int(f1.masked_fill(found_share < recall, -1.0).argmax())
    return low + (best - 1) * step
