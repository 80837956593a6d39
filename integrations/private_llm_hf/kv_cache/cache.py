"""The KV cache of one party under HuggingFace's cache interface; what it holds is in `private_llm.kv_cache.buffer`.

To transformers a cache is as long as the text: its lengths are positions, so that position numbers and masks are
those of the whole text. What a model's own sliding window leaves out is the mask's business, and masked positions
cost no traffic; what stays in memory is decided by a policy (private_llm/kv_cache/policies/) after each call.
"""

import copy
import functools
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kv_cache.buffer import CacheRows, KVBuffer
from private_llm.kv_cache.evicting import EvictingLayer
from private_llm.kv_cache.policies.policy import KEEP_ALL, CacheFacts, CachePolicy
from private_llm.protocols.session import Session
from private_llm.replay.graph_break import GraphBreak, this_call
from private_llm.replay.modules import is_chunk, repeated_around
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.transformers_versions import CACHE


class HeldKeys(SecretTensor):
    """The keys that a layer under an evicting policy hands to attention: they know which layer to ask."""

    __slots__ = ("layer",)
    layer: "SecretCacheLayer"


class PositionsLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a cache that is as long as the text to transformers, whatever of it is in memory."""

    is_sliding = False
    is_croppable = True
    layer_types = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first update decides the shapes."""
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(positions after this query, number of the first)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Drop that many (given as a negative number, as transformers does) positions at the end. Raises DomainError
        for a positive number, and if some of them were evicted and earlier ones not.
        """
        if tokens_to_remove > 0:
            raise DomainError(f"crop: got {tokens_to_remove}; want a negative number of positions to remove")
        self.remove(-tokens_to_remove)

    @abstractmethod
    def remove(self, count: int) -> None:
        """Drop that many positions at the end, or all. Raises DomainError as `crop`."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self.reorder_cache(indices)


