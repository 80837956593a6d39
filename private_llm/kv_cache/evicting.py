"""One layer's cache under a policy that chooses by secrets: what is evicted after a call, and what a query attends to.

    prompt    attention as ever; its mass, a local sum; the entries of most mass are brought together in their order and
              the others forgotten (`oblivious/chosen_rows.py`); representatives of the clusters that are left
    token     the clusters most like the query; attention to them (`selecting.py`)

Layers that follow another (`CachePolicy.sharing`) use its choices: the same entries stay, the same clusters count, and
nothing is compared or opened for them. What is public of all this are numbers of entries.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.exact.maximum import concatenated
from private_llm.kv_cache.buffer import KVBuffer
from private_llm.kv_cache.clusters import representatives
from private_llm.kv_cache.padding import Arranged, arranged, padding_last, queries_that_count
from private_llm.kv_cache.policies.policy import CachePolicy, ClusterShape, Eviction
from private_llm.kv_cache.selecting import FORBIDDEN, Chosen, attend_to_chosen, choose_clusters, reordered
from private_llm.nn.attention import AttentionQuery, attend_and_weigh
from private_llm.oblivious.chosen_rows import ShuffledRows, compact
from private_llm.oblivious.topk import largest
from private_llm.protocols.share import Share
from private_llm.tensor.fixed import Fixed

_NOT_CHOSEN = "kv_cache: the layer whose choices this one shares has made none in this call"


@dataclass(frozen=True, eq=False)
class Evicted:
    """Which entries stayed in this call: `first` and `newest` ones, and those that `middle` brings together.

    order: the public order of entries that this is about, int64 [B or 1, n]; None: theirs. marks: 0 or 1, [B, G, those
    between first and newest]. tokens: bool [B or 1, entries that stay], None: all. croppable: newest entries in place.
    """

    middle: ShuffledRows
    first: int
    newest: int
    tokens: Tensor | None
    marks: Fixed
    order: Tensor | None
    croppable: int


class EvictingLayer:
    """Keys and values of one layer (`buffer`) under `policy`; leader: the layer whose choices this one uses."""

    def __init__(self, policy: CachePolicy, leader: EvictingLayer | None = None) -> None:
        self.policy, self.leader = policy, leader
        self.buffer = KVBuffer()
        self.chosen: Chosen | None = None
        self.evicted: Evicted | None = None
        self._mass: Fixed | None = None
        self._mass_bound = 0
        self._penalty: Fixed | None = None  # -1 at the entries that are hidden, else 0: [B, G, 1, n]
        self._hidden = 0
        self._clusters: list[Fixed] | None = None
        self._rows: Tensor | None = None  # `Arranged.clusters` when clusters were made, where there is padding

    # -- attention ---------------------------------------------------------------------------------------------
    def attend(self, call: AttentionQuery, queries: int) -> Fixed:
        """Attention of the call whose `queries` new entries the buffer holds already: [B, H, q, Dv]. Then evicts.

        A single query attends to what the policy selects, several to all entries. Costs: `selection_costs.py`. Raises
        UnsupportedOp where a leader has not chosen in this call; otherwise as `attend`.
        """
        self.chosen = self.evicted = None
        keys, values = self._held()
        self._mass = None if self._mass is None else _longer(self._mass, self.buffer.length)
        self._penalty = None if self._penalty is None else _longer(self._penalty, self.buffer.length)
        tokens = _tokens(call.tokens, keys.shape[2])
        counted, among = (0, None) if self.leader is not None else queries_that_count(self.policy, queries, tokens)
        chosen = self._choose(call.query, keys, values.shape[-1], tokens)
        if chosen is None:
            out, mass = attend_and_weigh(call, keys, values, self._penalty_of(call.query), counted, among)
        else:
            addend = None if self._penalty is None else self._penalty.scale_int(int(FORBIDDEN))
            out, mass = attend_to_chosen(call, keys, values, chosen, addend, weigh=counted > 0)
            if mass is not None and among is not None:
                mass = mass.scale_int(among[:, None].to(mass.share.parts[0]))
        self._count(mass if counted else None, counted * call.query.shape[1] // keys.shape[1])
        self._evict(call, queries)
        return out

    def _held(self) -> tuple[Fixed, Fixed]:
        keys, values = self.buffer.keys, self.buffer.values
        if keys is None or values is None:
            raise UnsupportedOp("attention before any key was cached")
        return keys, values

    def _penalty_of(self, query: Fixed) -> Fixed | None:
        """The secret mask of evicted entries that are still held, as an addend to scores [B, H, q, n]."""
        if self._penalty is None:
            return None
        shared = query.shape[1] // self._penalty.shape[1]
        addend = self._penalty.scale_int(int(FORBIDDEN))
        return addend.view(lambda part: part.repeat_interleave(shared, 1).expand(-1, -1, query.shape[2], -1))

    def _choose(self, query: Fixed, keys: Fixed, value_size: int, tokens: Tensor | None) -> Chosen | None:
        """What a single query attends to; None: everything."""
        selection = self.policy.selection
        shape, order = (None, None) if query.shape[2] > 1 else self._shape(keys.shape[2], tokens)
        if selection is None or shape is None:
            return None
        if self.leader is None:
            made = self._representatives(keys, tokens)
            self.chosen = choose_clusters(query, made, shape, selection.gather, value_size, order)
        else:
            self.chosen = self.leader.chosen
            if self.chosen is None or self.chosen.shape != shape:
                raise UnsupportedOp(_NOT_CHOSEN)
        return self.chosen

    # -- clusters ----------------------------------------------------------------------------------------------
    def _representatives(self, keys: Fixed, tokens: Tensor | None) -> list[Fixed]:
        """Of all clusters there are now; only those are made that were not there before."""
        selection = self.policy.selection
        shape, order = self._shape(keys.shape[2], tokens)
        if selection is None or shape is None:
            return []
        size, kept = selection.levels[0].size, None
        self._clusters = self._first_clusters(shape.there[0])  # entries at the end may have been cropped
        ready = 0 if self._clusters is None else self._clusters[0].shape[2]
        if order is not None:
            ready, kept = order.ready(self._rows, ready)
        elif self._rows is not None:  # no padding any more: where there never was any, clusters lie where they did
            ready = 0 if bool(self._rows[0].any()) else min(ready, int(self._rows[1].min()))
            self._clusters = self._first_clusters(ready)
        self._rows = None if order is None else order.clusters
        if ready < shape.there[0]:
            start, stop = selection.first + ready * size, selection.first + shape.clustered
            fresh, mass = keys, self._mass
            if order is not None:
                fresh = reordered(keys, order.order, 2)
                fresh = fresh.scale_int(order.tokens[:, None, :, None].to(keys.share.parts[0]))  # may be anything
                mass = None if mass is None else reordered(mass, order.order, 2)
            fresh = fresh[:, :, start:stop]
            mass = None if mass is None else mass[:, :, start:stop]
            made = representatives(fresh, selection, mass)
            old = self._clusters
            self._clusters = made if old is None else [
                _joined(*pair, ready * (size // level.size), None if kept is None else kept * (size // level.size))
                for pair, level in zip(zip(old, made, strict=True), selection.levels, strict=True)
            ]  # fmt: skip
        return self._clusters or []

    def _shape(self, held: int, tokens: Tensor | None) -> tuple[ClusterShape | None, Arranged | None]:
        """Clusters among `held` entries, and how these are arranged if some are padding."""
        selection = self.policy.selection
        if selection is None or tokens is None:
            return None if selection is None else selection.shape(held), None
        made = arranged(selection, tokens)
        return None if made is None else made.shape, made

    def _first_clusters(self, count: int) -> list[Fixed] | None:
        """Representatives of the first `count` clusters of the first level."""
        if self._clusters is None or not count:
            return None
        there = self._clusters[0].shape[2]
        return [x.view(lambda part: part[:, :, : min(count, there) * part.shape[2] // there]) for x in self._clusters]

    # -- eviction ----------------------------------------------------------------------------------------------
    def _count(self, mass: Fixed | None, bound: int) -> None:
        """Add this call's attention, at most `bound` an entry, as the policy's memory says."""
        memory = self.policy.eviction.memory if self.policy.eviction is not None else "since"
        if self._mass is None or memory == "call":
            self._mass, self._mass_bound = mass, bound
        elif mass is not None:
            self._mass, self._mass_bound = self._mass + mass, self._mass_bound + bound

    def _evict(self, call: AttentionQuery, queries: int) -> None:
        """After a call: forget all but as many entries as the policy says, and make clusters of a prompt's rest."""
        eviction, buffer = self.policy.eviction, self.buffer
        held, alive = buffer.length, buffer.length - self._hidden
        kept = self.policy.ranked(alive, buffer.position, queries)
        newest = 0 if eviction is None else eviction.newest(kept)
        if self._penalty is not None and (buffer.newest or 0) < newest:
            kept = alive  # after a crop nobody knows how many of the newest entries are hidden
        if eviction is not None and kept < alive:
            self.evicted = self._rank(eviction, call, kept, newest) if self.leader is None else self.leader.evicted
            if self.evicted is None:
                raise UnsupportedOp(_NOT_CHOSEN)
            self._forget(self.evicted, eviction, kept)
        if queries > 1 and self.leader is None:
            keys = self._held()[0]
            tokens = _tokens(call.tokens, keys.shape[2]) if buffer.length == held else buffer.tokens
            self._representatives(keys, tokens)

    def _rank(self, eviction: Eviction, call: AttentionQuery, kept: int, newest: int) -> Evicted:
        """Which entries stay: the top of their masses, padding last."""
        held, first = self.buffer.length, eviction.first
        if self._mass is None:
            raise UnsupportedOp("kv_cache: this policy evicts by attention, but counts none (mass_queries)")
        mass = _pooled(self._mass, eviction.pool)
        tokens = _tokens(call.tokens, held)
        if tokens is not None:
            mass = mass.scale_int(tokens[:, None].to(mass.share.parts[0]))
            mass = mass - (~tokens)[:, None].double().to(mass.share.parts[0].device)
        bound = max(1, self._mass_bound * eviction.pool)
        if self._penalty is not None:  # hidden entries rank after padding, whatever pooling lends them
            below = 2 if eviction.pool == 1 else bound + 2
            mass = mass + self._penalty.view(lambda part: part.squeeze(2)).scale_int(below)
            bound = max(bound, below)
        order = None if tokens is None else padding_last(tokens, first, newest=newest)
        mass = mass if order is None else reordered(mass, order, 2)
        middle = mass[:, :, first : held - newest]
        wanted = kept - first - newest
        marks = largest(middle, wanted, bits=middle.frac + bound.bit_length() + 2)
        made = compact(marks.view(lambda part: part.flatten(0, 1)), wanted)
        if tokens is None or order is None:
            return Evicted(made, first, newest, None, marks, None, newest)
        stay = _tokens_that_stay(tokens.gather(1, order), first, newest, wanted)
        return Evicted(made, first, newest, stay, marks, order, min(newest, _unmoved(order)))

    def _forget(self, evicted: Evicted, eviction: Eviction, kept: int) -> None:
        keys, values = self._held()
        if not eviction.drop:
            self._hide(evicted, kept)
            return
        size = keys.shape[-1]
        pairs = zip(keys.share.parts, values.share.parts, strict=True)
        both = self._kept(keys.with_share(Share(tuple(torch.cat(pair, 3) for pair in pairs))), evicted)
        stay = [both[..., :size], both[..., size:]]
        self.buffer.replace(stay[0], values.with_share(stay[1].share), evicted.croppable, evicted.tokens)
        self._clusters = None
        if self._mass is not None:
            always = eviction.memory == "always"
            column = self._mass.view(lambda part: part.unsqueeze(-1))
            self._mass = self._kept(column, evicted).view(lambda part: part.squeeze(-1)) if always else None
            self._mass_bound = self._mass_bound if always else 0

    def _hide(self, evicted: Evicted, kept: int) -> None:
        """The baseline: evicted entries stay, and their scores will be far below all others."""
        like, part = evicted.marks, evicted.marks.share.parts[0]
        shapes = [(*like.shape[:2], n) for n in (evicted.first, evicted.newest)]
        ones = (torch.ones(shape, dtype=part.dtype, device=part.device) for shape in shapes)
        ends = [like.with_share(like.proto.public(each)) for each in ones]
        marks = concatenated([ends[0], evicted.marks, ends[1]], 2)
        self._hidden = marks.shape[2] - kept
        marks = marks if evicted.order is None else reordered(marks, evicted.order.argsort(-1), 2)
        self.buffer.newest = evicted.croppable  # cropping more would remove a secret number of hidden entries
        self._penalty = (marks - 1.0).view(lambda part: part.unsqueeze(2))
        if self.policy.eviction is not None and self.policy.eviction.memory != "always":
            self._mass, self._mass_bound = None, 0

    @staticmethod
    def _kept(x: Fixed, evicted: Evicted) -> Fixed:
        """x [B, G, n, P] at the entries that stay: one shuffle of those between first and newest."""
        x = x if evicted.order is None else reordered(x, evicted.order, 2)
        batch, groups, held, width = x.shape
        end = held - evicted.newest
        rows = x.view(lambda part: part[:, :, evicted.first : end].flatten(0, 1))
        middle = evicted.middle.take(rows).view(lambda part: part.view(batch, groups, -1, width))
        first = x[:, :, : evicted.first]
        return concatenated([first, middle, x[:, :, end:]], 2)

    # -- rows --------------------------------------------------------------------------------------------------
    def crop(self, count: int) -> None:
        """Forget the last `count` positions; errors as `KVBuffer.crop`."""
        self.buffer.crop(count)
        length = self.buffer.length
        self._mass = None if self._mass is None or not length else self._mass[:, :, :length]
        if self._penalty is not None:
            self._penalty = self._penalty[..., :length] if length else None
            self._hidden = self._hidden if length else 0
        selection = self.policy.selection
        if self._clusters is not None and selection is not None:
            whole = max(0, length - selection.first) // selection.levels[0].size
            self._clusters = self._first_clusters(whole) if whole else None

    def select(self, index: Tensor) -> None:
        """Keep, repeat or reorder batch rows (int64 [rows])."""
        self.buffer.select(index)

        def moved(x: Fixed) -> Fixed:
            return x.view(lambda part: part.index_select(0, index.to(part.device)))

        self._mass = None if self._mass is None else moved(self._mass)
        self._penalty = None if self._penalty is None else moved(self._penalty)
        self._clusters = None if self._clusters is None else [moved(x) for x in self._clusters]
        if self._rows is not None and self._rows.shape[1] > 1:
            self._rows = self._rows[:, index]

    def copy(self, leader: EvictingLayer | None) -> EvictingLayer:
        """Another layer with the same entries so far, which follows `leader`."""
        twin = copy.copy(self)
        twin.leader, twin.buffer = leader, self.buffer.copy()
        return twin

    def state(self) -> tuple[object, ...]:
        """What decides, with the entries held, about the cost of the next call: sizes, all public."""
        clusters = None if self._clusters is None else self._clusters[0].shape[2]
        return (
            self.buffer.hidden, self.buffer.newest, self.buffer.tokens, clusters, self._mass is not None,
            self._mass_bound, self._hidden,
        )  # fmt: skip


