"""A token from a CompNode's own attention at any layer, by what other texts look like: a causal model's next one, an
encoder's at any position.

Behind a split there is no list of what an unknown token may add to a row's attention, because its rows depend on all
tokens before it. But for the first unknown position of a text there is one, V candidates, and of the positions after
it an attacker knows how they vary: it runs the public model over texts of its own. So, for each candidate, what is left
of the rows' attention without it is compared with that (a normal distribution of the same mean and covariance; the
matched filter of `sparse_totals`, with other texts in place of the vocabulary). Masked results are enough.

An encoder has no text so far: rows at every position depend on all of it. A candidate then counts with its mean over a
few contexts, and everything else that is unknown with its mean and covariance over other texts, together.

V candidates a token and one factorisation. The answer is a ranking, not a proof; a language model's expectations or a
beam over several positions make it one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attacks.row_matching import Attacked, Contextual
from attacks.view import ALL, View, added, rest
from attacks.vocab_matching import CHUNK
from private_llm.errors import DomainError

_RIDGE = 1e-8
"""Of the covariance's mean diagonal: float32 results carry no more, and it makes few texts enough."""


def rank_next(view: View, model: Attacked, found: Sequence[int], vocabulary: Tensor, texts: Tensor) -> Tensor:
    """`vocabulary`, the likeliest token after the text so far (`found`) first.

    texts [N, length]: the attacker's own, at best like the attacked ones; only rows up to their length are used. Raises
    DomainError if no row of the view speaks of the position.
    """
    position = len(found)
    speaking = [row for row, shard in sorted(view.results) if shard == ALL and position in view.visible(row, ALL)]
    rows = [row for row in speaking if row <= texts.shape[1]]
    if not rows:
        raise DomainError(
            f"position {position}: masked results of rows {speaking or '(none)'} speak of it; want one of a row up to "
            f"{texts.shape[1]}, the length of the texts"
        )
    known = dict(view.rows)
    for place in range(position):
        query, key, value = model.rows(found[:place], torch.tensor([[found[place]]]))
        known[place] = query[0], key[0], value[0]
    left = torch.cat([rest(view, row, ALL, known).flatten() for row in rows])
    later = [p for p in range(position + 1, max(rows)) if p not in known]
    mean, spread = _others(view, model, rows, later, texts)
    factor = torch.linalg.cholesky(spread + _RIDGE * spread.diagonal().mean() * torch.eye(len(spread)))
    misfits = []
    for chunk in vocabulary.split(CHUNK):
        _, keys, values = model.rows(found, chunk.unsqueeze(1))
        without = left - mean - _parts(view, rows, position, keys, values)
        misfits.append(torch.linalg.solve_triangular(factor, without.T, upper=False).norm(dim=0))
    return vocabulary[torch.cat(misfits).argsort()]


def rank_anywhere(
    view: View, model: Contextual, position: int, vocabulary: Tensor, texts: Tensor, contexts: int = 4
) -> Tensor:
    """`vocabulary`, the likeliest token at `position` of an encoder's text first; nothing else of the text is known.

    texts [N, length of the attacked text]: the attacker's own; the first `contexts` of them surround each candidate.
    Raises DomainError if no row of the view speaks of the position, or its row is seen.
    """
    rows = [row for row, shard in sorted(view.results) if shard == ALL and position in view.visible(row, ALL)]
    if not rows or position in view.rows or texts.shape[1] != view.length:
        raise DomainError(
            f"position {position}: {len(rows)} masked results speak of it, texts have {texts.shape[1]} tokens; want at "
            f"least one result, {view.length} tokens, and a position whose row is not seen"
        )
    left = torch.cat([rest(view, row, ALL, view.rows).flatten() for row in rows])
    _, keys, values = model.everywhere(texts)
    unknown = [p for p in range(view.length) if p not in view.rows and p != position]
    others = torch.zeros(len(texts), len(left), dtype=torch.float64)
    for place in unknown:
        others += _parts(view, rows, place, keys[:, place], values[:, place])
    spread = others.T.cov() if unknown else torch.eye(len(left), dtype=torch.float64)
    factor = torch.linalg.cholesky(spread + _RIDGE * spread.diagonal().mean() * torch.eye(len(left)))
    misfits = []
    for chunk in vocabulary.split(max(1, CHUNK // contexts)):
        filled = texts[:contexts].repeat(len(chunk), 1)
        filled[:, position] = chunk.repeat_interleave(contexts)
        _, keys, values = (part[:, position] for part in model.everywhere(filled))
        each = _parts(view, rows, position, keys, values)
        without = left - others.mean(0) - each.view(len(chunk), contexts, -1).mean(1)
        misfits.append(torch.linalg.solve_triangular(factor, without.T, upper=False).norm(dim=0))
    return vocabulary[torch.cat(misfits).argsort()]


def _others(
    view: View, model: Attacked, rows: Sequence[int], later: Sequence[int], texts: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean [M] and covariance [M, M] of what the unknown positions after it add together, in other texts."""
    count = len(rows) * view.call.heads * (view.call.value_dim + 1)
    mean, spread = torch.zeros(count, dtype=torch.float64), torch.zeros(count, count, dtype=torch.float64)
    if not later:
        return mean, torch.eye(
            count, dtype=torch.float64
        )  # nothing else is unknown: the right candidate leaves nothing
    for place in later:
        _, keys, values = model.rows([], texts[:, : place + 1])
        made = _parts(view, rows, place, keys, values)
        mean = mean + made.mean(0)
        spread = spread + made.T.cov()
    return mean, spread


def _parts(view: View, rows: Sequence[int], position: int, keys: Tensor, values: Tensor) -> Tensor:
    """What tokens at a position add to all rows, [K, M]."""
    return torch.cat([added(view, row, ALL, position, keys, values).flatten(1) for row in rows], 1)
