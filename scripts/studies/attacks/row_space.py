"""Foreign tokens from partial attention results by linear algebra: V candidates a token, whatever the block's length.

For one head let Y [R, E + 1] be what n unknown tokens of a query shard add to R rows of a CompNode, exp(lse) x (out,
1). Then Y = W [R, n] x [v_1, 1; ...; v_n, 1]: if R >= n and n <= E, the row space of Y is spanned by the unknown
tokens' own values. So each candidate is tested alone: does its value lie in the row space, head by head? That is V
tests a token, not V^n for all of them. With open results a CompNode has c rows for blocks of c / m tokens, so R >= n
holds in every plan; masked results are of the whole text, where n is larger (`token_sharding.plans.audit` counts it).

1. At layer 0 a value is a function of one token (and its place): blocks are read in any order.
2. At deeper layers of a causal model it is a function of the text so far: blocks are read from the front on, token by
   token. This is what is left to a node after a split, and it is enough.

The paper takes the sum for an intractable subset-sum problem (Appendix E, assumption B2). It is not one: a node gets
it for several rows at once, and in vectors longer than there are unknown tokens.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attacks.partial_results import known_rows
from attacks.row_matching import ALIKE, Attacked, Row
from attacks.view import ALL, View, added, rest
from attacks.vocab_matching import CHUNK, Progress

_CLEAR = 0.25
"""A misfit below this part of the median candidate's is a hit: hits have 1e-5 in float32, 0.1 as float16 numbers."""

_SHORTLIST = 3
"""Candidates kept for each unknown position where values do not tell places apart."""


def read_results(
    view: View, model: Attacked, found: Mapping[int, int], vocabulary: Tensor, progress: Progress | None = None
) -> tuple[dict[int, int], int]:
    """Layer 0: tokens by position beyond `found`, and how many candidates were tested."""
    tokens = dict(found)
    known = known_rows(view, model, tokens)
    tried = 0
    for shard in view.shards:
        refused: set[tuple[int, ...]] = set()
        while True:
            rows, unknown = _readable(view, shard, tokens, refused)
            if not unknown:
                break
            best = _read(view, rows, shard, unknown, known, model, vocabulary)
            tried += len(vocabulary) * len(unknown)
            if progress is not None:
                progress(len(vocabulary) * len(unknown))
            if best is None:
                refused.add(tuple(unknown))
                continue
            tokens |= best
            known |= known_rows(view, model, best)
    return {p: token for p, token in tokens.items() if p not in found}, tried


def read_from_front(
    view: View, model: Attacked, found: Sequence[int], vocabulary: Tensor, progress: Progress | None = None
) -> tuple[list[int], int]:
    """Layer >= 1 of a causal model: the tokens that follow `found`, the text so far, and how many were tested.

    Ends at a position that no result speaks of, or for which no candidate fits.
    """
    tokens = list(found)
    known: dict[int, Row] = {}
    tried = 0
    for position in range(len(tokens)):
        q, k, v = model.rows(tokens[:position], torch.tensor([[tokens[position]]]))
        known[position] = q[0], k[0], v[0]
    while len(tokens) < view.length:
        position = len(tokens)
        shard = ALL if ALL in view.shards else view.plan.shard_of(position)
        rows, unknown = _readable(view, shard, known, set(), position)
        if not unknown:
            break
        chunks = [model.rows(tokens, chunk.unsqueeze(1)) for chunk in vocabulary.split(CHUNK)]
        q, k, v = (torch.cat([chunk[i] for chunk in chunks]) for i in range(3))
        tried += len(vocabulary)
        if progress is not None:
            progress(len(vocabulary))
        misfit = _misfit(_basis(view, rows, shard, len(unknown), known), v)
        best = int(misfit.argmin())
        if float(misfit[best]) > _CLEAR * float(misfit.median()):
            break
        tokens.append(int(vocabulary[best]))
        known[position] = q[best], k[best], v[best]
    return tokens[len(found) :], tried


