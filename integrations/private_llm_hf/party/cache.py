"""The KV cache of one party behind HuggingFace's cache interface; what it holds is in `private_llm.nn.kv_cache`.

To transformers a cache is as long as the text: its lengths are positions, so that position numbers and masks are
those of the whole text. What a model's own sliding window leaves behind is the mask's business, and masked positions
cost no traffic; what stays in memory is decided by a policy (private_llm/kv_policies/) after each call.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kv_policies.fixed import KEEP_ALL
from private_llm.kv_policies.policy import CacheFacts, CachePolicy
from private_llm.nn.kv_cache import KVBuffer
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor


class HeldKeys(SecretTensor):
    """The keys that a layer under an evicting policy hands to attention: they know which layer to ask."""

    __slots__ = ("layer",)
    layer: SecretCacheLayer


class SecretCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer as shares."""

    is_sliding = False
    is_croppable = True
    layer_types = ()

    def __init__(self, policy: CachePolicy = KEEP_ALL) -> None:
        self.policy = policy
        self.buffer = KVBuffer()
        self.is_initialized = False
        self._start, self._attended = 0, False
        self._mass: Fixed | None = None

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

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first update decides the shapes."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append and return everything held; keys as `HeldKeys` if the policy evicts. Raises UnsupportedOp for plain
        tensors.
        """
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
        """Ask the policy, after a call, what stays; `number`: of this layer.

        Raises UnsupportedOp if the model's attention did not ask which entries its keys are, or if the policy keeps
        another number of entries than it said.
        """
        if not self._attended:
            raise UnsupportedOp(
                f"kv_cache: layer {number} of this model attends in a way of its own, which does not know of "
                "evicted entries; use KeepAll()"
            )
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

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(positions after this query, number of the first)."""
        return self.buffer.position + query_length, 0

    def get_seq_length(self) -> int:
        """The number of the next position."""
        return self.buffer.position

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.buffer, self.is_initialized = KVBuffer(), False

    def crop(self, tokens_to_remove: int) -> None:
        """Drop that many (given as a negative number, as transformers does) positions at the end.

        Raises DomainError for a positive number, and as `KVBuffer.crop`.
        """
        if tokens_to_remove > 0:
            raise DomainError(f"crop: got {tokens_to_remove}; want a negative number of positions to remove")
        self.buffer.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows by public indices (beam search)."""
        self.buffer.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times in a row."""
        self.reorder_cache(torch.arange(self.buffer.batch).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, object]) -> SecretCacheLayer:
        """Another holder of the same entries so far."""
        twin = memo[id(self)] = SecretCacheLayer(self.policy)
        twin.buffer, twin.is_initialized = self.buffer.copy(), self.is_initialized
        twin._start, twin._attended, twin._mass = self._start, self._attended, self._mass
        return twin


class SecretCache(Cache):  # type: ignore[misc]
    """All layers of a decoder. Copying (copy.deepcopy) shares the entries so far."""

    def __init__(self, policy: CachePolicy = KEEP_ALL) -> None:
        self.policy = policy
        super().__init__(layer_class_to_replicate=functools.partial(SecretCacheLayer, self.policy))

    def evict(self, padding: Tensor | None) -> None:
        """Ask the policy in every layer, after a call. padding: [B, position], non-zero where a token counts."""
        if self.policy == KEEP_ALL:
            return
        for number, layer in enumerate(self.layers):
            layer.evict(number, None if padding is None else padding.bool())


class SecretEncoderDecoderCache(EncoderDecoderCache):  # type: ignore[misc]
    """Self- and cross-attention caches of an encoder-decoder."""

    def __init__(self) -> None:
        super().__init__(SecretCache(), SecretCache())

    def check_dynamic_cache(self, method: str) -> None:
        """Secret layers grow, so everything a dynamic cache allows is allowed."""
