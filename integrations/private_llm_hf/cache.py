"""The KV cache of one party behind HuggingFace's cache interface; what it holds is in `private_llm.nn.kv_cache`.

To transformers a cache is as long as the text: its lengths are positions, so that position numbers and masks are
those of the whole text. A layer never drops what a sliding window leaves behind: that is the mask's business, and
masked positions cost no traffic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.nn.kv_cache import KVBuffer
from private_llm.tensor.secret import SecretTensor


class SecretCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer as shares."""

    is_sliding = False
    is_croppable = True
    layer_types = ()

    def __init__(self, **_: object) -> None:
        self.buffer = KVBuffer()
        self.is_initialized = False

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
        """Append and return everything held. Raises UnsupportedOp for plain tensors."""
        if not (isinstance(key_states, SecretTensor) and isinstance(value_states, SecretTensor)):
            raise UnsupportedOp("a secret cache takes secret keys and values only")
        self.is_initialized = True
        keys, values = self.buffer.append(key_states.to_fixed(), value_states.to_fixed())
        return SecretTensor(keys), SecretTensor(values)

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
        self.buffer = KVBuffer()
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Drop that many (given as a negative number, as transformers does) positions at the end."""
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
        twin = memo[id(self)] = SecretCacheLayer()
        twin.buffer, twin.is_initialized = self.buffer.copy(), self.is_initialized
        return twin


class SecretCache(Cache):  # type: ignore[misc]
    """All layers of a decoder. Copying (copy.deepcopy) shares the entries so far."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=SecretCacheLayer)


class SecretEncoderDecoderCache(EncoderDecoderCache):  # type: ignore[misc]
    """Self- and cross-attention caches of an encoder-decoder."""

    def __init__(self) -> None:
        super().__init__(SecretCache(), SecretCache())

    def check_dynamic_cache(self, method: str) -> None:
        """Secret layers grow, so everything a dynamic cache allows is allowed."""