def _readable(
    view: View, shard: int, known: Mapping[int, object], refused: set[tuple[int, ...]], including: int | None = None
) -> tuple[list[int], list[int]]:
    """Rows that speak of the fewest unknown positions of a shard that can be read, and these positions (else empty)."""
    spoken: dict[int, tuple[int, ...]] = {}
    for row, other in view.results:
        if other == shard:
            unknown = tuple(p for p in view.visible(row, shard) if p not in known)
            if unknown:
                spoken[row] = unknown
    repeat = view.call.heads // view.call.groups
    for chosen in sorted(set(spoken.values()), key=len):
        rows = [row for row, unknown in spoken.items() if set(unknown) <= set(chosen)]
        wanted = chosen not in refused and (including is None or including in chosen)
        if wanted and len(chosen) <= min(len(rows) * repeat, view.call.value_dim):
            return rows, list(chosen)
    return [], []


def _basis(view: View, rows: Sequence[int], shard: int, unknown: int, known: Mapping[int, Row]) -> Tensor:
    """An orthonormal basis of what the unknown tokens span, for each key/value head: [G, unknown, E + 1]."""
    left = torch.stack([rest(view, row, shard, known) for row in rows])
    grouped: Tensor = left.view(len(rows), view.call.groups, -1, left.shape[-1]).transpose(0, 1).flatten(1, 2)
    spanned: Tensor = torch.linalg.svd(grouped, full_matrices=False).Vh
    return spanned[:, :unknown]


def _misfit(basis: Tensor, values: Tensor) -> Tensor:
    """How far candidates' values [V, G, E] lie from the span, root of the sum of squares over heads: [V]."""
    vectors = torch.cat([values, torch.ones_like(values[..., :1])], -1).double().transpose(0, 1)
    vectors = vectors / vectors.norm(dim=-1, keepdim=True)
    outside: Tensor = vectors - (vectors @ basis.transpose(1, 2)) @ basis
    return outside.square().sum((0, 2)).sqrt()


def _read(
    view: View, rows: Sequence[int], shard: int, unknown: Sequence[int], known: Mapping[int, Row], model: Attacked,
    vocabulary: Tensor,
) -> dict[int, int] | None:  # fmt: skip
    """Tokens of `unknown` positions, or None if the best ones do not add up to what was received."""
    basis = _basis(view, rows, shard, len(unknown), known)
    made = {p: model.alone(p, vocabulary) for p in unknown}
    misfits = {p: _misfit(basis, made[p][2]) for p in unknown}
    goal = torch.stack([rest(view, row, shard, known) for row in rows]).flatten()

    def columns(position: int, places: Tensor) -> Tensor:
        """Parts of candidates at a position in all results, [places, numbers]."""
        keys, values = made[position][1][places], made[position][2][places]
        return torch.cat([added(view, row, shard, position, keys, values).flatten(1) for row in rows], 1)

    def fits(choice: Mapping[int, int]) -> bool:
        total = torch.stack([columns(p, torch.tensor([place]))[0] for p, place in choice.items()]).sum(0)
        return float((total - goal).norm()) <= ALIKE * float(goal.norm())

    nearest = {p: int(misfits[p].argmin()) for p in unknown}
    if not fits(nearest):
        # Values without places (rotary positions turn keys only): the weights tell which token stands where.
        short = min(_SHORTLIST * len(unknown), len(vocabulary), max(1, len(goal) // len(unknown)))
        places = {p: misfits[p].topk(short, largest=False).indices for p in unknown}
        matrix = torch.cat([columns(p, places[p]) for p in unknown]).T
        weights = torch.linalg.lstsq(matrix, goal.unsqueeze(1), driver="gelsd").solution.view(len(unknown), short)
        nearest = {p: int(places[p][int(weights[i].argmax())]) for i, p in enumerate(unknown)}
        if not fits(nearest):
            return None
    return {p: int(vocabulary[place]) for p, place in nearest.items()}
