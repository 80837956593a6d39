"""Attention of one query to the entries that are most like it: which ones, nobody learns (MPCache, section 4.3).

    likeness    q . representative of every cluster, one product                            nn/clusters.py
    choice      level by level the best clusters, as secret rows                            oblivious/{topk,chosen_rows}
    scores      q . k of all entries, one product: its traffic is that of its outputs
    taken       the scores of the chosen clusters, with those of the first and newest entries
    softmax     of what was taken
    put back    probabilities among zeros, and their product with all values

The paper gathers keys and values instead, which moves 2 D elements for each chosen entry where scores move one for each
query head; that way is `gather="keys"`. What is public is the shape alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.approx.tanh import precise_tanh
from private_llm.exact.maximum import concatenated
from private_llm.kv_policies.policy import ClusterShape
from private_llm.nn.attention import mixed_values, pattern_of, scaled, soften
from private_llm.nn.selection_costs import LIKENESS_BITS, LIKENESS_REACH, cheapest_gather
from private_llm.oblivious.chosen_rows import ChosenRows, one_hot_rows, shuffled_rows
from private_llm.oblivious.topk import largest_bits
from private_llm.ranges import REACH
from private_llm.tensor.fixed import Fixed, arithmetic
from private_llm.tensor.range_check import watch_flat
from private_llm.tensor.scale import times_scalar
from private_llm.tensor.secret import SLACK, SecretTensor

FORBIDDEN = 2.0**16
"""What a score at padding is less."""


@dataclass(frozen=True, eq=False)
class Chosen:
    """Clusters that queries attend to, for each row and key head: `blocks` choices. levels: one in the other.

    order: of the entries that `shape` is about, public, int64 [B or 1, n] (`kv_policies/padding.py`); None: theirs.
    """

    shape: ClusterShape
    gather: str
    levels: tuple[ChosenRows, ...]
    order: Tensor | None = None

    def arranged(self, x: Fixed) -> Fixed:
        """Entries of x [B, G, m, n] in `order`. Local."""
        return x if self.order is None else reordered(x, self.order, 3)

    def in_place(self, x: Fixed) -> Fixed:
        """The inverse of `arranged`."""
        return x if self.order is None else reordered(x, self.order.argsort(-1), 3)

    def take(self, x: Fixed) -> Fixed:
        """Entries of chosen clusters: [blocks, clustered, P] to [blocks, chosen, P]."""
        for rows, size, count in zip(self.levels, self.shape.sizes, self.shape.there, strict=True):
            width = x.shape[-1]
            table = x.view(lambda part, n=count, s=size: part.reshape(len(part), n, s * part.shape[-1]))  # type: ignore[misc]
            x = rows.take(table).view(lambda part, w=width: part.reshape(len(part), -1, w))  # type: ignore[misc]
        return x

    def put_back(self, y: Fixed) -> Fixed:
        """Entries where `take` found them, zeros elsewhere: [blocks, chosen, P] to [blocks, clustered, P]."""
        for rows, size, kept in reversed(list(zip(self.levels, self.shape.sizes, self.shape.kept, strict=True))):
            width = y.shape[-1]
            table = y.view(lambda part, n=kept, s=size: part.reshape(len(part), n, s * part.shape[-1]))  # type: ignore[misc]
            y = rows.put_back(table).view(lambda part, w=width: part.reshape(len(part), -1, w))  # type: ignore[misc]
        return y


def reordered(x: Fixed, order: Tensor, dim: int) -> Fixed:
    """Entries of x [B, G, ..] along `dim` in a public order, int64 [B or 1, entries of the result]. Local."""
    shape = [1] * len(x.shape)
    shape[0], shape[dim] = order.shape
    wanted = [*x.shape[:dim], order.shape[1], *x.shape[dim + 1 :]]
    return x.view(lambda part: part.gather(dim, order.to(part.device).view(shape).expand(wanted)))


def choose_clusters(
    query: Fixed, representatives: Sequence[Fixed], shape: ClusterShape, gather: str, value_size: int,
    order: Tensor | None = None, tokens: Tensor | None = None,
) -> Chosen:  # fmt: skip
    """The clusters most like a query [B, H, 1, D], by `representatives` [B, G, clusters, D] of each level.

    order: as `Chosen`. tokens: bool [B or 1, clusters of all levels], False for those of padding, which rank last.
    Likeness must stay below 2^24; it is watched. One product of all levels' likenesses (a truncation before it, of a
    query that a rotary embedding left with many fractional bits: the ring has no room for both), and for each level a
    top-k and the making of its rows. gather: as `Selection`, value_size: of a value, for "auto".
    """
    batch, heads, _, depth = query.shape
    groups = representatives[0].shape[1]
    blocks, shared = batch * groups, heads // groups
    total = query.view(lambda part: part.reshape(batch, groups, shared, depth).sum(2, keepdim=True, dtype=part.dtype))
    total = total.at(query.session.frac) if total.frac > query.session.frac + SLACK else total
    every = concatenated(list(representatives), 2)
    likeness = total.matmul(every.view(lambda part: part.transpose(-1, -2)), frac=LIKENESS_BITS)
    if tokens is not None:
        likeness = likeness.scale_int(tokens[:, None, None].to(likeness.share.parts[0]))
    watch_flat(likeness, LIKENESS_REACH - 1 + likeness.frac)
    if tokens is not None:
        below = 2.0 ** (LIKENESS_REACH - 1) * (~tokens)[:, None, None].double()
        likeness = likeness - below.to(likeness.share.parts[0].device)
    likeness = likeness.view(lambda part: part.reshape(blocks, -1))
    if gather == "auto":
        gather = cheapest_gather(query.session, shape, blocks, shared, depth, value_size)
    made: list[ChosenRows] = []
    start = 0
    for level, (there, kept) in enumerate(zip(shape.there, shape.kept, strict=True)):
        count = representatives[level].shape[2]
        own = likeness.view(lambda part, a=start, n=count: part[:, a : a + n])  # type: ignore[misc]
        start += count
        for rows, size in zip(made, shape.sizes, strict=False):  # those within the clusters that are left
            inner = size // shape.sizes[level]
            own = rows.take(own.view(lambda part, n=inner: part.unflatten(1, (-1, n))))  # type: ignore[misc]
            own = own.view(lambda part: part.flatten(1))
        made.append(_rows(own, there, kept, gather))
    return Chosen(shape, gather, tuple(made), order)


def _rows(likeness: Fixed, there: int, kept: int, gather: str) -> ChosenRows:
    bits = largest_bits(likeness, kept, bits=likeness.frac + LIKENESS_REACH + 1)
    marks = arithmetic(likeness.session, bits, [1.0], 0).view(lambda part: part[: likeness.numel()].view(-1, there))
    return shuffled_rows(marks, bits, kept) if gather == "shuffled-scores" else one_hot_rows(marks, kept)


def attend_to_chosen(
    query: Fixed, key: Fixed, value: Fixed, mask: Tensor | None, scale: float, softcap: float | None,
    sinks: Fixed | None, chosen: Chosen, addend: Fixed | None = None, weigh: bool = True,
) -> tuple[Fixed, Fixed | None]:  # fmt: skip
    """Attention of q [B, H, 1, D] to the chosen of k, v [B, G, n, D]: [B, H, 1, Dv]; each entry's mass [B, G, n].

    mask: public, bool [B or 1, H or 1, 1, n]; a row without any entry stays zero (heads that are left out), otherwise
    it may differ between rows of the batch alone. addend: secret, to the scores [B, G, 1, n], after `softcap`. weigh:
    whether masses are wanted, which `gather="keys"` pays for. Probabilities are those of `softmax` on the first, the
    chosen and the newest entries. Domain and errors as `attend`.
    """
    if chosen.gather == "keys":
        return _attend_to_gathered(query, key, value, mask, scale, softcap, sinks, chosen, addend, weigh)
    batch, heads, _, depth = query.shape
    groups, entries, shape = key.shape[1], key.shape[2], chosen.shape
    shared = heads // groups
    grouped = scaled(query.view(lambda part: part.reshape(batch, groups, shared, depth)), _inner(scale, softcap))
    grouped = grouped.at(query.session.frac) if grouped.frac > query.session.frac + SLACK else grouped
    turned = key.view(lambda part: part.transpose(-1, -2))
    scores = grouped.matmul(turned, frac=grouped.frac + key.frac)  # [B, G, shared, n], truncated when few are left
    seen = _seen(mask, batch)
    scores = scores if seen is None else scores.scale_int(seen[:, None].to(scores.share.parts[0]))
    watch_flat(scores, REACH - 1 + scores.frac)
    penalty = _penalty(scores, (batch, groups, 1, entries), seen, addend)
    if penalty is not None and softcap is None:
        scores, penalty = scores + penalty, None
    elif penalty is not None:  # a cap would hide it: one column more to take
        scores = concatenated([scores, penalty.at(scores.frac)], 2)
    scores = chosen.arranged(scores)
    columns, end = scores.shape[2], shape.first + shape.clustered
    rows = scores.view(lambda part: part[..., shape.first : end].transpose(2, 3).reshape(batch * groups, -1, columns))
    taken = chosen.take(rows).view(lambda part: part.view(batch, groups, -1, columns).transpose(2, 3))
    pieces = [taken, *(scores.view(lambda part, s=s: part[..., s]) for s in _outside(shape, entries))]  # type: ignore[misc]
    near = concatenated(pieces, 3)
    penalty = None if penalty is None else near.view(lambda part: part[:, :, shared:])
    weights = _weights(near.view(lambda part: part[:, :, :shared]), mask, softcap, sinks, heads, penalty)
    weights = weights.view(lambda part: part.reshape(batch, groups, shared, -1))
    count = shape.chosen
    rows = weights.view(lambda part: part[..., :count].transpose(2, 3).reshape(batch * groups, count, shared))
    spread = chosen.put_back(rows).view(lambda part: part.view(batch, groups, -1, shared).transpose(2, 3))
    first = weights.view(lambda part: part[..., count : count + shape.first])
    tail = weights.view(lambda part: part[..., count + shape.first :])
    whole = chosen.in_place(concatenated([first, spread, tail], 3))
    out = mixed_values(whole, value, pattern_of(None, batch, heads, 1, entries))
    return out.view(lambda part: part.reshape(batch, heads, 1, -1)), whole.sum(2)


def _attend_to_gathered(
    query: Fixed, key: Fixed, value: Fixed, mask: Tensor | None, scale: float, softcap: float | None,
    sinks: Fixed | None, chosen: Chosen, addend: Fixed | None, weigh: bool,
) -> tuple[Fixed, Fixed | None]:  # fmt: skip
    """The paper's way: keys and values of the chosen clusters are gathered, then attended to."""
    batch, heads, _, depth = query.shape
    groups, entries, shape = key.shape[1], key.shape[2], chosen.shape
    shared, end = heads // groups, shape.first + shape.clustered
    seen = _seen(mask, batch)
    key = key if seen is None else key.scale_int(seen.unsqueeze(-1).to(key.share.parts[0]))
    made = [key.at(query.session.frac), value.at(query.session.frac)]
    penalty = _penalty(query, (batch, groups, 1, entries), seen, addend)
    made += [] if penalty is None else [_column(penalty.at(query.session.frac))]
    both = concatenated(made, 3)
    both = both if chosen.order is None else reordered(both, chosen.order, 2)
    rows = both.view(lambda part: part[:, :, shape.first : end].reshape(batch * groups, -1, part.shape[-1]))
    taken = chosen.take(rows).view(lambda part: part.unflatten(0, (batch, groups)))
    pieces = [taken, *(both.view(lambda part, s=s: part[:, :, s]) for s in _outside(shape, entries))]  # type: ignore[misc]
    held = concatenated(pieces, 2)
    near = held.view(lambda part: part[..., :depth])
    grouped = scaled(query.view(lambda part: part.reshape(batch, groups, shared, depth)), _inner(scale, softcap))
    grouped = grouped.at(query.session.frac) if grouped.frac > query.session.frac + SLACK else grouped
    scores = grouped.matmul(near.view(lambda part: part.transpose(-1, -2)), frac=grouped.frac + near.frac)
    watch_flat(scores, REACH - 1 + scores.frac)
    penalty = None if penalty is None else _column(held.view(lambda part: part[..., -1:]))
    weights = _weights(scores, mask, softcap, sinks, heads, penalty)
    weights = weights.view(lambda part: part.reshape(batch, groups, shared, -1))
    there = held.view(lambda part: part[..., depth : depth + value.shape[-1]])
    out = mixed_values(weights, there, pattern_of(None, batch, heads, 1, held.shape[2]))
    out = out.view(lambda part: part.reshape(batch, heads, 1, -1))
    if not weigh:
        return out, None
    rows = weights.view(lambda part: part[..., : shape.chosen].sum(2, dtype=part.dtype).view(batch * groups, -1, 1))
    spread = chosen.put_back(rows).view(lambda part: part.view(batch, groups, -1))
    rest = weights.view(lambda part: part[..., shape.chosen :].sum(2, dtype=part.dtype))
    first, tail = (rest.view(lambda part, s=s: part[..., s]) for s in (slice(0, shape.first), slice(shape.first, None)))  # type: ignore[misc]
    mass = concatenated([first, spread, tail], 2)
    return out, mass if chosen.order is None else reordered(mass, chosen.order.argsort(-1), 2)


