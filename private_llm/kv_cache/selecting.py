"""Attention of one query to the entries that are most like it: which ones, nobody learns (MPCache, section 4.3).

    likeness    q . representative of every cluster, one product                            clusters.py
    choice      level by level the best clusters, as secret rows                            oblivious/{topk,chosen_rows}
    scores      q . k of all entries, one product: its traffic is that of its outputs
    taken       the scores of the chosen clusters, with those of the first and newest entries
    softmax     of what was taken
    put back    probabilities among zeros, and their product with all values

The paper gathers keys and values instead, which moves 2 D elements for each chosen entry where scores move one for each
query head; that way is `gather="keys"`. What is public is the shape alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from private_llm.approx.activations import precise_tanh
from private_llm.exact.maximum import concatenated
from private_llm.kv_cache.padding import Arranged
from private_llm.kv_cache.policies.policy import ClusterShape
from private_llm.kv_cache.selection_costs import LIKENESS_BITS, LIKENESS_REACH, cheapest_gather, composes
from private_llm.nn.attention import AttentionQuery, mixed_values, pattern_of, scaled, score_width, soften
from private_llm.oblivious.chosen_rows import ChosenRows, OneHotRows, one_hot_rows, shuffled_rows
from private_llm.oblivious.topk import largest_bits
from private_llm.ranges import REACH
from private_llm.tensor.fixed import Fixed, arithmetic, narrows
from private_llm.tensor.range_check import watch_flat
from private_llm.tensor.scale import times_scalar
from private_llm.tensor.secret import SLACK, SecretTensor

FORBIDDEN = 2.0**16  # what a score at padding is less


@dataclass(frozen=True, eq=False)
class Chosen:
    """Clusters that queries attend to, for each row and key head: `blocks` choices. levels: one in the other, or one
    for all, which chooses among the smallest clusters. arranged: of the entries that `shape` is about, where some are
    padding, [B or 1, n]; None: they are as they lie.
    """

    shape: ClusterShape
    gather: str
    levels: tuple[ChosenRows, ...]
    arranged: Arranged | None = None

    def in_order(self, x: Fixed, dim: int = 3) -> Fixed:
        """Entries of x along `dim` as `arranged`, zeros where there is none. Local."""
        return x if self.arranged is None else reordered(x, self.arranged.order, dim)

    def in_place(self, x: Fixed, held: int, dim: int = 3) -> Fixed:
        """The inverse of `in_order`."""
        return x if self.arranged is None else reordered(x, self.arranged.in_place(held), dim)

    def seen(self, seen: Tensor | None) -> Tensor | None:
        """bool [B, 1, slots]: where there is an entry that may be seen; None: everywhere."""
        if self.arranged is None:
            return seen
        there = self.arranged.tokens.unsqueeze(1)
        if seen is None:
            return there
        more = torch.constant_pad_nd(seen, (0, 1))
        return more.gather(-1, self.arranged.order.unsqueeze(1).expand(len(seen), 1, -1))

    @property
    def _steps(self) -> list[tuple[ChosenRows, int]]:
        """With entries of a row."""
        return list(zip(self.levels, self.shape.sizes[-len(self.levels) :], strict=True))

    def take(self, x: Fixed) -> Fixed:
        """Entries of chosen clusters: [blocks, clustered, P] to [blocks, chosen, P]."""
        for rows, size in self._steps:
            width = x.shape[-1]
            table = x.view(lambda part, n=rows.rows, s=size: part.reshape(len(part), n, s * part.shape[-1]))  # type: ignore[misc]
            x = rows.take(table).view(lambda part, w=width: part.reshape(len(part), -1, w))  # type: ignore[misc]
        return x

    def put_back(self, y: Fixed) -> Fixed:
        """Entries where `take` found them, zeros elsewhere: [blocks, chosen, P] to [blocks, clustered, P]."""
        for rows, size in reversed(self._steps):
            width = y.shape[-1]
            table = y.view(lambda part, n=rows.kept, s=size: part.reshape(len(part), n, s * part.shape[-1]))  # type: ignore[misc]
            y = rows.put_back(table).view(lambda part, w=width: part.reshape(len(part), -1, w))  # type: ignore[misc]
        return y


def reordered(x: Fixed, order: Tensor, dim: int) -> Fixed:
    """Entries of x [B, G, ..] along `dim` in a public order [B or 1, entries]; zeros where it says "beyond". Local."""
    shape = [1] * len(x.shape)
    shape[0], shape[dim] = order.shape
    wanted = [*x.shape[:dim], order.shape[1], *x.shape[dim + 1 :]]
    more = bool((order == x.shape[dim]).any())

    def moved(part: Tensor) -> Tensor:
        wide = torch.constant_pad_nd(part, (0, 0) * (part.ndim - 1 - dim) + (0, 1)) if more else part
        return wide.gather(dim, order.to(part.device).view(shape).expand(wanted))

    return x.view(moved)


def choose_clusters(
    query: Fixed, representatives: Sequence[Fixed], shape: ClusterShape, gather: str, value_size: int,
    arranged: Arranged | None = None,
) -> Chosen:  # fmt: skip
    """The clusters most like a query [B, H, 1, D], by `representatives` [B, G, clusters, D] of each level.

    arranged: as `Chosen`; clusters of padding rank last. Likeness must stay below 2^24; it is watched.

    One product of all levels' likenesses (a truncation before it, of a
    query that a rotary embedding left with many fractional bits: the ring has no room for both), and for each level a
    top-k and the making of its rows. gather: as `Selection`, value_size: of a value, for "auto".
    """
    batch, heads, _, depth = query.shape
    groups = representatives[0].shape[1]
    blocks, shared = batch * groups, heads // groups
    total = query.view(lambda part: part.reshape(batch, groups, shared, depth).sum(2, keepdim=True, dtype=part.dtype))
    total = total.rescale(query.session.frac) if total.frac > query.session.frac + SLACK else total
    every = concatenated(list(representatives), 2)
    likeness = total.matmul(every.view(lambda part: part.transpose(-1, -2)), frac=LIKENESS_BITS)
    tokens = None if arranged is None else torch.cat([arranged.of_tokens(size) for size in shape.sizes], 1)
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
    if composes(shape, shared, depth, value_size, gather):
        made = [reduce(_within, made)]
    return Chosen(shape, gather, tuple(made), arranged)


def _within(outer: ChosenRows, inner: ChosenRows) -> ChosenRows:
    if not (isinstance(outer, OneHotRows) and isinstance(inner, OneHotRows)):
        raise TypeError("only one-hot rows compose")
    return inner.within(outer)


def _rows(likeness: Fixed, there: int, kept: int, gather: str) -> ChosenRows:
    bits = largest_bits(likeness, kept, bits=likeness.frac + LIKENESS_REACH + 1)
    marks = arithmetic(likeness.session, bits, [1.0], 0).view(lambda part: part[: likeness.numel()].view(-1, there))
    return shuffled_rows(marks, bits, kept) if gather == "shuffled-scores" else one_hot_rows(marks, kept)


def attend_to_chosen(
    call: AttentionQuery, key: Fixed, value: Fixed, chosen: Chosen, addend: Fixed | None = None, weigh: bool = True
) -> tuple[Fixed, Fixed | None]:
    """Attention of q [B, H, 1, D] to the chosen of k, v [B, G, n, D]: [B, H, 1, Dv]; each entry's mass [B, G, n].

    The mask [B or 1, H or 1, 1, n]: a row without any entry stays zero (heads that are left out), otherwise it may
    differ between rows of the batch alone. addend: secret, to the scores [B, G, 1, n], after `softcap`. weigh:
    whether masses are wanted, which `gather="keys"` pays for. Probabilities are those of `softmax` on the first, the
    chosen and the newest entries. Domain and errors as `attend`.
    """
    if chosen.gather == "keys":
        return _attend_to_gathered(call, key, value, chosen, addend, weigh)
    batch, heads = call.query.shape[:2]
    groups, entries, shape = key.shape[1], key.shape[2], chosen.shape
    shared, seen, takes = heads // groups, _seen(call.mask, batch), len(chosen.levels)
    scores = _scores(call, key, seen is None and addend is None, takes, seen)
    scores = chosen.in_order(scores)
    addend = None if addend is None else chosen.in_order(addend)
    penalty = _penalty(scores, (batch, groups, 1, scores.shape[3]), chosen.seen(seen), addend)
    if penalty is not None and call.softcap is None:
        scores, penalty = scores + penalty, None
    elif penalty is not None:  # a cap would hide it: one column more to take
        scores = concatenated([scores, penalty.rescale(scores.frac)], 2)
    columns, end = scores.shape[2], shape.first + shape.clustered
    rows = scores.view(lambda part: part[..., shape.first : end].transpose(2, 3).reshape(batch * groups, -1, columns))
    taken = chosen.take(rows).view(lambda part: part.view(batch, groups, -1, columns).transpose(2, 3))
    near = concatenated([taken, scores[..., : shape.first], scores[..., end:]], 3)
    penalty = None if penalty is None else near[:, :, shared:]
    weights = _weights(near[:, :, :shared], call, penalty)
    weights = weights.view(lambda part: part.reshape(batch, groups, shared, -1))
    count = shape.chosen
    rows = weights.view(lambda part: part[..., :count].transpose(2, 3).reshape(batch * groups, count, shared))
    spread = chosen.put_back(rows).view(lambda part: part.view(batch, groups, -1, shared).transpose(2, 3))
    around = [weights[..., count : count + shape.first], spread, weights[..., count + shape.first :]]
    whole = chosen.in_place(concatenated(around, 3), entries)
    out = mixed_values(whole, value, pattern_of(None, batch, heads, 1, entries))
    return out.view(lambda part: part.reshape(batch, heads, 1, -1)), whole.sum(2)


def _attend_to_gathered(
    call: AttentionQuery, key: Fixed, value: Fixed, chosen: Chosen, addend: Fixed | None, weigh: bool
) -> tuple[Fixed, Fixed | None]:
    """The paper's way: keys and values of the chosen clusters are gathered, then attended to."""
    query, (batch, heads, _, depth) = call.query, call.query.shape
    groups, entries, shape = key.shape[1], key.shape[2], chosen.shape
    shared, end = heads // groups, shape.first + shape.clustered
    seen = _seen(call.mask, batch)
    key = key if seen is None else key.scale_int(seen.unsqueeze(-1).to(key.share.parts[0]))
    made = [key.rescale(query.session.frac), value.rescale(query.session.frac)]
    both = chosen.in_order(concatenated(made, 3), 2)
    addend = None if addend is None else chosen.in_order(addend)
    penalty = _penalty(query, (batch, groups, 1, both.shape[2]), chosen.seen(seen), addend)
    both = both if penalty is None else concatenated([both, _column(penalty.rescale(query.session.frac))], 3)
    rows = both.view(lambda part: part[:, :, shape.first : end].reshape(batch * groups, -1, part.shape[-1]))
    taken = chosen.take(rows).view(lambda part: part.unflatten(0, (batch, groups)))
    held = concatenated([taken, both[:, :, : shape.first], both[:, :, end:]], 2)
    near = held[..., :depth]
    scores = _scores(call, near, seen is None and addend is None, 0)
    penalty = None if penalty is None else _column(held[..., -1:])
    weights = _weights(scores, call, penalty)
    weights = weights.view(lambda part: part.reshape(batch, groups, shared, -1))
    there = held[..., depth : depth + value.shape[-1]]
    out = mixed_values(weights, there, pattern_of(None, batch, heads, 1, held.shape[2]))
    out = out.view(lambda part: part.reshape(batch, heads, 1, -1))
    if not weigh:
        return out, None
    rows = weights.view(lambda part: part[..., : shape.chosen].sum(2, dtype=part.dtype).view(batch * groups, -1, 1))
    spread = chosen.put_back(rows).view(lambda part: part.view(batch, groups, -1))
    rest = weights.view(lambda part: part[..., shape.chosen :].sum(2, dtype=part.dtype))
    mass = concatenated([rest[..., : shape.first], spread, rest[..., shape.first :]], 2)
    return out, chosen.in_place(mass, entries, 2)


