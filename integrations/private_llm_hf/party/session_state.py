"""What a party keeps between calls: KV caches and encoder outputs, of one client or of many.

Caches of sessions that decode together are rows of one cache, so that a pass appends to them without a copy; shorter
ones are padded on the left, which masks hide. A cache changes its company only when a pass (or an edit) asks for
another one: rows are then copied into a new cache, without columns that nobody in it needs. All of this is local.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from private_llm.errors import DomainError, TransportError
from private_llm.kv_cache.buffer import CacheRows
from private_llm.protocols.session import Session
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.kv_cache.cache import SecretCache, SecretEncoderDecoderCache
from private_llm_hf.wire import commands
from private_llm_hf.wire.commands import CacheEdit

Key = tuple[str, int]  # owner (a session; "" where a party has one client) and handle

AnyCache = SecretCache | SecretEncoderDecoderCache


@dataclass(frozen=True)
class CacheMember:
    """Rows of a cache that are one session's. padding: columns before their first position."""

    rows: int
    padding: int = 0


@dataclass
class _CacheGroup:
    """A cache and whose its rows are, in order."""

    cache: AnyCache
    members: dict[Key, CacheMember]

    def past(self, key: Key) -> int:
        position: int = self.cache.get_seq_length()
        return max(0, position - self.members[key].padding)

    def rows(self, key: Key) -> int:
        if len(self.members) > 1:
            return self.members[key].rows
        held = self.cache
        own = held.self_attention_cache if isinstance(held, SecretEncoderDecoderCache) else held
        return max((layer.buffer.batch for layer in own.layers), default=0)

    def first_row(self, key: Key) -> int:
        before = list(self.members)
        return sum(self.members[each].rows for each in before[: before.index(key)])

    def piece(self, key: Key) -> tuple[SecretCache, CacheRows]:
        if not isinstance(self.cache, SecretCache):
            raise DomainError("got the cache of an encoder-decoder in a batch of several; want it alone")
        return self.cache, CacheRows(self.first_row(key), self.rows(key), self.members[key].padding)


