"""Foreign tokens from a CompNode's own attention at layer 0, where it is one sum over all tokens: sparse recovery.

Each row's total is the sum of what its tokens add (view.parts), and what token t at position p adds is known for each
of the V candidates: with R rows, R x H x (E + 1) linear equations in n x V unknown indicators, of which n are one. The
equations are far fewer than the unknowns and far more than the bits, so:

1. Rank the candidates of each position by a matched filter: the other positions' tokens are noise whose mean and
   covariance follow from the vocabulary; whitened by it, the true token stands out.
2. Keep as many candidates as there are equations, and solve for all indicators at once by least squares. If the true
   ones are among them, the solution is theirs: 1 at each true token, 0 elsewhere.

V candidates a token, and a factorisation of the covariance. Masking the results of single shards does not prevent
this, because a CompNode needs its own attention; after a split there is no such list (but see `likelihood`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from attacks.partial_results import known_rows
from attacks.row_matching import ALIKE, Attacked
from attacks.view import View, added, rest
from attacks.vocab_matching import Progress

_SAMPLE = 512
"""Candidates from which mean and covariance of a position's parts are taken."""

_EQUATIONS = 4096
"""Equations that are used at most (their covariance is a square matrix)."""

_SLACK = 0.9
"""Shortlisted candidates for each equation."""

_RIDGE = 1e-9
"""Of the covariance's mean diagonal: makes it invertible in float64."""


def read_totals(
    view: View, model: Attacked, found: Mapping[int, int], vocabulary: Tensor, most: int = 64,
    progress: Progress | None = None, seed: int = 0,
) -> tuple[dict[int, int], int]:  # fmt: skip
    """Layer 0: tokens by position beyond `found`, and how many candidates were ranked.

    Reads, shard by shard (masked results: all at once), the unknown tokens that the most rows speak of, at most `most`
    at a time; gives up where the solution does not add up to what was received.
    """
    tokens = dict(found)
    tried = 0
    chance = torch.Generator().manual_seed(seed)
    for shard in view.shards:
        while True:
            spoken: dict[tuple[int, ...], list[int]] = {}
            for row in sorted(r for r, s in view.results if s == shard):
                unknown = tuple(p for p in view.visible(row, shard) if p not in tokens)
                spoken.setdefault(unknown, []).append(row)
            sets = [unknown for unknown in spoken if 0 < len(unknown) <= most]
            if not sets:
                break
            chosen = min(sets, key=len)
            best = _solve(view, spoken[chosen], shard, chosen, tokens, model, vocabulary, chance, progress)
            tried += len(chosen) * len(vocabulary)
            if best is None:
                break
            tokens |= best
    return {p: token for p, token in tokens.items() if p not in found}, tried


def _solve(
    view: View, rows: list[int], shard: int, unknown: tuple[int, ...], tokens: Mapping[int, int], model: Attacked,
    vocabulary: Tensor, chance: torch.Generator, progress: Progress | None,
) -> dict[int, int] | None:  # fmt: skip
    known = known_rows(view, model, tokens)
    goal = torch.stack([rest(view, row, shard, known) for row in rows]).flatten()
    step = -(-len(goal) // _EQUATIONS)
    weight = torch.stack([rest(view, row, shard, known)[:, -1:].expand(-1, view.call.value_dim + 1) for row in rows])
    scale = weight.flatten()[::step].clamp_min(1e-12)  # each row and head counts by what is unknown of it
    goal = goal[::step] / scale

    def columns(position: int, ids: Tensor) -> Tensor:
        _, keys, values = model.alone(position, ids)
        made = torch.cat([added(view, row, shard, position, keys, values).flatten(1) for row in rows], 1)
        return made[:, ::step] / scale

    means, left = {}, goal.clone()
    covariance = torch.zeros(len(goal), len(goal), dtype=torch.float64)
    for position in unknown:
        sample = vocabulary[torch.randperm(len(vocabulary), generator=chance)[:_SAMPLE]]
        parts = columns(position, sample)
        means[position] = parts.mean(0)
        left -= means[position]
        parts = (parts - means[position]) / len(sample) ** 0.5
        covariance += parts.T @ parts
    covariance.diagonal().add_(float(covariance.diagonal().mean()) * _RIDGE)
    factor = torch.linalg.cholesky(covariance)
    seen = torch.linalg.solve_triangular(factor, left.unsqueeze(1), upper=False)
    short = min(len(vocabulary), max(1, int(_SLACK * len(goal) / len(unknown))))
    places = {}
    for position in unknown:
        parts = columns(position, vocabulary) - means[position]
        white = torch.linalg.solve_triangular(factor, parts.T, upper=False)
        likelihood = (white.T @ seen).squeeze(1) - 0.5 * white.square().sum(0)
        places[position] = likelihood.topk(short).indices
        if progress is not None:
            progress(len(vocabulary))
    matrix = torch.cat([columns(p, vocabulary[places[p]]) for p in unknown]).T
    solution = torch.linalg.lstsq(matrix, goal.unsqueeze(1), driver="gelsd", rcond=1e-12).solution
    best = solution.view(len(unknown), short).argmax(1)
    made = {p: int(vocabulary[places[p][place]]) for p, place in zip(unknown, best.tolist(), strict=True)}
    total = sum((columns(p, torch.tensor([token]))[0] for p, token in made.items()), start=torch.zeros_like(goal))
    return made if float((total - goal).norm()) <= ALIKE * float(goal.norm()) else None