def _scores(call: AttentionQuery, key: Fixed, alone: bool, takes: int, seen: Tensor | None = None) -> Fixed:
    """Scores [B, G, H / G, n], with the fractional bits and in the lowest bits that softmax reads after `takes` choices
    of rows; zeros where `seen` [B, 1, n] says so. Watched.

    Where nothing is narrow they keep all fractional bits, truncated when few are left. alone: nothing is added.
    """
    session, groups, softcap = call.query.session, key.shape[1], call.softcap
    grouped = call.query.view(lambda part: part.reshape(len(part), groups, -1, part.shape[-1]))
    grouped = scaled(grouped, call.scale if softcap is None else call.scale / softcap)
    grouped = grouped.rescale(session.frac) if grouped.frac > session.frac + SLACK else grouped
    turned = key.view(lambda part: part.transpose(-1, -2))
    count = grouped.numel() // grouped.shape[-1] * key.shape[2]
    width = score_width(session, count, alone) if softcap is None and narrows(session) else None
    if width is None:
        scores = grouped.matmul(turned, frac=grouped.frac + turned.frac)
    else:
        scores = grouped.matmul(turned, frac=session.frac, width=width + takes)
    scores = scores if seen is None else scores.scale_int(seen[:, None].to(scores.share.parts[0]))
    watch_flat(scores, REACH - 1 + scores.frac)
    return scores


