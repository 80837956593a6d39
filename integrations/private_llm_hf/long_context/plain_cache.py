"""A transformers cache that carries out any cache policy for an ordinary plaintext decoder.

    cache = PolicyCache(MPCacheConfig(gamma=0.25), model)
    with policy_attention(model):
        model.generate(**inputs, past_key_values=cache)

It does what the parties do on shares, in the clear: which entries stay after a call and which of them a single query
attends to (private_llm/kv_policies/). Entries are dropped in each layer as soon as it has attended, so memory falls
layer by layer. To transformers the cache is as long as the text: lengths are positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kv_policies.policy import CacheFacts, CachePolicy
from private_llm_hf.long_context.choices import chosen_entries, entries_that_stay, representatives
from private_llm_hf.long_context.plain_attention import HeldKeys, Scoring, columns_at

_WINDOWED = ("sliding_attention", "chunked_attention")


class PolicyLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys [B, G, held, D] and values [B, G, held, Dv] of one layer.

    position: the number of the next position. positions: those of the entries, int64 [B or 1, G or 1, held], ascending;
    None: all. mass: float32 [B, G, held], the attention that is remembered. hidden: bool [B, G, held], True where an
    entry was evicted but left in memory. leader: the layer whose choices this one uses. windowed: whether the model
    itself attends to a window here; then everything stays, and nothing is chosen.
    """

    is_sliding = False
    is_croppable = True
    layer_types = ()

    def __init__(self, policy: CachePolicy, number: int, windowed: bool, leader: PolicyLayer | None) -> None:
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
        self.picked: Tensor | None = None
        self.kept: Tensor | None = None
        self.position = self.start = 0
        self.waiting = self.is_initialized = False
        self._levels: list[Tensor] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first update decides the shapes."""
        self.is_initialized = True

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
        new, batch = key_states.shape[2], key_states.shape[0]
        self.keys = key_states if self.keys is None else torch.cat([self.keys, key_states], dim=2)
        self.values = value_states if self.values is None else torch.cat([self.values, value_states], dim=2)
        if self.positions is not None:
            made = torch.arange(self.position, self.position + new, device=self.positions.device)
            self.positions = torch.cat([self.positions, made.expand(*self.positions.shape[:2], new)], dim=-1)
        if self.mass is not None:
            self.mass = F.pad(self.mass, (0, new))
        if self.hidden is not None:
            self.hidden = F.pad(self.hidden, (0, new))
        if batch != self.keys.shape[0]:
            raise DomainError(f"kv cache: got {batch} rows; want {self.keys.shape[0]}, as before")
        self.start, self.position = self.position, self.position + new
        self.picked = self.kept = None
        handed = self.keys.as_subclass(HeldKeys)
        handed.layer = self
        return handed, self.values

    # -- what attention asks ------------------------------------------------------------------------------------
    def counted(self, queries: int) -> int:
        """As many as the policy says; none in a layer that keeps everything, or follows another's choices."""
        if self.windowed or self.leader is not None:
            return 0
        return min(queries, self.policy.mass_queries(queries))

    def columns(self, allowed: Tensor | None, heads: int) -> Tensor | None:
        """Without the hidden ones, if any: [B or 1, H or 1, q, held]."""
        if allowed is not None and self.positions is not None:
            allowed = columns_at(allowed, self.positions, heads)
        if self.hidden is None:
            return allowed
        shown = ~self.hidden.repeat_interleave(heads // self.hidden.shape[1], dim=1).unsqueeze(2)
        return shown if allowed is None else allowed & shown

    def choose(self, query: Tensor) -> Tensor | None:
        """int64 [B, G, n], ascending, for a single query [B, H, 1, D]; None: all held."""
        selection = self.policy.selection
        if self.windowed or selection is None or query.shape[2] != 1 or self.keys is None:
            return None
        shape = selection.shape(self.held)
        if shape is None:
            return None
        if self.leader is not None:
            return self.leader.picked
        for place, (size, there) in enumerate(zip(shape.sizes, self._clusters(shape.there, shape.sizes), strict=True)):
            done = self._levels[place].shape[2] if place < len(self._levels) else 0
            if done < there:
                part = slice(shape.first + done * size, shape.first + there * size)
                mass = None if self.mass is None else self.mass[:, :, part]
                made = representatives(self.keys[:, :, part], mass, size, selection)
                self._levels[place : place + 1] = [torch.cat([*self._levels[place : place + 1], made], dim=2)]
        summed = query.squeeze(2).unflatten(1, (self.keys.shape[1], -1)).sum(2)
        self.picked = chosen_entries(summed, self._levels, shape)
        return self.picked

    @staticmethod
    def _clusters(there: tuple[int, ...], sizes: tuple[int, ...]) -> list[int]:
        """All clusters of each level, whatever the levels before leave."""
        return [there[0] * sizes[0] // size for size in sizes]

    def attended(self, query: Tensor, mass: Tensor | None, allowed: Tensor | None, call: Scoring) -> None:
        """Remember the attention that entries got, and evict as the policy says. allowed: [B, 1, q, position]."""
        self.waiting = False
        if not self.windowed:
            self.evict(mass, None if allowed is None else allowed[:, 0, -1])

    # -- after a call -------------------------------------------------------------------------------------------
    def evict(self, mass: Tensor | None, padding: Tensor | None) -> None:
        """Ask the policy what stays. mass: of this call. padding: bool [B, position], True where a token counts.

        Raises UnsupportedOp if the policy keeps another number of entries than it said.
        """
        policy, eviction = self.policy, self.policy.eviction
        alive, queries = self.alive, self.position - self.start
        want = policy.ranked(alive, self.position, queries)
        if eviction is None:
            if self._heavy:
                self._remember(mass)
            facts = CacheFacts(self.number, self.position, self.positions_held(), padding)
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
            got = self._nothing() if got is None else got
            self.kept = entries_that_stay(got, want, eviction, self._tokens(padding), self.hidden)
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

    @property
    def _heavy(self) -> bool:
        return self.policy.selection is not None and self.policy.selection.represent == "heavy"

    def _remember(self, mass: Tensor | None) -> None:
        if mass is not None:
            self.mass = mass if self.mass is None else self.mass + mass

    def _nothing(self) -> Tensor:
        if self.keys is None:
            raise DomainError("kv cache: nothing is held yet")
        return torch.zeros(self.keys.shape[:3], device=self.keys.device)

    def _tokens(self, padding: Tensor | None) -> Tensor | None:
        """bool [B, G or 1, held]: which entries are tokens; None: all."""
        if padding is None or bool(padding.all()):
            return None
        at = self.positions_held()
        return padding.unsqueeze(1).expand(-1, at.shape[1], -1).gather(-1, at.expand(padding.shape[0], -1, -1))

    def positions_held(self) -> Tensor:
        """int64 [B or 1, G or 1, held]."""
        return torch.arange(self.held).view(1, 1, -1) if self.positions is None else self.positions

    def keep(self, index: Tensor) -> None:
        """Only the entries `index`: int64 [kept], or [B or 1, G or 1, kept], ascending."""
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
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(positions after this query, number of the first)."""
        return self.position + query_length, 0

    def get_seq_length(self) -> int:
        """The number of the next position."""
        return self.position

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop that many positions (given as a negative number) at the end.

        Raises DomainError for a positive number, and if some of them were evicted and earlier ones not.
        """
        if tokens_to_remove > 0:
            raise DomainError(f"crop: got {tokens_to_remove}; want a negative number of positions to remove")
        start, count = max(0, self.position + tokens_to_remove), min(-tokens_to_remove, self.position)
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
        self.position, self._levels = start, []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows by indices (beam search)."""
        for name in ("keys", "values", "positions", "mass", "hidden"):
            part = getattr(self, name)
            if part is not None and (part.shape[0] > 1 or name != "positions"):
                setattr(self, name, part.index_select(0, beam_idx.to(part.device)))
        self._levels = [part.index_select(0, beam_idx.to(part.device)) for part in self._levels]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times in a row."""
        if self.keys is not None:
            self.reorder_cache(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))


class PolicyCache(Cache):  # type: ignore[misc]
    """The cache of a decoder under a policy. model: the model, or its configuration.

    Layers whose own attention is windowed or in chunks keep everything and never select; one that would follow such a
    layer follows the first of its group that is not. Raises UnsupportedOp for layers that are no attention, and when a
    model attends in a way of its own, or outside `policy_attention`.
    """

    is_compileable = False

    def __init__(self, policy: CachePolicy, model: PreTrainedModel | PreTrainedConfig) -> None:
        self.policy = policy
        config: Any = model.config if isinstance(model, PreTrainedModel) else model
        types = get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0]
        unknown = sorted(set(types) - {"full_attention", *_WINDOWED})
        if unknown:
            raise UnsupportedOp(f"kv_cache: this model has layers of type {', '.join(unknown)}; want attention only")
        leaders: dict[int, PolicyLayer] = {}
        layers = []
        for number, kind in enumerate(types):
            windowed = kind in _WINDOWED
            first = None if windowed else leaders.get(policy.sharing.leader(number))
            layer = PolicyLayer(policy, number, windowed, first)
            if not windowed and first is None:
                leaders[policy.sharing.leader(number)] = layer
            layers.append(layer)
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

    def nbytes(self) -> int:
        """Bytes of the keys and values in memory."""
        parts = [part for layer in self.layers for part in (layer.keys, layer.values) if part is not None]
        return sum(part.numel() * part.element_size() for part in parts)
