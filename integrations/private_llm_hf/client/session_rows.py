"""Which rows of a batch are whose: the part of each parallel session in a call, in what the parties keep, and in a
plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm_hf.client.session_client import Secret
from private_llm_hf.wire.commands import CacheEdit, Call, CallOrEdit, CopyCache, ResetCache, SelectRows

Rows = list[int]
"""How many rows each parallel session holds."""
Picks = list[Tensor | None]
"""For each parallel session which of its own rows are meant; None: all."""


class SessionRows:
    """The rows of caches and encoder outputs, by handle."""

    def __init__(self, parallel_sessions: int) -> None:
        self._parallel_sessions = parallel_sessions
        self._rows: dict[int, Rows] = {}
        self._groups: dict[int, int] = {}

    def of_call(self, call: Call) -> tuple[Rows | None, Picks]:
        """The rows of a call that continues what is kept, or None. Raises DomainError for another number of rows.

        Raises UnsupportedOp as `of_command`.
        """
        found: Rows | None
        picks: Picks = [None] * self._parallel_sessions
        encoded = call.encoded
        if encoded is not None and encoded.rows is not None:
            found, picks = self._picked(encoded.handle, encoded.rows)
        else:
            handles = (None if encoded is None else encoded.handle, call.cache)
            found = next((self._rows[h] for h in handles if h is not None and h in self._rows), None)
        if found is not None and sum(found) != call.rows:
            raise DomainError(f"rows: got {call.rows}; want {sum(found)}, as many as the cache or encoder output has")
        return found, picks

    def keep_call(self, call: Call, rows: Rows) -> None:
        """A call was made with these rows: what it fills has them, too."""
        for kept in (call.cache, call.encode_to):
            if kept is not None:
                self._rows[kept] = rows

    def of_command(self, edit: CacheEdit) -> tuple[Rows, Picks]:
        """The rows of a cache that a command is about.

        Raises UnsupportedOp if one would change its parallel session.
        """
        rows = self._rows[edit.handle]
        if isinstance(edit, SelectRows):
            return rows, self._picked(edit.handle, edit.index)[1]
        return rows, [None] * len(rows)

    def keep_command(self, edit: CacheEdit) -> None:
        """A command was given: what it changes has other rows now. Errors as `of_command`."""
        if isinstance(edit, ResetCache):
            self._rows.pop(edit.handle)
        elif isinstance(edit, CopyCache):
            self._rows[edit.to] = self._rows[edit.handle]
        elif isinstance(edit, SelectRows):
            self._rows[edit.handle] = self._picked(edit.handle, edit.index)[0]

    def _picked(self, handle: int, index: Tensor) -> tuple[Rows, Picks]:
        """Chosen rows of a kept state, parallel session by parallel session. Raises UnsupportedOp if a row would change
        its parallel session."""
        rows = self._rows[handle]
        owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))[index]
        if bool((owner[1:] < owner[:-1]).any()):
            raise UnsupportedOp(
                "a row of the batch would move to another parallel session, which cannot see it; use "
                "parallel_sessions=1 for this call, or a number of prompts that the parallel sessions divide evenly"
            )
        starts = torch.cumsum(torch.tensor([0, *rows]), 0)
        picks: Picks = [
            index[owner == parallel_session] - starts[parallel_session] for parallel_session in range(len(rows))
        ]
        return [int((owner == parallel_session).sum()) for parallel_session in range(len(rows))], picks

    def keep_together(self, handle: int, rows: int) -> None:
        """Rows come in groups of so many, which stay in one parallel session."""
        self._groups[handle] = rows

    def together(self, call: Call) -> int:
        """Rows in a group of this call."""
        group = 1 if call.cache is None else self._groups.get(call.cache, 1)
        return group if call.rows % group == 0 else 1

    def release(self, handle: int) -> None:
        """Forget a handle."""
        self._rows.pop(handle, None)
        self._groups.pop(handle, None)


def spread(total: int, together: int, busy: Sequence[int]) -> Rows:
    """Groups of rows over the parallel sessions in order; few groups go to the parallel sessions with the fewest calls
    (`busy`)."""
    groups, parallel_sessions = total // together, len(busy)
    chosen = sorted(sorted(range(parallel_sessions), key=lambda parallel_session: busy[parallel_session])[:groups])
    rows = [0] * parallel_sessions
    for place, parallel_session in enumerate(chosen):
        rows[parallel_session] = (groups // len(chosen) + (place < groups % len(chosen))) * together
    return rows


def parts_of_call(call: Call, rows: Rows, picks: Picks) -> Iterator[tuple[int, Call, slice]]:
    """For each parallel session that takes part: its number, its part of the call, and which rows of the batch these
    are."""
    start = 0
    for parallel_session, (count, index) in enumerate(zip(rows, picks, strict=True)):
        if count:
            yield parallel_session, _part(call, slice(start, start + count), index), slice(start, start + count)
        start += count


def parts_of_command(edit: CacheEdit, rows: Rows, picks: Picks) -> Iterator[tuple[int, CacheEdit]]:
    """For each parallel session that holds rows: its number and its part of a command about a cache."""
    for parallel_session, (count, index) in enumerate(zip(rows, picks, strict=True)):
        if count:
            yield (
                parallel_session,
                edit if index is None or not isinstance(edit, SelectRows) else replace(edit, index=index),
            )


def plan_parallel_sessions(
    entries: Sequence[CallOrEdit], parallel_sessions: int
) -> tuple[list[Rows], list[list[CallOrEdit]]]:
    """Of planned requests, one after the other in idle parallel sessions: the rows of each, and the requests of every
    parallel session."""
    kept, every = SessionRows(parallel_sessions), list[Rows]()
    parts: list[list[CallOrEdit]] = [[] for _ in range(parallel_sessions)]
    for entry in entries:
        if isinstance(entry, Call):
            held, picks = kept.of_call(entry)
            rows = spread(entry.rows, 1, [0] * parallel_sessions) if held is None else held
            kept.keep_call(entry, rows)
            for parallel_session, part, _ in parts_of_call(entry, rows, picks):
                parts[parallel_session].append(part)
        else:
            rows, picks = kept.of_command(entry)
            kept.keep_command(entry)
            for parallel_session, edit in parts_of_command(entry, rows, picks):
                parts[parallel_session].append(edit)
        every.append(rows)
    return every, parts


def _part(call: Call, rows: slice, index: Tensor | None) -> Call:
    """The rows `rows` of a call."""
    total, count = call.rows, rows.stop - rows.start
    encoded = call.encoded
    return replace(
        call,
        secret=tuple(replace(item, shape=(count, *item.shape[1:])) for item in call.secret),
        public={
            name: value[rows] if isinstance(value, Tensor) and value.shape[0] == total else value
            for name, value in call.public.items()
        },
        encoded=encoded if index is None or encoded is None else replace(encoded, rows=index),
    )


def secrets_of(secrets: Sequence[Secret], rows: slice, total: int) -> list[Secret]:
    """The rows `rows` of the secret inputs of a call with `total` rows."""
    mine = list[Secret]()
    for secret in secrets:
        if isinstance(secret, Tensor):
            mine.append(secret[rows])
        else:
            ids, vocabulary = secret
            mine.append((ids.view(total, -1)[rows].reshape(-1), vocabulary))
    return mine
