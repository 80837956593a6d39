"""The attack of Theorem 6.2: foreign tokens from the partial attention results that a CompNode receives at layer 0.

Row r of a CompNode gets, for every query shard k, the attention of its query over the keys of shard k up to r. At
layer 0 keys and values are functions of single tokens, so between two of its rows only the new tokens of shard k
are unknown: V^g candidates for g of them, shard by shard, whatever the other shards hold. A result is a sum of its
tokens' parts, so a table of V parts for each position is made once and candidates cost a matrix product. `row_space`
needs no such search; this is the theorem's own.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attacks.row_matching import ALIKE, Attacked, Row
from attacks.view import View, parts, rest
from attacks.vocab_matching import Progress, candidates


def search_results(
    view: View, model: Attacked, found: Mapping[int, int], vocabulary: Tensor, budget: int,
    progress: Progress | None = None,
) -> tuple[dict[int, int], int]:  # fmt: skip
    """Tokens by position beyond `found`, and how many candidates were tried: at most `budget` for each gap of a shard.

    A shard is given up where its next gap is beyond the budget or no candidate comes near what was received.
    """
    tokens = dict(found)
    known = known_rows(view, model, tokens)
    tried = 0
    for shard in view.shards:
        for row in sorted(r for r, s in view.results if s == shard):
            unknown = [p for p in view.visible(row, shard) if p not in tokens]
            if not unknown:
                continue
            count = len(vocabulary) ** len(unknown)
            if count > budget:
                break
            best = _best(view, row, shard, unknown, known, model, vocabulary, progress)
            tried += count
            if best is None:
                break
            tokens |= best
            known |= known_rows(view, model, best)
    return {p: token for p, token in tokens.items() if p not in found}, tried


def known_rows(view: View, model: Attacked, tokens: Mapping[int, int]) -> dict[int, Row]:
    """Layer-0 rows of known tokens: those that were seen, else computed."""
    made = {}
    for position, token in tokens.items():
        if position in view.rows:
            made[position] = view.rows[position]
        else:
            q, k, v = model.alone(position, torch.tensor([token]))
            made[position] = q[0], k[0], v[0]
    return made


def _best(
    view: View, row: int, shard: int, unknown: Sequence[int], known: Mapping[int, Row], model: Attacked,
    vocabulary: Tensor, progress: Progress | None,
) -> dict[int, int] | None:  # fmt: skip
    """Tokens of the `unknown` positions whose parts sum up nearest (L2) to what the row received, if near."""
    goal = rest(view, row, shard, known).flatten()
    tables = [parts(view, row, shard, p, *model.alone(p, vocabulary)[1:]).flatten(1) for p in unknown]
    last = tables[-1]
    norms = last.square().sum(1)
    best: list[int] = []
    smallest = float("inf")
    places = torch.arange(len(vocabulary))
    heads = candidates(places, len(unknown) - 1) if len(unknown) > 1 else iter([places[:1].unsqueeze(1)[:, :0]])
    for head in heads:
        left = goal - sum(
            (table[head[:, i]] for i, table in enumerate(tables[:-1])), start=torch.zeros(len(head), len(goal))
        )
        # |left - last|^2 for all pairs, by one matrix product
        distance = left.square().sum(1, keepdim=True) + norms - 2 * left @ last.T
        index = int(distance.argmin())
        if float(distance.view(-1)[index]) < smallest:
            smallest = float(distance.view(-1)[index])
            best = [*head[index // len(last)].tolist(), index % len(last)]
        if progress is not None:
            progress(len(head) * len(last))
    if smallest > (ALIKE * float(goal.norm())) ** 2:
        return None
    return {position: int(vocabulary[index]) for position, index in zip(unknown, best, strict=True)}
