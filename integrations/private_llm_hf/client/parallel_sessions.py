"""Several parallel sessions as one set of parties: a batch's rows are spread over them, and all run at once.

Rows go to parallel sessions in order, as evenly as possible. A call with fewer rows than parallel sessions takes
parallel sessions that are idle, so calls from several threads of the user run at the same time, each in parallel
sessions of its own. What the parties keep (caches, encoder outputs) stays in the parallel session of its rows, so rows
may be reordered within a parallel session only. What is preprocessed is planned for every parallel session: its helping
party runs ahead and its receivers store, and planned calls are made one after the other.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, TransportError, UnsupportedOp
from private_llm.net.parallel_sessions import RoleAssignment, assignment, parallel_session_links
from private_llm.net.transport import Transport
from private_llm.protocol_facts import ASSISTED
from private_llm.protocols.session import join_as_client
from private_llm_hf.checkpoint.weights import Sink
from private_llm_hf.client.costs import Costs
from private_llm_hf.client.forward import part_of
from private_llm_hf.client.nodes import join_nodes
from private_llm_hf.client.parties import Parties
from private_llm_hf.client.preprocess import Schedule
from private_llm_hf.client.product_servers import ProductServers
from private_llm_hf.client.session_client import Secret
from private_llm_hf.client.split import join_split
from private_llm_hf.wire import commands
from private_llm_hf.wire.answers import Loaded
from private_llm_hf.wire.codec import Message
from private_llm_hf.wire.commands import CacheEdit, Call, CallOrEdit


def join_parallel_sessions(config: PrivateConfig, transport: Transport, shutdown: Callable[[], None]) -> Parties:
    """The client's end of all parallel sessions of a session."""
    if config.protocol == ASSISTED:
        return ProductServers(config, transport, shutdown)
    if config.protocol == "cascade":
        return join_nodes(config, transport, shutdown)
    if config.split is not None:
        return join_split(config, transport, shutdown)
    every = []
    for number in range(config.parallel_sessions):
        links = parallel_session_links(transport, config.parties, number, config.rotate_roles)
        every.append(Parties(config, links, join_as_client(config, links), shutdown))
    return every[0] if len(every) == 1 else ParallelSessions(config, every)