class SessionState:
    """What all clients' sessions keep at this party for one model, which was built for `session`, the parties' own."""

    def __init__(self, model: PreTrainedModel, session: Session) -> None:
        self.model, self.session = model, session
        self._groups: dict[Key, _CacheGroup] = {}
        self._encoded: dict[Key, SecretTensor] = {}

    # -- facts ------------------------------------------------------------------------------------------------
    def past(self, owner: str, handle: int) -> int:
        """Positions that a cache holds; 0 for a new one."""
        group = self._groups.get((owner, handle))
        return 0 if group is None else group.past((owner, handle))

    def rows(self, owner: str, handle: int) -> int:
        """Batch rows of a cache, 0 for an empty one."""
        group = self._groups.get((owner, handle))
        return group.rows((owner, handle)) if group is not None and group.past((owner, handle)) else 0

    def positions(self, owner: str) -> int:
        """Rows times positions of all that a session keeps."""
        caches = sum(group.past(key) * group.rows(key) for key, group in self._groups.items() if key[0] == owner)
        encoded = (value.shape for key, value in self._encoded.items() if key[0] == owner)
        return caches + sum(shape[0] * shape[1] for shape in encoded)

    def handles(self, owner: str) -> list[int]:
        """The numbers of all that a session keeps."""
        return [handle for of, handle in [*self._groups, *self._encoded] if of == owner]

    def encoded_shape(self, owner: str, handle: int) -> torch.Size | None:
        """[rows, positions, width] of an encoder's output, or None."""
        found = self._encoded.get((owner, handle))
        return None if found is None else found.shape

    def caches(self) -> Iterator[AnyCache]:
        """All caches, each once."""
        yield from {id(group): group.cache for group in self._groups.values()}.values()

    # -- for calls --------------------------------------------------------------------------------------------
    def cache(self, owner: str, handle: int) -> AnyCache:
        """A cache by itself, new and empty if there is none of this number. Copies it out of company."""
        key = (owner, handle)
        group = self._groups.get(key)
        if group is None:
            self._groups[key] = group = _CacheGroup(self.model.new_cache(), {key: CacheMember(0)})
        elif len(group.members) > 1:
            group = self._joined([key])
        return group.cache

    def together(self, wanted: Sequence[tuple[Key, int, int]]) -> AnyCache:
        """Caches (key, rows, positions to come) as rows of one, in this order, not copied while the company stays the
        same. All are new or none is. Raises DomainError for one named twice, and new ones beside others.
        """
        keys = [key for key, _, _ in wanted]
        held = [key for key in keys if self.past(*key)]
        if len({*keys}) < len(keys) or (held and len(held) < len(keys)):
            raise DomainError("together: want each cache once, and either new ones or such as hold something")
        group = self._groups.get(keys[0])
        if held:
            same = group is not None and list(group.members) == keys
            return group.cache if group is not None and same else self._joined(keys).cache
        self._leave(keys)
        width = max(new for _, _, new in wanted)
        made = _CacheGroup(self.model.new_cache(), {key: CacheMember(rows, width - new) for key, rows, new in wanted})
        self._groups |= dict.fromkeys(keys, made)
        return made.cache

    def keep_encoded(self, owner: str, handle: int, hidden: SecretTensor) -> None:
        """Keep an encoder's output [rows, positions, width]."""
        self._encoded[(owner, handle)] = hidden

    def encoded(self, owner: str, reference: commands.Encoded) -> BaseModelOutput:
        """An encoder's output, or some of its rows. Raises TransportError if there is none of this number."""
        found = self._encoded.get((owner, reference.handle))
        if found is None:
            raise TransportError(f"no encoder output {reference.handle} is kept here")
        return BaseModelOutput(last_hidden_state=found if reference.rows is None else found[reference.rows])

    # -- changes ----------------------------------------------------------------------------------------------
    def edit(self, owner: str, edit: CacheEdit) -> None:
        """Crop, select, copy or forget entries. Raises TransportError for no such cache, DomainError for a bad row."""
        key = (owner, edit.handle)
        group = self._groups.get(key)
        if group is None:
            raise TransportError(f"no cache {edit.handle} is kept here")
        match edit:
            case commands.SelectRows():
                self._select(key, group, edit.index)
            case commands.CropCache():
                self.cache(*key).crop(-edit.count)
            case commands.ResetCache():
                self.cache(*key).reset()
            case commands.CopyCache():
                made = copy.deepcopy(self.cache(*key))
                to = (owner, edit.to)
                self._leave([to])
                self._groups[to] = _CacheGroup(made, {to: CacheMember(0)})

    def free(self, owner: str, handles: Iterable[int]) -> None:
        """Forget what has these numbers."""
        keys = [(owner, handle) for handle in handles]
        self._leave(keys)
        for key in keys:
            self._encoded.pop(key, None)

    def forget(self, owner: str) -> None:
        """Forget all that a session keeps."""
        self.free(owner, self.handles(owner))

    def _select(self, key: Key, group: _CacheGroup, index: torch.Tensor) -> None:
        rows = group.rows(key)
        if rows and (not index.numel() or int(index.max()) >= rows):
            raise DomainError(f"rows of a cache: got {index.tolist()[:20]}; want one or more below {rows}")
        if len(group.members) > 1 and index.numel() == rows:  # the others' rows stay where they are
            every = torch.arange(sum(member.rows for member in group.members.values()))
            first = group.first_row(key)
            every[first : first + rows] = index + first
            group.cache.reorder_cache(every)
        else:
            self.cache(*key).reorder_cache(index)

    def _joined(self, keys: Sequence[Key]) -> _CacheGroup:
        """These caches, which hold something, as rows of a new one; those that they leave stay together."""
        pieces = [self._groups[key].piece(key) for key in keys]
        lengths = {key: self.past(*key) for key in keys}
        cache = SecretCache.stacked(pieces)
        width = cache.get_seq_length()
        rows = [piece.rows for _, piece in pieces]
        self._leave(keys)
        made = _CacheGroup(cache, {k: CacheMember(n, width - lengths[k]) for k, n in zip(keys, rows, strict=True)})
        self._groups |= dict.fromkeys(keys, made)
        return made

    def _leave(self, keys: Iterable[Key]) -> None:
        """Take caches out of their company and forget them; what nobody else needs goes with them."""
        gone = {key for key in keys if key in self._groups}
        touched = {id(self._groups[key]): self._groups[key] for key in gone}
        for key in gone:
            del self._groups[key]
        for group in touched.values():
            left = [key for key in group.members if self._groups.get(key) is group]
            if left and len(left) < len(group.members):
                self._joined(left)
