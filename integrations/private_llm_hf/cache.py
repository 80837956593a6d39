"""The KV cache of one party: HuggingFace's cache interface, layers that hold shares.

Each layer appends into a buffer that grows by half, so a decode step copies nothing but its own entries. A layer
always keeps the full length: sliding windows are the mask's business, and masked positions cost no traffic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.protocols.share import Share
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor

_SPARE = 32


class _Rows:
    """Shares [B, H, length, D] in buffers of larger capacity. Entries below `length` are never overwritten."""

    def __init__(self, first: Fixed) -> None:
        self.sample = first
        self.parts = first.share.parts
        self.length = first.shape[2]

    def append(self, new: Fixed) -> None:
        """More positions at the end; the same batch, heads and size."""
        total = self.length + new.shape[2]
        if total > self.parts[0].shape[2]:
            self.parts = tuple(self._grown(part, total + total // 2 + _SPARE) for part in self.parts)
        for part, more in zip(self.parts, new.share.parts, strict=True):
            part[:, :, self.length : total] = more
        self.length = total

    def _grown(self, part: Tensor, capacity: int) -> Tensor:
        batch, heads, _, size = part.shape
        buffer = torch.empty((batch, heads, capacity, size), dtype=part.dtype, device=part.device)
        buffer[:, :, : self.length] = part[:, :, : self.length]
        return buffer

    def seal(self) -> None:
        """Give up the spare room: the next append moves to a new buffer (others may hold this one)."""
        self.parts = tuple(part[:, :, : self.length] for part in self.parts)

    def crop(self, length: int) -> None:
        """Keep the first `length` positions."""
        self.length = length
        self.seal()

    def select(self, index: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        self.parts = tuple(part[:, :, : self.length].index_select(0, index.to(part.device)) for part in self.parts)

    def __deepcopy__(self, memo: dict[int, object]) -> _Rows:
        """Another holder of the same entries; either goes on in a buffer of its own."""
        self.seal()
        twin = memo[id(self)] = _Rows(self.sample)
        twin.parts, twin.length = self.parts, self.length
        return twin

    def secret(self) -> SecretTensor:
        """The entries held."""
        held = tuple(part[:, :, : self.length] for part in self.parts)
        return SecretTensor(Fixed(self.sample.session, Share(held), self.sample.frac))


class SecretCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer as shares, full length."""

    is_sliding = False
    is_croppable = True
    layer_types = ()

    def __init__(self, **_: object) -> None:
        self._rows: tuple[_Rows, _Rows] | None = None
        self.is_initialized = False

    @property
    def keys(self) -> SecretTensor | None:
        """[B, G, length, D], or None while empty."""
        return None if self._rows is None else self._rows[0].secret()

    @property
    def values(self) -> SecretTensor | None:
        """[B, G, length, D], or None while empty."""
        return None if self._rows is None else self._rows[1].secret()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: the first update decides the shapes."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append and return everything held. Raises UnsupportedOp for plain tensors."""
        if not (isinstance(key_states, SecretTensor) and isinstance(value_states, SecretTensor)):
            raise UnsupportedOp("a secret cache takes secret keys and values only")
        key, value = key_states.to_fixed(), value_states.to_fixed()
        if self._rows is None:
            self._rows = (_Rows(key), _Rows(value))
            self.is_initialized = True
            return key_states, value_states
        self._rows[0].append(key)
        self._rows[1].append(value)
        return self._rows[0].secret(), self._rows[1].secret()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys after this query, offset of the first key)."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Positions held."""
        return 0 if self._rows is None else self._rows[0].length

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self._rows = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Drop that many (given as a negative number, as transformers does) positions at the end."""
        if tokens_to_remove > 0:
            raise DomainError(f"crop: got {tokens_to_remove}; want a negative number of positions to remove")
        for rows in self._rows or ():
            rows.crop(max(0, rows.length + tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows by public indices (beam search)."""
        for rows in self._rows or ():
            rows.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times in a row."""
        if self._rows is not None:
            count = self._rows[0].parts[0].shape[0]
            self.reorder_cache(torch.arange(count).repeat_interleave(repeats))


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