class ParallelSessions(Parties):
    """What all parallel sessions do together. Each one's own lock guards its links; the end is kept here."""

    def __init__(self, config: PrivateConfig, every: Sequence[Parties]) -> None:
        super().__init__(config, every[0].transport, every[0].end, every[0].shutdown)
        self._every = every
        self._kept = SessionRows(len(every))
        self._planned: list[RowNumbers] = []
        self._busy = [0] * len(every)
        self._choice = threading.Lock()

    @contextmanager
    def _using(self, rows: "RowNumbers") -> Iterator[None]:
        """Have the parallel sessions that hold rows for oneself."""
        with ExitStack() as stack:
            for each, count in zip(self._every, rows, strict=True):  # in this order: nobody waits in a circle
                if count:
                    stack.enter_context(each.lock)
            with self._guarded():
                yield

    def tell(self, message: Message, parties: Iterable[int] | None = None) -> None:
        """As `Parties.tell`, in every parallel session."""
        for each in self._every:
            each.tell(message, parties)

    # -- weights --------------------------------------------------------------------------------------------
    def use_stored(self, description: commands.Description, mine: Callable[[], str | None]) -> bool:
        """As `Parties.use_stored`; a party's sessions share its file. Raises ConfigError for one with rotate_roles."""
        with self._call():
            if self.config.rotate_roles and self._every[0].stored_model() is not None:
                raise ConfigError(
                    "rotate_roles: a share file holds the share of one role, and parties that take turns need one for "
                    "each; start the parties without share files, so that the client deals the weights, or set "
                    "rotate_roles=False"
                )
            found = self._every[0].use_stored(description, mine)
            if found:
                self._load_like(dict.fromkeys(range(1, len(self._every)), 0))
            return found

    @contextmanager
    def loading(self, description: commands.Description, stop_after: str | None = None) -> Iterator[Sink]:
        """One sharing, with masks of its own, for every assignment; sessions of equal assignment share it."""
        first: dict[RoleAssignment, int] = {}
        rotate = self.config.rotate_roles and self.config.weights == "secret"
        like = {
            number: first.setdefault(assignment(self.config.parties, number, rotate), number)
            for number in range(len(self._every))
        }
        with self._call():
            with ExitStack() as stack:
                loading = (self._every[number].loading(description, stop_after) for number in first.values())
                sinks = [stack.enter_context(each) for each in loading]

                def sink(name: str, tensor: Tensor) -> None:
                    for each in sinks:
                        each(name, tensor)

                yield sink
            self._load_like({number: other for number, other in like.items() if number != other})

    def _load_like(self, like: dict[int, int]) -> None:
        """Parallel sessions build their model from the shares that another one of the same party holds."""
        for number, other in like.items():
            self._every[number].tell(commands.LoadLike(other))
        for number in like:
            self._every[number].answers(Loaded)
            self._every[number].transport.ledger.reset()
        self.ranges = self._every[0].ranges

    # -- calls ------------------------------------------------------------------------------------------------
    def forward(self, call: Call, secrets: list[Secret]) -> tuple[str, dict[str, Tensor]]:
        """As `Parties.forward`, all at once. Raises TransportError for different answers, else as `SessionRows.of`."""
        with self.alone():
            place = self.place_of(call)
            if place is not None:
                return self._run(call, secrets, self._planned[place[1]])
        return self._run(call, secrets, None)

    def _run(self, call: Call, secrets: list[Secret], planned: "RowNumbers | None") -> tuple[str, dict[str, Tensor]]:
        """planned: the rows of a call that was preprocessed."""
        held, picks = self._kept.of(call)
        where = self._reserved(held or planned or [], call.rows, self._kept.together(call))
        with where as rows, self._using(rows), ExitStack() as stack:
            waiting = []
            for number, part, mine in parts_of(call, rows, picks):
                each = self._every[number]
                place = None if planned is None else each.place_of(part)
                given = [part_of(secret, call.rows, mine) for secret in secrets]
                waiting.append(stack.enter_context(each.asking(part, given, place)))
            answers = [answer() for answer in waiting]
        self._kept.keep(call, rows)
        if len({(kind, *opened) for kind, opened in answers}) != 1:
            raise TransportError(
                "the parallel sessions gave different answers: they do not run the same model or version"
            )
        return answers[0][0], {name: torch.cat([opened[name] for _, opened in answers]) for name in answers[0][1]}

    @contextmanager
    def _reserved(self, rows: "RowNumbers", total: int, together: int) -> "Iterator[RowNumbers]":
        """The parallel sessions of a call, its own while it runs: those that hold what it continues, or idle ones."""
        with self._choice:
            rows = rows or spread(total, together, self._busy)
            self._busy = [calls + bool(count) for calls, count in zip(self._busy, rows, strict=True)]
        try:
            yield rows
        finally:
            with self._choice:
                self._busy = [calls - bool(count) for calls, count in zip(self._busy, rows, strict=True)]

    def command(self, edit: CacheEdit) -> None:
        """Cache management in every parallel session that holds rows of the cache."""
        with self.alone():
            planned = self.place_of(edit) is not None
            rows, picks = self._kept.of(edit)
            with self._using(rows):
                for number, part, _ in parts_of(edit, rows, picks):
                    if planned:
                        self._every[number].place_of(part)
                    else:
                        self._every[number].tell(commands.ManageCache(part))
            self._kept.keep(edit, rows)

    # -- preprocessing ----------------------------------------------------------------------------------------
    def preprocess(self, entries: list[CallOrEdit]) -> int:
        """As `Parties.preprocess`, in every parallel session. Raises UnsupportedOp as `command`, with nothing sent."""
        self._check_helped()
        planned, parts = plan_parallel_sessions(entries, len(self._every))
        schedule = Schedule(next(self._plans), entries)
        with self.alone(), self._using([1] * len(self._every)):
            self._drop_schedule()
            waiting = [each.prepare(part) for each, part in zip(self._every, parts, strict=True)]
            stored = sum(prepared() for prepared in waiting)
            self._planned, self._schedule = planned, schedule if entries else None
        return stored

    def _drop_schedule(self) -> None:
        """Forget the plan as a whole; what the parties keep for it is each parallel session's to free."""
        self._schedule = None

    # -- handles, costs -------------------------------------------------------------------------------------
    def keep_together(self, handle: int, rows: int) -> None:
        """Rows that may be reordered among themselves go to one parallel session."""
        self._kept.keep_together(handle, rows)

    def release(self, handle: int) -> None:
        """Forget a handle in every parallel session with its next call."""
        self._kept.release(handle)
        for filled in self._filled.values():
            filled.discard(handle)
        for each in self._every:
            each.release(handle)

    def costs(self, reset: bool = False) -> Costs:
        """All parallel sessions together: bytes add up, rounds are those of the parallel session that waited most."""
        with self._call():
            found = [each.costs(reset) for each in self._every]
        return Costs(
            tuple(ledger for costs in found for ledger in costs.ledgers),
            tuple(ledger for costs in found for ledger in costs.helpers),
        )


# -- Which rows of a batch are whose ----------------------------------------------------------------------------------
Entry = TypeVar("Entry", bound=CallOrEdit)
RowNumbers = list[int]  # how many rows each parallel session holds
Picks = list[Tensor | None]  # for each parallel session which of its own rows are meant; None: all


