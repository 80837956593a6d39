"""A transformers cache that carries out any cache policy for an ordinary plaintext decoder.

It does what the parties do on shares, in the clear: which entries stay after a call and which of them a single query
attends to (private_llm/kv_cache/policies/). Entries are dropped in each layer as soon as it has attended, so memory
falls layer by layer. To transformers the cache is as long as the text: lengths are positions.
"""

from typing import Any

import torch
from private_llm_hf.kv_cache.cache import PositionsLayer
from private_llm_hf.kv_cache.model_checks import BOUNDED, FULL, layer_kinds, windowed_layers
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from long_context.plain_attention import (
    PlainKeys,
    Scoring,
    chosen_entries,
    entries_that_stay,
    representatives,
)
from private_llm.errors import ConfigError, DomainError, UnsupportedOp
from private_llm.kv_cache.buffer import columns_at
from private_llm.kv_cache.padding import Arranged, arranged, queries_that_count
from private_llm.kv_cache.policies.policy import CacheFacts, CachePolicy, ClusterShape, NoCache, Selection


class PolicyLayer(PositionsLayer):
    """Keys [B, G, held, D] and values [B, G, held, Dv] of one layer.

    position: the number of the next position. positions: those of the entries, int64 [B or 1, G or 1, held], ascending;
    None: all. mass: float32 [B, G, held], the attention that is remembered. hidden: bool [B, G, held], True where an
    entry was evicted but left in memory. tokens: bool [B, position], False at padding; None: there is none. attends:
    how many entries the last call attended to. leader: the layer whose choices this one uses. windowed: whether the
    model itself attends to a window here, so that everything stays, and nothing is chosen.
    """

    def __init__(self, policy: CachePolicy, number: int, windowed: bool, leader: "PolicyLayer | None") -> None:
        self.policy, self.number, self.windowed, self.leader = policy, number, windowed, leader
        self.merged_heads = policy.merged_heads
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.positions: Tensor | None = None
        self.mass: Tensor | None = None
        self.hidden: Tensor | None = None
        self.tokens: Tensor | None = None
        self.picked: Tensor | None = None
        self.kept: Tensor | None = None
        self.position = self.start = self.attends = 0
        self.waiting = self.is_initialized = False
        self._levels: list[Tensor] = []
        self._rows: Tensor | None = None  # `Arranged.clusters` when clusters were made, where there is padding

    @property
    def held(self) -> int:
        """Entries in memory, per row and key head."""
        return 0 if self.keys is None else int(self.keys.shape[2])

    @property
    def alive(self) -> int:
        """Entries that are attended to, which are all held if the policy drops the others."""
        return self.held if self.hidden is None else self.held - int(self.hidden[0, 0].sum())

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append, and return everything held; the keys know this layer."""
        self.is_initialized = self.waiting = True
        new = key_states.shape[2]
        self.keys = key_states if self.keys is None else torch.cat([self.keys, key_states], dim=2)
        self.values = value_states if self.values is None else torch.cat([self.values, value_states], dim=2)
        if self.positions is not None:
            made = torch.arange(self.position, self.position + new, device=self.positions.device)
            self.positions = torch.cat([self.positions, made.expand(*self.positions.shape[:2], new)], dim=-1)
        if self.mass is not None:
            self.mass = F.pad(self.mass, (0, new))
        if self.hidden is not None:
            self.hidden = F.pad(self.hidden, (0, new))
        self.start, self.position = self.position, self.position + new
        self.picked = self.kept = None
        self.attends = self.held
        handed = self.keys.as_subclass(PlainKeys)
        handed.layer = self
        return handed, self.values

    # -- what attention asks ------------------------------------------------------------------------------------
    def counted(self, queries: int) -> tuple[int, Tensor | None]:
        """As many as the policy says; none in a layer that keeps everything, or follows another's choices."""
        if self.windowed or self.leader is not None:
            return 0, None
        counted, among = queries_that_count(self.policy, queries, self.tokens)
        return min(queries, counted), among

    def columns(self, allowed: Tensor | None, heads: int) -> Tensor | None:
        """Without the hidden ones, if any: [B or 1, H or 1, q, held]."""
        if allowed is not None and self.positions is not None:
            allowed = columns_at(allowed, self.positions, heads)
        if self.hidden is None:
            return allowed
        shown = ~self.hidden.repeat_interleave(heads // self.hidden.shape[1], dim=1).unsqueeze(2)
        return shown if allowed is None else allowed & shown

    def choose(self, query: Tensor, allowed: Tensor | None) -> Tensor | None:
        """int64 [B, G, n], ascending, for a single query [B, H, 1, D]; None: all held.

        Their number stands for none. allowed: [B, 1, q, position].
        """
        self._note_padding(allowed, query.shape[0])
        selection = self.policy.selection
        if self.windowed or selection is None or query.shape[2] != 1 or self.keys is None:
            return None
        tokens = self._tokens_held()
        shape, order = self._shape(selection, tokens)
        if shape is None:
            return None
        self.attends = self.held - shape.clustered + shape.chosen
        if self.leader is not None:
            return self.leader.picked
        self._represent(shape, selection, order)
        summed = query.squeeze(2).unflatten(1, (self.keys.shape[1], -1)).sum(2)
        if order is None:
            self.picked = chosen_entries(summed, self._levels, shape)
            return self.picked
        picked = chosen_entries(summed, self._levels, shape, order.tokens.expand(*self.keys.shape[:2], -1))
        self.picked = order.order.expand(*self.keys.shape[:2], -1).gather(-1, picked).sort(dim=-1).values
        return self.picked

    def _shape(self, selection: Selection, tokens: Tensor | None) -> tuple[ClusterShape | None, Arranged | None]:
        """Clusters among the entries held, and how these are arranged if some are padding."""
        if tokens is None:
            return selection.shape(self.held), None
        made = arranged(selection, tokens)
        return None if made is None else made.shape, made

    def _represent(self, shape: ClusterShape, selection: Selection, order: Arranged | None) -> None:
        """Representatives of all clusters that there are now: of each level, whatever the levels before leave."""
        if self.keys is None:
            return
        keys, mass, levels, kept = self.keys, self.mass, [], None
        if order is not None:
            at = order.order.expand(*keys.shape[:2], -1)
            keys = F.pad(keys, (0, 0, 0, 1)).gather(2, at.unsqueeze(-1).expand(*at.shape, keys.shape[-1]))
            mass = None if mass is None else F.pad(mass, (0, 1)).gather(-1, at)
        ready = min(self._levels[0].shape[2], shape.there[0]) if self._levels else 0
        if order is not None:
            ready, kept = order.ready(self._rows, ready)
        elif self._rows is not None:  # no padding any more: where there never was any, clusters lie where they did
            ready = 0 if bool(self._rows[0].any()) else min(ready, int(self._rows[1].min()))
        self._rows = None if order is None else order.clusters
        ready = ready * shape.sizes[0]
        for place, size in enumerate(shape.sizes):
            there = shape.clustered // size
            made = self._levels[place][:, :, : ready // size] if self._levels else None
            done = 0 if made is None else made.shape[2]
            part = slice(shape.first + done * size, shape.first + there * size)
            if done < there:
                got = None if mass is None else mass[:, :, part]
                more = representatives(keys[:, :, part], got, size, selection)
                beside = self._levels[place][:, :, done:there] if self._levels else more[:, :, :0]
                if kept is not None and beside.shape[2]:  # rows keep what they had
                    number = torch.arange(done, done + beside.shape[2], device=kept.device)
                    stays = (number < (kept * (shape.sizes[0] // size)).unsqueeze(-1)).unsqueeze(-1)
                    more[:, :, : beside.shape[2]] = torch.where(stays, beside, more[:, :, : beside.shape[2]])
                made = more if made is None else torch.cat([made, more], dim=2)
            levels += [] if made is None else [made]
        self._levels = levels

    def attended(self, query: Tensor, mass: Tensor | None, allowed: Tensor | None, call: Scoring) -> None:
        """Remember the attention that entries got, and evict as the policy says. allowed: [B, 1, q, position]."""
        self.waiting = False
        if self.windowed:
            return
        self.evict(mass)
        selection = self.policy.selection
        if selection is not None and query.shape[2] > 1 and self.leader is None:
            shape, order = self._shape(selection, self._tokens_held())
            if shape is not None:
                self._represent(shape, selection, order)

    def _note_padding(self, allowed: Tensor | None, batch: int) -> None:
        """A token sees itself; padding is seen by nobody."""
        if allowed is not None:
            new = allowed[:, 0].diagonal(self.start, dim1=1, dim2=2).expand(batch, -1)
            if self.tokens is None and bool(new.all()):
                return
            before = new.new_ones(batch, self.start) if self.tokens is None else self.tokens
            self.tokens = torch.cat([before, new], dim=1)
        elif self.tokens is not None:
            self.tokens = F.pad(self.tokens, (0, self.position - self.start), value=True)

    # -- after a call -------------------------------------------------------------------------------------------
    def evict(self, mass: Tensor | None) -> None:
        """Ask the policy what stays. mass: of this call.

        Raises UnsupportedOp if the policy keeps another number of entries than it said, DomainError while empty.
        """
        policy, eviction = self.policy, self.policy.eviction
        alive, queries = self.alive, self.position - self.start
        want = policy.ranked(alive, self.position, queries)
        if eviction is None:
            if policy.selection is not None and policy.selection.represent == "heavy":
                self._remember(mass)
            facts = CacheFacts(self.number, self.position, self.positions_held(), self.tokens)
            index = (policy.after_prefill if self.start == 0 else policy.after_step)(facts, mass)
            if index is not None:
                self.keep(index)
            if self.held != want:
                raise UnsupportedOp(f"kv_cache: {policy.name} kept {self.held} entries; it had said {want}")
            return
        if eviction.memory != "call":
            self._remember(mass)
        if want >= alive:
            return
        if self.leader is None:
            got = mass if eviction.memory == "call" else self.mass
            if got is None:
                if self.keys is None:
                    raise DomainError("kv cache: nothing is held yet")
                got = torch.zeros(self.keys.shape[:3], device=self.keys.device)
            self.kept = entries_that_stay(got, want, eviction, self._tokens_held(), self.hidden)
        elif self.leader.kept is None:
            raise UnsupportedOp(
                f"kv_cache: layer {self.number} evicts, and layer {self.leader.number}, its leader, not"
            )
        else:
            self.kept = self.leader.kept
        if eviction.memory == "since":
            self.mass = None
        if eviction.drop:
            self.keep(self.kept)
        else:
            self.hidden = torch.ones((*self.kept.shape[:2], self.held), dtype=torch.bool, device=self.kept.device)
            self.hidden = self.hidden.scatter(-1, self.kept, False)

    def _remember(self, mass: Tensor | None) -> None:
        if mass is not None:
            self.mass = mass if self.mass is None else self.mass + mass

    def _tokens_held(self) -> Tensor | None:
        """bool [B, G or 1, held]: which entries are tokens; None: all."""
        if self.tokens is None:
            return None
        at = self.positions_held().to(self.tokens.device)
        held = self.tokens.unsqueeze(1).expand(-1, at.shape[1], -1).gather(-1, at.expand(len(self.tokens), -1, -1))
        return None if bool(held.all()) else held

    def positions_held(self) -> Tensor:
        """int64 [B or 1, G or 1, held]."""
        return torch.arange(self.held).view(1, 1, -1) if self.positions is None else self.positions

    def keep(self, index: Tensor) -> None:
        """Only the entries `index`: int64 [kept], or [B or 1, G or 1, kept], ascending. Raises DomainError if empty."""
        if self.keys is None or self.values is None:
            raise DomainError("keep: this cache holds nothing yet")
        index = index.view(1, 1, -1) if index.ndim == 1 else index
        at = self.positions_held().to(index.device)
        rows, groups = (max(pair) for pair in zip(at.shape[:2], index.shape[:2], strict=True))
        self.positions = at.expand(rows, groups, -1).gather(-1, index.expand(rows, groups, -1))
        index = index.expand(*self.keys.shape[:2], -1)
        wide = index.unsqueeze(-1)
        self.keys = self.keys.gather(2, wide.expand(*index.shape, self.keys.shape[-1]))
        self.values = self.values.gather(2, wide.expand(*index.shape, self.values.shape[-1]))
        self.mass = None if self.mass is None else self.mass.gather(-1, index)
        self._levels = []

    # -- what transformers asks ---------------------------------------------------------------------------------
    def get_seq_length(self) -> int:
        """The number of the next position."""
        return self.position

    def remove(self, count: int) -> None:
        """As `crop`. Raises DomainError."""
        start, count = max(0, self.position - count), min(count, self.position)
        if not start or self.keys is None or self.values is None:
            self.reset()
            return
        at = self.positions_held()
        if at.shape[-1] < count or not bool(((at >= start).sum(-1) == count).all()):
            raise DomainError(
                f"crop: got {count} positions; some of them were evicted from this cache, so it cannot go back to "
                f"position {start}"
            )
        length = self.held - count
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]
        for name in ("positions", "mass", "hidden"):
            part = getattr(self, name)
            setattr(self, name, None if part is None else part[..., :length])
        self.tokens = None if self.tokens is None else self.tokens[:, :start]
        selection, self.position = self.policy.selection, start
        if selection is not None:
            whole = max(0, length - selection.first) // selection.levels[0].size * selection.levels[0].size
            self._levels = [
                part[:, :, : whole // level.size] for part, level in zip(self._levels, selection.levels, strict=False)
            ]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows by indices (beam search)."""
        if self._rows is not None:
            self._rows = self._rows.index_select(1, beam_idx.to(self._rows.device))
        for name in ("keys", "values", "positions", "mass", "hidden", "tokens"):
            part = getattr(self, name)
            if part is not None and (part.shape[0] > 1 or name != "positions"):
                setattr(self, name, part.index_select(0, beam_idx.to(part.device)))
        self._levels = [part.index_select(0, beam_idx.to(part.device)) for part in self._levels]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times in a row."""
        if self.keys is not None:
            self.reorder_cache(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))


class PolicyCache(Cache):  # type: ignore[misc]
    """The cache of a decoder under a policy. model: the model, or its configuration.

    Under a policy that chooses by attention or likeness, layers whose own attention is windowed or in chunks keep
    everything and never select, and the first other layer of a group chooses for it. Raises UnsupportedOp for
    layers that are no attention, and when a model attends in a way of its own, or outside `policy_attention`;
    ConfigError for the policy that caches nothing, and for what is no policy or no model.
    """

    is_compileable = False

    def __init__(self, policy: CachePolicy, model: PreTrainedModel | PreTrainedConfig) -> None:
        if not isinstance(policy, CachePolicy):
            raise ConfigError(f"kv_cache: got {policy!r}; want a policy, such as MPCacheConfig()")
        if not isinstance(model, PreTrainedModel | PreTrainedConfig):
            raise ConfigError(f"kv_cache: model: got {type(model).__name__}; want a transformers model, or its config")
        if isinstance(policy, NoCache):
            raise ConfigError("kv_cache: NoCache() is no cache; run the model with use_cache=False")
        self.policy = policy
        config: Any = model.config if isinstance(model, PreTrainedModel) else model
        kinds = layer_kinds(config)
        unknown = sorted(set(kinds) - {FULL, *BOUNDED})
        if unknown:
            raise UnsupportedOp(f"kv_cache: this model has layers of type {', '.join(unknown)}; want attention only")
        windowed = windowed_layers(config) if policy.in_secret else frozenset[int]()
        layers: list[PolicyLayer] = []
        for number in range(len(kinds)):
            first = policy.sharing.leader(number, windowed)
            leader = None if first == number or number in windowed else layers[first]
            layers.append(PolicyLayer(policy, number, number in windowed, leader))
        super().__init__(layers=layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """As `PolicyLayer.update`. Raises UnsupportedOp if the layer before has not been asked what to attend to."""
        for layer in self.layers:
            if layer.waiting:
                raise UnsupportedOp(
                    f"kv_cache: layer {layer.number} attended without asking the cache; generate inside "
                    "`with policy_attention(model):`, unless its attention is its own, which no policy supports"
                )
        made: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states)
        return made

    def entries(self) -> list[int]:
        """Entries in memory, per row and key head, of each layer."""
        return [layer.held for layer in self.layers]

    def attended(self) -> list[int]:
        """Entries that the last call attended to, per row and key head, in each layer."""
        return [layer.attends for layer in self.layers]

    def nbytes(self) -> int:
        """Bytes of the keys and values in memory."""
        parts = [part for layer in self.layers for part in (layer.keys, layer.values) if part is not None]
        return sum(part.numel() * part.element_size() for part in parts)
