"""The learned attack: a network reads the rows that some nodes hold and writes the whole text (Cascade, 6.1, 6.2, 6.4).

It is trained on texts of the attacker's own, for which the attacker computes the rows with the public weights and
knows the plan. Rows of tokens (layer 0) make it text infilling. What it gets right at positions that the nodes do not
hold comes from context alone: no plan prevents it, larger gaps make it worse.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attacks.scores import bleu, exact, rouge_l
from private_llm.errors import DomainError
from private_llm.token_sharding import ShardingPlan


@dataclass(frozen=True)
class Observers:
    """Who looks on: for each text one of `sets`, the endpoints of nodes of `plan` that put together what they hold.

    Raises DomainError for no set, an empty one, and nodes that the plan has not.
    """

    plan: ShardingPlan
    sets: tuple[tuple[int, ...], ...]
    name: str

    def __post_init__(self) -> None:
        if not self.sets or not all(self.sets):
            raise DomainError(f"sets of observers: got {self.sets}; want at least one node in each")
        wrong = [node for nodes in self.sets for node in nodes if not 0 <= node < self.plan.nodes]
        if wrong:
            raise DomainError(f"nodes that observe: got {wrong}; want 0 to {self.plan.nodes - 1} for this plan")

    def masks(self, length: int) -> Tensor:
        """Which positions below `length` each set holds: bool [sets, length]."""
        made = torch.zeros(len(self.sets), length, dtype=torch.bool)
        for row, nodes in enumerate(self.sets):
            for node in nodes:
                made[row, sorted(self.plan.held(node, length))] = True
        return made


def any_comp(plan: ShardingPlan) -> Observers:
    """One CompNode, each as often as the others."""
    return Observers(plan, tuple((node,) for node in range(plan.alpha)), "any CompNode")


def any_attn(plan: ShardingPlan) -> Observers:
    """One AttnNode, each as often as the others."""
    return Observers(plan, tuple((node,) for node in range(plan.alpha, plan.nodes)), "any AttnNode")


def colluding(plan: ShardingPlan, nodes: Sequence[int]) -> Observers:
    """These nodes together (one node: that node)."""
    names = " + ".join(plan.describe(node) for node in nodes)
    return Observers(plan, (tuple(nodes),), names)


def draw(masks: Sequence[Tensor], count: int, chance: torch.Generator) -> Tensor:
    """For each of `count` texts one of `masks`, then one of its rows, at random: bool [count, length]."""
    rows = []
    for _ in range(count):
        sets = masks[int(torch.randint(len(masks), (1,), generator=chance))]  # noqa: TID251 - no share is made here
        rows.append(sets[int(torch.randint(len(sets), (1,), generator=chance))])  # noqa: TID251 - see above
    return torch.stack(rows)


class Inverter(nn.Module):
    """Rows at held positions to logits of the tokens at all positions.

    body: rows [B, n, width] to logits [B, n, V], every position seeing all others. The adapter turns what the nodes
    see (`seen` numbers a row) into rows for it. Positions that they do not hold get one learned row, and a linear
    function of what is held up to `reach` places away: much of what can be guessed at all depends on neighbours,
    and this learns it at once where attention needs long.
    """

    def __init__(self, body: nn.Module, seen: int, width: int, reach: int = 8) -> None:
        super().__init__()
        self.body = body
        self.adapter = nn.Linear(seen, width)
        self.unseen = nn.Parameter(torch.zeros(width))
        self.near = nn.Conv1d(seen + 1, width, 2 * reach + 1, padding=reach, bias=False)
        nn.init.zeros_(self.near.weight)

    def forward(self, seen: Tensor, held: Tensor) -> Tensor:
        """seen [B, n, seen] and held, bool [B, n], to logits [B, n, V]; rows that are not held are not looked at.

        Raises DomainError for a `held` of another shape.
        """
        if held.shape != seen.shape[:2]:
            raise DomainError(f"held: got shape {tuple(held.shape)}; want {tuple(seen.shape[:2])}")
        flags = held.unsqueeze(-1)
        visible = torch.where(flags, F.pad(seen, (0, 1), value=1.0), 0.0)
        near = self.near(visible.transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.body(torch.where(flags, self.adapter(visible[..., :-1]), self.unseen + near))
        return logits

    @torch.no_grad()
    def take_over(self, start: "Inverter", seen: Tensor, before: Tensor) -> None:
        """Read what `start` reads: rows [N, seen] to which its rows `before` [N, its seen] are fitted (least squares).

        Training then begins with an attack that knows most held tokens, whatever layer the rows are of.
        """
        inputs = F.pad(seen.double().cpu(), (0, 1), value=1.0)
        fitted = torch.linalg.lstsq(inputs, before.double().cpu(), driver="gelsd").solution
        lift = F.pad(fitted, (0, 1))
        lift[-1, -1] = 1.0
        weight, bias = start.adapter.weight.double().cpu(), start.adapter.bias.double().cpu()
        self.adapter.weight.copy_(weight @ fitted[:-1].T)
        self.adapter.bias.copy_(weight @ fitted[-1] + bias)
        self.near.weight.copy_(torch.einsum("wok,io->wik", start.near.weight.double().cpu(), lift))
        self.unseen.copy_(start.unseen)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy of the tokens at all positions, held or not: logits [B, n, V], ids [B, n]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def guess(ids: Tensor, held: Tensor, token: int) -> Tensor:
    """The attack without learning: held tokens as they are, `token` (the commonest one) elsewhere; [B, n]."""
    return torch.where(held, ids, torch.full_like(ids, token))


@dataclass(frozen=True)
class Recovery:
    """Scores from 0 to 1, means over texts: of the whole text, and of the tokens that the nodes do not hold."""

    exact: float
    rouge_l: float
    bleu: float
    unheld_exact: float
    unheld_rouge_l: float
    unheld_bleu: float

    def to_dict(self) -> dict[str, float]:
        """By name, four digits."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def recovery(found: Tensor, ids: Tensor, held: Tensor) -> Recovery:
    """Compare predicted with true tokens [B, n]; held: bool [B, n]. Where all texts are held whole, unheld is 1."""
    whole = [(f.tolist(), t.tolist()) for f, t in zip(found, ids, strict=True)]
    gaps = [(f[~h].tolist(), t[~h].tolist()) for f, t, h in zip(found, ids, held, strict=True) if not h.all()]
    columns = [fmean([score(f, t) for f, t in pairs]) if pairs else 1.0
               for pairs in (whole, gaps) for score in (exact, rouge_l, bleu)]  # fmt: skip
    return Recovery(*columns)