class SessionRows:
    """The rows of caches and encoder outputs, by handle, in a number of parallel sessions."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._rows: dict[int, RowNumbers] = {}
        self._groups: dict[int, int] = {}

    def of(self, entry: CallOrEdit) -> tuple[RowNumbers, Picks]:
        """The rows of what a request continues or changes (empty: nothing that is kept), and which of them it means.
        Raises DomainError for another number of rows, UnsupportedOp if a row would change its parallel session.
        """
        whole: Picks = [None] * self._number
        if isinstance(entry, commands.SelectRows):
            return self._rows[entry.handle], self._picked(entry.handle, entry.index)[1]
        if not isinstance(entry, Call):
            return self._rows[entry.handle], whole
        encoded = entry.encoded
        if encoded is not None and encoded.rows is not None:
            found, picks = self._picked(encoded.handle, encoded.rows)
        else:
            handles = (None if encoded is None else encoded.handle, entry.cache)
            found, picks = next((self._rows[h] for h in handles if h is not None and h in self._rows), []), whole
        if found and sum(found) != entry.rows:
            raise DomainError(f"rows: got {entry.rows}; want {sum(found)}, as many as the cache or encoder output has")
        return found, picks

    def keep(self, entry: CallOrEdit, rows: RowNumbers) -> None:
        """A request was made with these rows: what it fills or changes has them now. Raises UnsupportedOp as `of`."""
        match entry:
            case Call():
                self._rows |= {kept: rows for kept in (entry.cache, entry.encode_to) if kept is not None}
            case commands.ResetCache():
                self._rows.pop(entry.handle)
            case commands.CopyCache():
                self._rows[entry.to] = rows
            case commands.SelectRows():
                self._rows[entry.handle] = self._picked(entry.handle, entry.index)[0]

    def _picked(self, handle: int, index: Tensor) -> tuple[RowNumbers, Picks]:
        """Chosen rows of a kept state, by parallel session. Raises UnsupportedOp if a row would change its own."""
        rows = self._rows[handle]
        owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))[index]
        if bool((owner[1:] < owner[:-1]).any()):
            raise UnsupportedOp(
                "a row of the batch would move to another parallel session, which cannot see it; use "
                "parallel_sessions=1 for this call, or a number of prompts that the parallel sessions divide evenly"
            )
        starts = torch.cumsum(torch.tensor([0, *rows]), 0)
        numbers = range(len(rows))
        picks: Picks = [index[owner == number] - starts[number] for number in numbers]
        return [int((owner == number).sum()) for number in numbers], picks

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


def spread(total: int, together: int, busy: Sequence[int]) -> RowNumbers:
    """Groups of rows over the parallel sessions in order; few groups go to those with the fewest calls (`busy`)."""
    groups, numbers = total // together, range(len(busy))
    chosen = sorted(sorted(numbers, key=lambda number: busy[number])[:groups])
    rows = [0] * len(busy)
    for place, number in enumerate(chosen):
        rows[number] = (groups // len(chosen) + (place < groups % len(chosen))) * together
    return rows


def parts_of(entry: Entry, rows: RowNumbers, picks: Picks) -> Iterator[tuple[int, Entry, slice]]:
    """Of each parallel session that takes part: number, part of the request, and which rows of the batch these are."""
    start = 0
    for number, (count, index) in enumerate(zip(rows, picks, strict=True)):
        if count:
            yield number, _part(entry, slice(start, start + count), index), slice(start, start + count)
        start += count


def _part(entry: Entry, rows: slice, index: Tensor | None) -> Entry:
    """The rows `rows` of a request; index: those of what a parallel session keeps."""
    if isinstance(entry, commands.SelectRows):
        return entry if index is None else replace(entry, index=index)
    if not isinstance(entry, Call):
        return entry
    total, count, encoded = entry.rows, rows.stop - rows.start, entry.encoded
    return replace(
        entry,
        secret=tuple(replace(item, shape=(count, *item.shape[1:])) for item in entry.secret),
        public={
            name: value[rows] if isinstance(value, Tensor) and value.shape[0] == total else value
            for name, value in entry.public.items()
        },
        encoded=encoded if index is None or encoded is None else replace(encoded, rows=index),
    )


def plan_parallel_sessions(
    entries: Sequence[CallOrEdit], number: int
) -> tuple[list[RowNumbers], list[list[CallOrEdit]]]:
    """Of planned requests, one after the other: the rows of each, and the requests of every parallel session."""
    kept, every = SessionRows(number), list[RowNumbers]()
    parts: list[list[CallOrEdit]] = [[] for _ in range(number)]
    for entry in entries:
        rows, picks = kept.of(entry)
        if isinstance(entry, Call):
            rows = rows or spread(entry.rows, 1, [0] * number)
        kept.keep(entry, rows)
        for place, part, _ in parts_of(entry, rows, picks):
            parts[place].append(part)
        every.append(rows)
    return every, parts