def _unmoved(order: Tensor) -> int:
    """How many entries at the end are where they were, in all rows."""
    moved = (order != torch.arange(order.shape[1], device=order.device)).any(0)
    return order.shape[1] - int(moved.nonzero()[-1]) - 1 if bool(moved.any()) else order.shape[1]


def _joined(old: Fixed, new: Fixed, start: int, kept: Tensor | None) -> Fixed:
    """The first `start` of old [B, G, m, D], then new; of old ones beside new ones the first `kept` [B or 1] stay."""
    more = old.shape[2] - start
    if kept is not None and more > 0:
        stay = (torch.arange(start, old.shape[2]) < kept[:, None])[:, None, :, None].to(new.share.parts[0])
        mine = old[:, :, start:].scale_int(stay)
        beside = new[:, :, :more].scale_int(1 - stay)
        new = concatenated([mine + beside, new[:, :, more:]], 2)
    return concatenated([old[:, :, :start], new], 2)


def _longer(x: Fixed, length: int) -> Fixed:
    """Zeros for entries that are new, over the last dimension."""
    return x.view(lambda part: torch.constant_pad_nd(part, (0, length - part.shape[-1])))


def _pooled(mass: Fixed, window: int) -> Fixed:
    """Sums over an odd window of neighbours, zeros beyond the ends."""
    if window == 1:
        return mass

    def summed(part: Tensor) -> Tensor:
        wide = torch.constant_pad_nd(part, (window // 2, window // 2))
        return wide.unfold(2, window, 1).sum(-1, dtype=part.dtype)

    return mass.view(summed)


def _tokens(mask: Tensor | None, held: int) -> Tensor | None:
    """bool [B or 1, held]: which entries the last query may see, if it is not all of them."""
    if mask is None:
        return None
    seen = mask[:, :, -1, :held].any(1)
    return None if bool(seen.all()) else seen


def _tokens_that_stay(tokens: Tensor, first: int, newest: int, wanted: int) -> Tensor | None:
    """Which of the entries that stay are no padding: padding stays only where tokens are too few, the first of it."""
    held = tokens.shape[1]
    middle = tokens[:, first : held - newest]
    best = middle.int().sort(dim=1, descending=True, stable=True).indices[:, :wanted].sort(dim=1).values
    made = torch.cat([tokens[:, :first], middle.gather(1, best), tokens[:, held - newest :]], 1)
    return None if bool(made.all()) else made