class SecretCacheLayer(PositionsLayer):
    """Keys and values of one layer as shares. leader: the layer whose choices by secrets this one shares."""

    def __init__(self, policy: CachePolicy = KEEP_ALL, leader: "SecretCacheLayer | None" = None) -> None:
        self.policy, self.leader = policy, leader
        first = None if leader is None else leader.evicting
        self.evicting: EvictingLayer | None = EvictingLayer(policy, first) if policy.in_secret else None
        self.buffer = KVBuffer() if self.evicting is None else self.evicting.buffer
        self.is_initialized = False
        self._start, self._attended = 0, False
        self._mass: Fixed | None = None

    def follow(self, leader: "SecretCacheLayer") -> None:
        """Share the choices of another layer from now on."""
        self.leader = leader
        if self.evicting is not None:
            self.evicting.leader = leader.evicting

    @property
    def _held(self) -> KVBuffer | EvictingLayer:
        """What rows and positions are taken from."""
        return self.buffer if self.evicting is None else self.evicting

    @property
    def keys(self) -> SecretTensor | None:
        """[B, G, entries, D], or None while empty."""
        held = self.buffer.keys
        return None if held is None else SecretTensor(held)

    @property
    def values(self) -> SecretTensor | None:
        """[B, G, entries, Dv], or None while empty."""
        held = self.buffer.values
        return None if held is None else SecretTensor(held)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append, return all that is held; keys as `HeldKeys` if the policy evicts. Raises UnsupportedOp if plain."""
        if not (isinstance(key_states, SecretTensor) and isinstance(value_states, SecretTensor)):
            raise UnsupportedOp("a secret cache takes secret keys and values only")
        self.is_initialized = True
        self._start = self.buffer.position
        keys, values = self.buffer.append(key_states.to_fixed(), value_states.to_fixed())
        if self.policy == KEEP_ALL:
            return SecretTensor(keys), SecretTensor(values)
        self._attended, self._mass = False, None
        handed = HeldKeys(keys)
        handed.layer = self
        return handed, SecretTensor(values)

    def attended(self, mass: Fixed | None) -> None:
        """Attention has taken this call's keys, the mask's columns that belong to them, and made the mass asked for."""
        self._attended, self._mass = True, mass

    def evict(self, number: int, padding: Tensor | None) -> None:
        """Ask the policy, after a call, what stays; `number`: of this layer. Raises UnsupportedOp if the model's
        attention did not ask which entries its keys are, or if the policy keeps another number of entries than it said.
        """
        if not self._attended:
            raise UnsupportedOp(
                f"kv_cache: layer {number} of this model attends in a way of its own, which does not know of "
                "evicted entries; use KeepAll()"
            )
        if self.evicting is not None:
            self.evicting.chosen = self.evicting.evicted = None  # choices are of one call
            return
        buffer, first = self.buffer, self._start == 0
        facts = CacheFacts(number, buffer.position, buffer.positions_held(), padding)
        mass = None if self._mass is None else SecretTensor(self._mass)
        want = self.policy.entries(buffer.length, buffer.position, buffer.position - self._start)
        index = (self.policy.after_prefill if first else self.policy.after_step)(facts, mass)
        if index is not None:
            buffer.keep(index)
        if buffer.length != want:
            raise UnsupportedOp(f"kv_cache: {self.policy.name} kept {buffer.length} entries; it had said {want}")
        self._mass = None

    def get_seq_length(self) -> int:
        """The number of the next position."""
        if this_call.graph_break is not None:  # a length may decide what is computed
            this_call.graph_break.refuse("the length of a cache")
        return self.buffer.position

    def reset(self) -> None:
        """Forget everything."""
        self._held.crop(self.buffer.position)
        self.is_initialized = False

    def remove(self, count: int) -> None:
        """As `KVBuffer.crop`."""
        self._held.crop(count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows by public indices (beam search)."""
        self._held.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times in a row."""
        self.reorder_cache(torch.arange(self.buffer.batch).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, object]) -> "SecretCacheLayer":
        """Another holder of the same entries so far."""
        leader = None if self.leader is None else copy.deepcopy(self.leader, memo)
        twin = memo[id(self)] = self.copy(leader)
        return twin

    def copy(self, leader: "SecretCacheLayer | None") -> "SecretCacheLayer":
        """The same entries so far, for a layer that follows `leader`."""
        twin = SecretCacheLayer(self.policy, leader)
        if self.evicting is None:
            twin.buffer = self.buffer.copy()
        else:
            twin.evicting = self.evicting.copy(None if leader is None else leader.evicting)
            twin.buffer = twin.evicting.buffer
        twin.is_initialized = self.is_initialized
        twin._start, twin._attended, twin._mass = self._start, self._attended, self._mass
        return twin


class SecretCache(Cache):  # type: ignore[misc]
    """All layers of a decoder. Copying (copy.deepcopy) shares the entries so far.

    windowed: layers whose attention the model bounds itself; under a policy that chooses by secrets they keep all, and
    layers that would share their choices share those of the first layer of the group that has no window.
    """

    def __init__(self, policy: CachePolicy = KEEP_ALL, windowed: frozenset[int] = frozenset()) -> None:
        self.policy, self.windowed = policy, windowed
        super().__init__(layer_class_to_replicate=SecretCacheLayer)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """As the layer's, which is made when it is first needed."""
        update, met = functools.partial(self._update, layer_idx=layer_idx), this_call.graph_break
        key, value = key_states, value_states
        if isinstance(met, AttentionBreak) and isinstance(key, SecretTensor) and isinstance(value, SecretTensor):
            return met.updated(self, key, value, layer_idx, update)
        return update(key, value)

    def keeps_all(self, number: int) -> bool:
        """Whether a layer never evicts."""
        return (self.layers[number] if number < len(self.layers) else self).policy == KEEP_ALL

    def holds(self, number: int) -> bool:
        """Whether a layer keeps all, and holds something."""
        return number < len(self.layers) and self.keeps_all(number) and self.layers[number].buffer.length > 0

    def _update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer_idx:
            self.add_layer()
        made: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx)
        return made

    def replace_layer(self, number: int, layer: SecretCacheLayer) -> None:
        """Another layer in the place of one that is there; those that follow it follow the new one."""
        old, self.layers[number] = self.layers[number], layer
        for other in self.layers:
            if other.leader is old:
                other.follow(layer)

    def add_layer(self) -> None:
        """One layer more, with the role that its number gives it."""
        number = len(self.layers)
        policy, first = self.role(number)
        self.layers.append(SecretCacheLayer(policy, None if first == number else self.layers[first]))

    def role(self, number: int) -> tuple[CachePolicy, int]:
        """The policy of a layer, and the layer whose choices it uses: its own number if it chooses for itself."""
        if number in self.windowed and self.policy.in_secret:
            return KEEP_ALL, number
        return self.policy, self.policy.sharing.leader(number, self.windowed)

    def evict(self, padding: Tensor | None) -> None:
        """Ask the policy in every layer, after a call. padding: [B, position], non-zero where a token counts."""
        for number, layer in enumerate(self.layers):
            if layer.policy != KEEP_ALL:
                layer.evict(number, None if padding is None else padding.bool())

    @classmethod
    def stacked(cls, pieces: "Sequence[tuple[SecretCache, CacheRows]]") -> "SecretCache":
        """Rows of caches that keep all, as those of one; cost and errors as `KVBuffer.stacked`."""
        first = pieces[0][0]
        made = cls(first.policy, first.windowed)
        for number in range(len(first.layers)):
            made.add_layer()
            made.layers[number].buffer = KVBuffer.stacked([(each.layers[number].buffer, p) for each, p in pieces])
            made.layers[number].is_initialized = first.layers[number].is_initialized
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> "SecretCache":
        """Another cache with the same entries so far; layers that share choices still do."""
        twin = memo[id(self)] = SecretCache(self.policy, self.windowed)
        twin.layers = [copy.deepcopy(layer, memo) for layer in self.layers]
        return twin