def _column(x: Fixed) -> Fixed:
    return x.view(lambda part: part.transpose(-1, -2))


def _zeros(like: Fixed, shape: tuple[int, ...]) -> Tensor:
    part = like.share.parts[0]
    return torch.zeros(shape, dtype=part.dtype, device=part.device)


def _inner(scale: float, softcap: float | None) -> float:
    return scale if softcap is None else scale / softcap


def _outside(shape: ClusterShape, entries: int) -> tuple[slice, slice]:
    """Entries that are in no cluster: the first ones and the newest."""
    return slice(0, shape.first), slice(shape.first + shape.clustered, entries)


def _seen(mask: Tensor | None, batch: int) -> Tensor | None:
    """bool [B, 1, n]: where some query head may look, which is everywhere but at padding; None: everywhere.

    Rows of heads left out do not count.
    """
    seen = None if mask is None else mask.any(1).expand(batch, 1, -1)
    seen = None if seen is None else seen | ~seen.any(-1, keepdim=True)
    return None if seen is None or bool(seen.all()) else seen


def _penalty(like: Fixed, shape: tuple[int, ...], seen: Tensor | None, addend: Fixed | None) -> Fixed | None:
    """What scores [B, G, 1, n] (shape) are less: where nobody may look, and by the secret addend. None: nothing."""
    if seen is None:
        return addend
    frac = like.session.frac
    made = like.with_share(like.proto.public(_zeros(like, shape)), frac) if addend is None else addend
    return made + ((~seen)[:, None] * -FORBIDDEN).to(like.share.parts[0].device).double()