def _column(x: Fixed) -> Fixed:
    return x.view(lambda part: part.transpose(-1, -2))


def _zeros(like: Fixed, shape: tuple[int, ...]) -> Tensor:
    part = like.share.parts[0]
    return torch.zeros(shape, dtype=part.dtype, device=part.device)


def _seen(mask: Tensor | None, batch: int) -> Tensor | None:
    """bool [B, 1, n]: where some query head that counts may look (not at padding); None: everywhere."""
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


def _weights(scores: Fixed, call: AttentionQuery, penalty: Fixed | None) -> Fixed:
    """Softmax of scores [B, G, shared, n], zeros for heads left out; penalty [B, G, 1, n] is added after the cap."""
    (batch, heads), mask, softcap, frac = call.query.shape[:2], call.mask, call.softcap, scores.session.frac
    scores = scores.rescale(frac if softcap is None else frac + SLACK)
    if softcap is not None:
        scores = times_scalar(SecretTensor(precise_tanh(scores)), softcap).rescale(frac)
    if penalty is not None:
        scores = scores + penalty.rescale(frac)
    scores = scores.view(lambda part: part.reshape(batch, heads, 1, -1))
    active = None if mask is None else mask.any(-1, keepdim=True).expand(batch, heads, 1, 1)
    device = scores.share.parts[0].device
    if active is None or bool(active.all()):
        pattern = pattern_of(None, batch, heads, 1, scores.shape[-1])
    else:
        active = active.expand(-1, -1, -1, scores.shape[-1])
        pattern = pattern_of(active, batch, heads, 1, scores.shape[-1], device)
        scores = scores.view(lambda part: part.reshape(-1)[pattern.select])
    rows = pattern.row_numbers(device) % heads
    every = None if call.sinks is None else call.sinks.rescale(scores.frac)[rows]
    return soften(scores, pattern, every)