class SecretEncoderDecoderCache(EncoderDecoderCache):  # type: ignore[misc]
    """Self- and cross-attention caches of an encoder-decoder."""

    def __init__(self) -> None:
        super().__init__(SecretCache(), SecretCache())

    def check_dynamic_cache(self, method: str) -> None:
        """Secret layers grow, so everything a dynamic cache allows is allowed."""


# -- decoder layers as units whose middle is attention: the rest of a layer is the same at every step ----------------
# A layer is one of a `ModuleList` that is called with hidden states and a cache. Its program stops where the cache is
# updated and attention is called, one right after the other; what does more than that runs as smaller regions do.
_MASK = "attention_mask"

Attention = Callable[[SecretTensor, SecretTensor, SecretTensor, Tensor | None], SecretTensor]
"""Of a query, keys, values and a mask."""


class AttentionBreak(GraphBreak):
    """Of one call of a layer: the cache takes a key and a value, and attention a query."""

    def __init__(
        self, layer: "RepeatedLayer", cache: SecretCache, publics: Sequence[Tensor], mask: Tensor | None
    ) -> None:  # fmt: skip
        super().__init__(publics)
        self._layer, self._cache, self._mask = layer, cache, mask
        self._taken: tuple[Fixed, Fixed] | None = None
        self._held: tuple[Tensor, Tensor] | None = None

    def updated(
        self, cache: SecretCache, key: SecretTensor, value: SecretTensor, number: int,
        update: Callable[[SecretTensor, SecretTensor], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The cache is updated; an empty one would keep what it is given, and what a program makes has to go."""
        self._layer.number = number
        if cache is not self._cache or self._taken is not None or not cache.keeps_all(number):
            self.refuse("another update of a cache")
        if self.reason is not None:
            return update(key, value)
        self._taken = key.to_fixed(), value.to_fixed()
        with self.outside():
            if not cache.holds(number):
                key, value = (SecretTensor(x.view(torch.clone)) for x in self._taken)
            self._held = update(key, value)
        return self._held

    def attended(
        self, query: SecretTensor, key: Tensor, value: Tensor, mask: Tensor | None, alone: bool, attend: Attention
    ) -> SecretTensor:  # fmt: skip
        """Attention is called. alone: with nothing else but what `attend` knows, which is the same at every call."""
        if self._taken is None or self._held is None or not alone or mask is not self._mask:
            self.refuse("attention that is not a cache's alone")
        elif key is not self._held[0] or value is not self._held[1]:
            self.refuse("attention to something else than what a cache holds")
        held, taken = self._held, self._taken
        self._held = self._taken = None
        if self.reason is not None or held is None or taken is None:
            return attend(query, key, value, mask)  # type: ignore[arg-type]
        self._layer.attend = attend
        given = SecretTensor(query.value(full=True))
        return SecretTensor(self.run((query.value(full=True), *taken), lambda: attend(given, *held, mask).value()))  # type: ignore[arg-type]

    def recompute(self, values: Sequence[Fixed]) -> Fixed:
        """The update and attention, of what the program has made for them."""
        query, key, value = map(SecretTensor, values)
        keys, held = self._cache.update(key, value, self._layer.number)
        return self._layer.attend(query, keys, held, self._mask).value()  # type: ignore[arg-type]


class RepeatedLayer:
    """A decoder layer, and what its last call in Python said of its attention."""

    attend: Attention

    def __init__(
        self, forward: Callable[..., Any], name: str, session: Session, kind: Hashable,
        weights: Sequence[tuple[str, object]], number: int,
    ) -> None:  # fmt: skip
        """number: its place among the layers, and usually in the cache."""
        self._forward, self._session, self.number = forward, session, number
        self._around = repeated_around(forward, name, session, kind, weights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a module's own signature
        """As the layer's own forward."""
        cache = kwargs.get(CACHE)
        if (
            self._around is None
            or len(args) != 1
            or type(cache) is not SecretCache
            or this_call.graph_break is not None
        ):
            return self._forward(*args, **kwargs)
        # only a chunk's program begins an empty cache: a prompt of one token looks like a step, and is none
        begins = not cache.holds(self.number) and not is_chunk(self._session, args[0])
        found = _facts(kwargs) if cache.policy == KEEP_ALL and not begins else None
        if found is None:
            return self._forward(*args, **kwargs)
        facts, publics, mask = found
        return self._around(args[0], kwargs, facts, AttentionBreak(self, cache, publics, mask))


def _facts(kwargs: Mapping[str, Any]) -> tuple[Hashable, list[Tensor], Tensor | None] | None:
    """What is the same at every call, tensors that are not, and the mask; None where no program can run."""
    facts: list[Hashable] = []
    publics: list[Tensor] = []
    mask: Tensor | None = None
    for name, each in kwargs.items():
        if name == CACHE:
            continue
        if name == _MASK and type(each) is Tensor:
            if each.dtype != torch.bool or not _shows_some(each):
                return None
            mask = each
            facts.append((name, True))
            continue
        for one in each if isinstance(each, tuple) else (each,):
            if one is None or isinstance(one, bool):
                facts.append((name, one))
            elif type(one) is Tensor and one.numel() and name != _MASK:
                known = next((n for n, x in enumerate(publics) if x is one), None)  # recorded as one, it stays one
                facts.append((name, tuple(one.shape), None if one.is_contiguous() else one.stride(), one.dtype, known))
                publics.append(one)
            else:
                return None
    return tuple(facts), publics, mask


def _shows_some(mask: Tensor) -> bool:
    """Whether any query may see any key; remembered, because every layer meets the same mask."""
    if not hasattr(mask, "_private_shows_some"):
        mask._private_shows_some = bool(mask.any())  # type: ignore[attr-defined]
    return bool(mask._private_shows_some)  # type: ignore[attr-defined]