def _weights(
    scores: Fixed, mask: Tensor | None, softcap: float | None, sinks: Fixed | None, heads: int, penalty: Fixed | None
) -> Fixed:
    """Softmax of gathered scores [B, G, shared, n] with many fractional bits; zeros for heads that are left out.

    penalty: to be added after the cap, [B, G, 1, n].
    """
    batch, frac = scores.shape[0], scores.session.frac
    scores = scores.at(frac if softcap is None else frac + SLACK)
    if softcap is not None:
        scores = times_scalar(SecretTensor(precise_tanh(scores)), softcap).at(frac)
    if penalty is not None:
        scores = scores + penalty.at(frac)
    scores = scores.view(lambda part: part.reshape(batch, heads, 1, -1))
    active = None if mask is None else mask.any(-1, keepdim=True).expand(batch, heads, 1, 1)
    if active is None or bool(active.all()):
        pattern = pattern_of(None, batch, heads, 1, scores.shape[-1])
    else:
        pattern = pattern_of(active.expand(-1, -1, -1, scores.shape[-1]), batch, heads, 1, scores.shape[-1])
        scores = scores.view(lambda part: part.reshape(-1)[pattern.select])
    every = None if sinks is None else _of_rows(sinks.at(scores.frac), pattern.row_numbers % heads)
    return soften(scores, pattern, every)


def _of_rows(sinks: Fixed, rows: Tensor) -> Fixed:
    return sinks.view(lambda part: part[rows.to(part.device)])
