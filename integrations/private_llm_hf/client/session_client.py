"""What a private model needs of those who compute for it, and the client's handles of what they keep: no values.

Those are parties of secret sharing, nodes of token sharding, or both, and stand-ins that record a dry run or count what
it would cost. Dropping a handle frees what it stands for with the next call.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, UnsupportedOp
from private_llm.kv_cache.policies.policy import CachePolicy
from private_llm.protocols.ends import ClientEnd
from private_llm.ranges import UNKNOWN, Ranges
from private_llm.ring.ring import Ring
from private_llm_hf.client.costs import Costs
from private_llm_hf.transformers_versions import CACHE
from private_llm_hf.wire.commands import CacheEdit, Call, CallOrEdit, CopyCache, CropCache, ResetCache, SelectRows

Secret = Tensor | tuple[Tensor, int]  # ring elements, or token ids (int64) and the size of their vocabulary


def share(end: ClientEnd, secrets: Iterable[Secret]) -> None:
    """Send the inputs of a call, in order."""
    for secret in secrets:
        if isinstance(secret, Tensor):
            end.share(secret)
        else:
            end.share_index(*secret)


class SessionClient(ABC):
    """One session as the client sees it. Thread-safe: one call at a time. Implementations say what they raise."""

    config: PrivateConfig
    ring: Ring
    ranges: Ranges = UNKNOWN
    opened_positions: int = 0  # of calls so far, where a kept order serves a limited number (`CometConfig.positions`)

    @abstractmethod
    def forward(self, call: Call, secrets: list[Secret]) -> tuple[str, dict[str, Tensor]]:
        """Run the model: its output class, and the opened outputs (float64). secrets: in the order of call.secret, ring
        elements, or token ids with their vocabulary. Raises DomainError for calls beside a plan.
        """

    @abstractmethod
    def command(self, edit: CacheEdit) -> None:
        """Change a cache, without an answer; an error surfaces at the next call."""

    @abstractmethod
    def new_handle(self) -> int:
        """A number for something that is kept where the model runs."""

    @abstractmethod
    def release(self, handle: int) -> None:
        """Forget a handle with the next call (callable from a finalizer: sends nothing itself)."""

    @abstractmethod
    def close(self) -> None:
        """Stop all. Idempotent."""

    def keep_together(self, handle: int, rows: int) -> None:  # noqa: B027 - one session has all rows
        """Batch rows come in groups of `rows` that a cache may reorder among themselves (beams of one prompt)."""

    def preprocess(self, entries: list[CallOrEdit]) -> int:
        """Let the helping party run ahead for these requests; bytes stored. Raises ConfigError where none can."""
        raise ConfigError("preprocess: nobody can run ahead here; want a model whose parties run")

    def costs(self, reset: bool = False) -> Costs:
        """What everybody sent since the last reset, but control. Raises ConfigError where nothing is counted."""
        raise ConfigError("cost: nothing is counted here; want a model whose parties run")


class PrivateCache(Cache):  # type: ignore[misc]
    """The handle of a KV cache at the parties; made by the model, passed back as `past_key_values` or `cache`.

    position: the number of the next position per row, which transformers takes for the cache's length. kv_length: how
    many entries each row has, fewer if the session's cache policy evicts. Both are public. Reordering (beam search)
    tells the parties which rows continue.
    """

    def __init__(self, parties: SessionClient, rows: int) -> None:
        super().__init__(layers=[])
        self._parties = parties
        self.handle = parties.new_handle()
        self.position = self.kv_length = 0
        self._newest = 0  # entries of the last positions that are certainly held
        self.rows = rows
        self.withheld = False  # whether values in it left their range
        weakref.finalize(self, parties.release, self.handle)

    @property
    def policy(self) -> CachePolicy:
        """What the parties keep."""
        return self._parties.config.kv_cache

    @property
    def expert_capacity(self) -> float | None:
        """How many tokens of a call experts of a mixture take."""
        return self._parties.config.expert_capacity

    def extend(self, length: int) -> None:
        """A call ran that cached `length` further positions, and the parties' policy chose what stays."""
        policy = self.policy
        held = self.kv_length + length
        self.position += length
        self.kv_length = policy.entries(held, self.position, length)
        self._newest += length
        if policy.ranked(held, self.position, length) < held and policy.newest is not None:
            self._newest = min(self._newest, policy.newest)

    is_compileable, is_croppable = False, True
    is_linear: ClassVar[list[bool]] = [False]  # positions, which generate() does not send again (no layers: all)

    @property
    def is_initialized(self) -> bool:
        """Whether something was cached."""
        return self.position > 0

    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        held = f", kv_length={self.kv_length}" if self.kv_length < self.position else ""
        return f"PrivateCache(handle={self.handle}, rows={self.rows}, position={self.position}{held})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrivateCache":
        twin = PrivateCache(self._parties, self.rows)
        twin.position, twin.kv_length, twin._newest = self.position, self.kv_length, self._newest
        if self.position:
            self._parties.command(CopyCache(self.handle, to=twin.handle))
        return twin

    def __bool__(self) -> bool:
        """Whether anything is held, as transformers asks of its caches."""
        return self.is_initialized

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of the next position: cached positions per row, evicted ones too."""
        return self.position

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(positions after `query_length` further ones, number of the first)."""
        return self.position + query_length, 0

    def update(self, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Raises UnsupportedOp: keys and values never reach the client."""
        raise UnsupportedOp(
            "a PrivateCache is a handle; keys and values are with the parties, secret ones only as shares"
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, as `reorder_cache`."""
        if indices.ndim != 1 or not 0 <= int(indices.min()) <= int(indices.max()) < max(self.rows, 1):
            raise DomainError(f"cache rows: got {indices.tolist()}; want indices below {self.rows}")
        if self.position:
            self._parties.command(SelectRows(self.handle, indices.to(torch.int64).cpu()))
        self.rows = len(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue with rows `beam_idx` (int64 [n]; the parties see these indices). Raises DomainError for others."""
        if beam_idx.tolist() != list(range(self.rows)):
            self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, as `reorder_cache`. Raises DomainError for fewer than 1."""
        self.batch_select_indices(torch.arange(self.rows).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `tokens_to_remove` positions (0 or negative, as transformers counts them). Raises DomainError
        for a positive number, and for positions before which entries were evicted.
        """
        if tokens_to_remove > 0:
            raise DomainError(f"crop: got {tokens_to_remove}; want 0 or a negative number of positions to remove")
        count = min(-tokens_to_remove, self.position)
        if self._newest < count < self.position:
            raise DomainError(
                f"crop: got {tokens_to_remove}; of this cache only the last {self._newest} positions can be removed, "
                "because entries before them were evicted"
            )
        if count:
            self._parties.command(CropCache(self.handle, count))
            self.position -= count
            self.kv_length, self._newest = max(0, self.kv_length - count), max(0, self._newest - count)

    def reset(self) -> None:
        """Forget everything."""
        if self.position:
            self._parties.command(ResetCache(self.handle))
            self.position = self.kv_length = self._newest = 0


def check_cache(cache: object, parties: SessionClient) -> PrivateCache:
    """The cache as a handle of this session. Raises DomainError for anything else."""
    if not isinstance(cache, PrivateCache) or cache._parties is not parties:
        raise DomainError(
            f"{CACHE}: got {type(cache).__name__}; want the handle that an earlier call of this model returned (the "
            "cache itself lives at the parties)"
        )
    return cache


class PrivateEncoderOutput(BaseModelOutput):  # type: ignore[misc]
    """The handle of an encoder's output. `last_hidden_state` has row numbers (int64 [B, 1, 1]), no states: they survive
    generate()'s repeating and selecting, and tell the parties which rows a decoder call uses.
    """

    @classmethod
    def of(cls, parties: SessionClient, rows: int, length: int) -> "PrivateEncoderOutput":
        """A new handle for `rows` encoded inputs of `length` positions."""
        out = cls(last_hidden_state=torch.arange(rows).view(rows, 1, 1))
        out.keeper, out.source_rows, out.length = _Keeper(parties), rows, length
        return out

    @property
    def handle(self) -> int:
        """The number the parties know."""
        return int(self.keeper.handle)

    @property
    def row_index(self) -> Tensor:
        """Which encoded row each row of the batch uses."""
        index: Tensor = self.last_hidden_state
        return index.reshape(-1)


class _Keeper:
    """Frees the encoder output when the last handle is gone."""

    def __init__(self, parties: SessionClient) -> None:
        self.parties = parties
        self.handle = parties.new_handle()
        weakref.finalize(self, parties.release, self.handle)
