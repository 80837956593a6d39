"""The KV cache of one decoder layer: keys and values as shares, and which positions they belong to.

Two numbers that are often equal are kept apart: `position`, the number of the next token (what rotary and learned
positions use, and how wide a mask is), and `length`, how many entries are held. They part when entries are evicted:
`keep` drops entries by public indices, and those that stay remember the positions they were made at, so neither the
keys nor the masks change their meaning. Where entries were chosen by secrets (`replace`), nobody knows the positions of
those that stayed; keys carry their own, and all later queries may see them. Everything here is local.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import DomainError
from private_llm.nn.padded_keys import HeldShare, padded_length
from private_llm.protocols.share import Share
from private_llm.tensor.fixed import Fixed

_SPARE = 32  # least room for entries to come; buffers end at multiples of it, where padded lengths end, too


@dataclass(frozen=True)
class CacheRows:
    """Of a cache the batch rows row .. row + rows - 1, without their first `column` entries."""

    row: int
    rows: int
    column: int = 0


class GrowingRows:
    """Shares [B, G, length, D] in buffers that grow by half; what lies beyond `length` may be anything."""

    def __init__(self, first: Fixed) -> None:
        self.session, self.frac, self.parts = first.session, first.frac, first.share.parts
        self.length = first.shape[2]
        self._copies = self.parts, self.length, 0  # up to which entry copies of the newest follow these

    @classmethod
    def within(cls, buffers: Fixed, length: int) -> GrowingRows:
        """The first `length` entries of buffers [B, G, capacity, D] that nobody else holds."""
        made = cls(buffers)
        made.length = length
        return made

    def rooms(self, new: int) -> list[Tensor]:
        """Where the caller writes `new` more entries, one with its copies (`_repeated`), before it raises `length`."""
        total = self.length + new
        if total > self.parts[0].shape[2]:
            self._move(_rounded(total + total // 2 + _SPARE))
        stop = min(padded_length(total), self.parts[0].shape[2]) if new == 1 else total
        self._copies = self.parts, total, stop
        return [part.narrow(2, self.length, stop - self.length) for part in self.parts]

    def keep(self, index: Tensor) -> None:
        """Only the entries `index` [B or 1, G or 1, kept], with room for the next ones."""
        batch, heads, _, size = self.parts[0].shape
        self.length = index.shape[-1]
        wide = index.unsqueeze(-1).expand(batch, heads, self.length, size)
        picked = (part.gather(2, wide.to(part.device)) for part in self.parts)
        self.parts = tuple(_in_buffer(part, self.length + _SPARE) for part in picked)

    def seal(self) -> None:
        """Give up the spare room: the next append moves to a new buffer (others may hold this one)."""
        self.parts = self._first(self.length)

    def crop(self, length: int) -> None:
        """Keep the first `length` entries."""
        self.length = length
        self.seal()

    def select(self, index: Tensor) -> None:
        """Keep, repeat or reorder batch rows."""
        self.parts = tuple(part[:, :, : self.length].index_select(0, index.to(part.device)) for part in self.parts)

    def copy(self) -> GrowingRows:
        """Another holder of the same entries; either goes on in a buffer of its own."""
        self.seal()
        return GrowingRows(self.held())

    def held(self) -> Fixed:
        """The entries."""
        repeated = functools.partial(self._repeated, self.parts, self.length)
        return Fixed(self.session, HeldShare(self._first(self.length), repeated), self.frac)

    def _repeated(self, buffers: tuple[Tensor, ...], held: int, total: int) -> Share | None:
        """The entries, then copies of the newest up to `total` of them, until the next append. Views, where buffers
        have the room; else they move to larger ones first. None if it holds others now than `held` in `buffers`.
        """
        if self.parts is not buffers or self.length != held:
            return None
        if total > self.parts[0].shape[2]:
            self._move(total)
        parts, length, stop = self._copies
        if parts is not self.parts or length != self.length or stop < total:
            for part in self.parts:
                part[:, :, self.length : total] = part[:, :, self.length - 1 : self.length]
            self._copies = self.parts, self.length, total
        return Share(self._first(total))

    def _first(self, length: int) -> tuple[Tensor, ...]:
        return tuple([part.narrow(2, 0, length) for part in self.parts])

    def _move(self, capacity: int) -> None:
        self.parts = tuple([_in_buffer(part, capacity) for part in self._first(self.length)])


def _stacked(pieces: Sequence[tuple[GrowingRows, CacheRows]], width: int) -> GrowingRows:
    """The entries of pieces as rows of one buffer of `width` entries and room for more, zeros on the left. Local."""
    first = pieces[0][0]
    total = sum(piece.rows for _, piece in pieces)
    parts = []
    for number, part in enumerate(first.parts):
        _, heads, _, size = part.shape
        buffer = torch.empty((total, heads, _rounded(width + _SPARE), size), dtype=part.dtype, device=part.device)
        start = 0
        for rows, piece in pieces:
            stop, left = start + piece.rows, width - (rows.length - piece.column)
            buffer[start:stop, :, :left] = 0  # what everybody knows is a share of itself; nobody sees these entries
            taken = rows.parts[number][piece.row : piece.row + piece.rows, :, piece.column : rows.length]
            buffer[start:stop, :, left:width] = taken
            start = stop
        parts.append(buffer)
    return GrowingRows.within(Fixed(first.session, Share(tuple(parts)), first.frac), width)


def _rounded(capacity: int) -> int:
    """Up to one of eight between a power of two and the next: programs are recorded for a buffer's layout."""
    step = max(_SPARE, (1 << capacity.bit_length()) // 16)
    return -(-capacity // step) * step


def _in_buffer(part: Tensor, capacity: int) -> Tensor:
    """A copy of entries with room for at least `capacity` of them."""
    batch, heads, length, size = part.shape
    buffer = torch.empty((batch, heads, -(-capacity // _SPARE) * _SPARE, size), dtype=part.dtype, device=part.device)
    buffer[:, :, :length] = part
    return buffer


def columns_at(table: Tensor, positions: Tensor, heads: int) -> Tensor:
    """Columns at int64 `positions` [B or 1, G or 1, kept] of a table [B or 1, H or 1, q, position]: [.., q, kept].

    heads: query heads H, a multiple of G.
    """
    if positions.shape[1] > 1:
        positions = positions.repeat_interleave(heads // positions.shape[1], dim=1)
    outer = torch.broadcast_shapes(table.shape[:2], positions.shape[:2])
    wide = positions.unsqueeze(2).expand(*outer, table.shape[2], -1)
    return table.expand(*outer, -1, -1).gather(-1, wide.to(table.device))


def checked_index(index: Tensor, batch: int, heads: int, length: int) -> Tensor:
    """Ascending entries below `length`, int64 [kept] or [B or 1, G or 1, kept], as the latter; else DomainError."""
    index = index.view(1, 1, -1) if index.ndim == 1 else index
    if index.ndim != 3 or index.shape[0] not in (1, batch) or index.shape[1] not in (1, heads):
        rows = [f"{size} or 1" if size > 1 else "1" for size in (batch, heads)]
        raise DomainError(f"keep: got indices of shape {tuple(index.shape)}; want [kept] or [{', '.join(rows)}, kept]")
    if not index.numel() or bool((index < 0).any() | (index >= length).any() | (index.diff() <= 0).any()):
        raise DomainError(f"keep: want one or more indices, ascending, from 0 to {length - 1}")
    return index


class KVBuffer:
    """Keys [B, G, length, D] and values [B, G, length, Dv] of one layer.

    position: the number of the next position. positions: those of the entries, int64 [B or 1, G or 1, length],
    ascending; None while nothing was evicted by public indices, when they are 0 .. position - 1, but for the first
    `hidden` entries, whose positions are secret. tokens: bool [B or 1, hidden], which of these are no padding; None:
    all. newest: so many entries at the end are those of the last positions; None: all.
    """

    def __init__(self) -> None:
        self.position = self.hidden = 0
        self.positions: Tensor | None = None
        self.tokens: Tensor | None = None
        self.newest: int | None = None
        self._rows: tuple[GrowingRows, GrowingRows] | None = None

    @property
    def length(self) -> int:
        """Entries that are held, per row and head."""
        return 0 if self._rows is None else self._rows[0].length

    @property
    def keys(self) -> Fixed | None:
        """[B, G, length, D], or None while empty."""
        return None if self._rows is None else self._rows[0].held()

    @property
    def values(self) -> Fixed | None:
        """[B, G, length, Dv], or None while empty."""
        return None if self._rows is None else self._rows[1].held()

    def append(self, key: Fixed, value: Fixed) -> tuple[Fixed, Fixed]:
        """Entries [B, G, new, D] and [B, G, new, Dv] of the next positions, to all that is held: [B, G, length, ..]."""
        new = key.shape[2]
        if self._rows is None:
            self._rows = (GrowingRows(key), GrowingRows(value))
        else:
            rooms = [room for rows in self._rows for room in rows.rooms(new)]
            torch._foreach_copy_(rooms, [*key.share.parts, *value.share.parts])
            for rows in self._rows:
                rows.length += new
        if self.positions is not None:
            made = torch.arange(self.position, self.position + new).expand(*self.positions.shape[:2], new)
            self.positions = torch.cat([self.positions, made], dim=-1)
        self.position += new
        self.newest = None if self.newest is None else self.newest + new
        return self._rows[0].held(), self._rows[1].held()

    def replace(self, keys: Fixed, values: Fixed, newest: int, tokens: Tensor | None) -> None:
        """Hold these entries [B, G, kept, D] and [B, G, kept, Dv] instead, in the order of their secret positions.

        newest: the last so many are those of the last positions. tokens: bool [B or 1, kept]: which are no padding.
        """
        self._rows = (GrowingRows(keys), GrowingRows(values))
        self.positions, self.hidden, self.tokens = None, keys.shape[2], tokens
        self.newest = newest if self.newest is None else min(newest, self.newest)

    def positions_held(self) -> Tensor:
        """As `positions`, also while nothing was evicted: [B or 1, G or 1, length]. Not for hidden ones."""
        return torch.arange(self.length).view(1, 1, -1) if self.positions is None else self.positions

    def keep(self, index: Tensor) -> None:
        """Evict all entries but `index`: int64 [kept], or [B or 1, G or 1, kept], into the entries held.

        Raises DomainError for another shape, for indices that do not ascend or do not exist, for none, and while empty.
        """
        if self._rows is None:
            raise DomainError("keep: this cache holds nothing yet")
        batch, heads = self._rows[0].parts[0].shape[:2]
        index = checked_index(index, batch, heads, self.length)
        if index.shape[-1] == self.length:
            return
        held = self.positions_held()
        rows, groups = (max(pair) for pair in zip(held.shape[:2], index.shape[:2], strict=True))
        self.positions = held.expand(rows, groups, -1).gather(-1, index.expand(rows, groups, -1))
        for each in self._rows:
            each.keep(index)

    def columns(self, table: Tensor, heads: int) -> Tensor:
        """Held columns [B or 1, H or 1, q, length] of a public table [B or 1, H or 1, q, position], heads: H."""
        if self.hidden:
            newer = table[..., self.position - self.length + self.hidden : self.position]
            seen = torch.ones(1, self.hidden, dtype=torch.bool) if self.tokens is None else self.tokens
            outer = torch.broadcast_shapes(newer.shape[:1], seen.shape[:1])
            wide = seen.to(table.device)[:, None, None, :].expand(*outer, *table.shape[1:3], -1)
            return torch.cat([wide, newer.expand(*outer, -1, -1, -1)], -1)
        if self._rows is None or self.positions is None:
            return table
        return columns_at(table, self.positions, heads)

    def crop(self, count: int) -> None:
        """Forget the last `count` positions. Raises DomainError if some of them were evicted and earlier ones not."""
        start = max(0, self.position - count)
        if self._rows is None:
            return
        if not start:  # what comes next may have another number of rows
            self._forget()
            return
        if self.newest is not None and count > self.newest:
            raise DomainError(
                f"crop: got {count} positions; of this cache only the last {self.newest} can be removed, because "
                "entries before them were evicted"
            )
        length = max(0, self.length - count)
        if self.positions is not None:
            if self.length < count or not bool(((self.positions >= start).sum(-1) == count).all()):
                raise DomainError(
                    f"crop: got {count} positions; some of them were evicted from this cache, so it cannot go back to "
                    f"position {start}"
                )
            self.positions = self.positions[..., :length]
        for rows in self._rows:
            rows.crop(length)
        self.position = start
        self.newest = None if self.newest is None else self.newest - count
        self.hidden = min(self.hidden, length)
        self.tokens = None if self.tokens is None or not length else self.tokens[:, : self.hidden]

    def _forget(self) -> None:
        self.position = self.hidden = 0
        self.positions = self.tokens = self.newest = self._rows = None

    def select(self, index: Tensor) -> None:
        """Keep, repeat or reorder batch rows by public indices (int64 [rows]); B becomes their number."""
        if self.positions is not None and self.positions.shape[0] > 1:
            self.positions = self.positions[index]
        if self.tokens is not None and self.tokens.shape[0] > 1:
            self.tokens = self.tokens[index]
        for rows in self._rows or ():
            rows.select(index)

    @property
    def batch(self) -> int:
        """Batch rows; 0 while empty."""
        return 0 if self._rows is None else int(self._rows[0].parts[0].shape[0])

    def copy(self) -> KVBuffer:
        """Another cache with the same entries so far; no memory is copied before one of them goes on. Local."""
        twin = copy.copy(self)
        if self._rows is not None:
            twin._rows = (self._rows[0].copy(), self._rows[1].copy())
        return twin

    @classmethod
    def stacked(cls, pieces: Sequence[tuple[KVBuffer, CacheRows]]) -> KVBuffer:
        """Pieces of caches as the batch rows of one, in this order, ending at the same position. Copies; local.

        Shorter pieces get entries on the left that no mask may show. Raises DomainError for caches from which entries
        were evicted, and where only some are empty.
        """
        if any(each.positions is not None or each.hidden or each.newest is not None for each, _ in pieces):
            raise DomainError("stacked: want caches that hold all their entries; of these some were evicted")
        empty = [each._rows is None for each, _ in pieces]
        if any(empty) and not all(empty):
            raise DomainError("stacked: got empty and filled caches; want all of them empty, or all filled")
        made = cls()
        if not all(empty):
            width = max(each.length - piece.column for each, piece in pieces)
            held = [each._rows for each, _ in pieces if each._rows is not None]
            keys, values = (
                _stacked([(rows[i], piece) for rows, (_, piece) in zip(held, pieces, strict=True)], width)
                for i in range(2)
            )
            made._rows, made.position = (keys, values), width
        return made
