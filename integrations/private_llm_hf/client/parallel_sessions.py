"""Several lanes as one set of parties: the rows of a batch are spread over them, and they run at the same time.

Rows go to lanes in order, as evenly as possible. A call with fewer rows than lanes takes lanes that are idle, so calls
from several threads of the user run at the same time, each in lanes of its own. What the parties keep (caches, encoder
outputs) stays in the lane of its rows, so rows may be reordered within a lane only. What is preprocessed is planned for
every lane: its helping party runs ahead and its receivers store, and planned calls are made one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TransportError
from private_llm.net.parallel_sessions import RoleAssignment, assignment, lane_links
from private_llm.net.transport import Transport
from private_llm.protocols.session import join_as_client
from private_llm_hf.checkpoint.weights import Sink
from private_llm_hf.client.costs import Costs
from private_llm_hf.client.lane_rows import (
    LaneRows,
    Rows,
    parts_of_call,
    parts_of_command,
    plan_lanes,
    secrets_of,
    spread,
)
from private_llm_hf.client.parties import Parties
from private_llm_hf.client.schedule import Schedule
from private_llm_hf.client.session_client import Secret
from private_llm_hf.token_sharding.client import join_nodes
from private_llm_hf.token_sharding.split import join_split
from private_llm_hf.wire.answers import Loaded
from private_llm_hf.wire.codec import Message
from private_llm_hf.wire.commands import CacheEdit, Call, Description, LoadLike, ManageCache, Request


def join_lanes(config: PrivateConfig, transport: Transport, shutdown: Callable[[], None]) -> Parties:
    """The client's end of all lanes of a session."""
    if config.protocol == "cascade":
        return join_nodes(config, transport, shutdown)
    if config.split is not None:
        return join_split(config, transport, shutdown)
    lanes = []
    for lane in range(config.lanes):
        links = lane_links(transport, config.parties, lane, config.permute)
        lanes.append(Parties(config, links, join_as_client(config, links), shutdown))
    return lanes[0] if config.lanes == 1 else Lanes(config, lanes)


class Lanes(Parties):
    """What all lanes do together. A lane's own lock guards its links; the end of the session is kept here."""

    def __init__(self, config: PrivateConfig, lanes: Sequence[Parties]) -> None:
        first = lanes[0]
        super().__init__(config, first.transport, first.end, first.shutdown)
        self._lanes = lanes
        self._kept = LaneRows(len(lanes))
        self._planned: list[Rows] = []
        self._busy = [0] * len(lanes)
        self._choice = threading.Lock()

    @contextmanager
    def _using(self, rows: Rows) -> Iterator[None]:
        """Have the lanes that hold rows for oneself."""
        with ExitStack() as stack:
            for lane, count in zip(self._lanes, rows, strict=True):  # always in this order: nobody waits in a circle
                if count:
                    stack.enter_context(lane.lock)
            with self._guarded():
                yield

    def tell(self, message: Message, parties: Iterable[int] | None = None) -> None:
        """As `Parties.tell`, in every lane."""
        for lane in self._lanes:
            lane.tell(message, parties)

    # -- weights --------------------------------------------------------------------------------------------
    def use_held(self, description: Description, mine: Callable[[], str | None]) -> bool:
        """As `Parties.use_held`, in every lane: the lanes of a party share its file."""
        with self._call():
            if self.config.permute and self._lanes[0].held_model() is not None:
                raise ConfigError(
                    "permute: a share file holds the share of one role, and parties that take turns need one for each; "
                    "start the parties without share files, so that the client deals the weights, or set permute=False"
                )
            found = self._lanes[0].use_held(description, mine)
            if found:
                self._load_like(dict.fromkeys(range(1, len(self._lanes)), 0))
                self.ranges = self._lanes[0].ranges
            return found

    @contextmanager
    def loading(self, description: Description, stop_behind: str | None = None) -> Iterator[Sink]:
        """One sharing, with masks of its own, for every assignment; lanes of equal assignment use the same shares."""
        first: dict[RoleAssignment, int] = {}
        like: dict[int, int] = {}
        for lane in range(len(self._lanes)):
            cast = assignment(self.config.parties, lane, self.config.permute and self.config.weights == "secret")
            like[lane] = first.setdefault(cast, lane)
        with self._call():
            with ExitStack() as stack:
                sinks = [
                    stack.enter_context(self._lanes[lane].loading(description, stop_behind)) for lane in first.values()
                ]

                def sink(name: str, tensor: Tensor) -> None:
                    for each in sinks:
                        each(name, tensor)

                yield sink
            self._load_like({lane: other for lane, other in like.items() if lane != other})
            self.ranges = self._lanes[0].ranges

    def _load_like(self, like: dict[int, int]) -> None:
        """Lanes build their model from the shares that another lane of the same party holds."""
        for lane, other in like.items():
            self._lanes[lane].tell(LoadLike(other))
        for lane in like:
            self._lanes[lane].answers(Loaded)
            self._lanes[lane].transport.ledger.reset()

    # -- calls ------------------------------------------------------------------------------------------------
    def forward(self, call: Call, secrets: list[Secret]) -> tuple[str, dict[str, Tensor]]:
        """As `Parties.forward`, every lane its rows, all at the same time."""
        with self.lock:
            place = self.place_of(call)
            if place is not None:
                return self._run(call, secrets, self._planned[place[1]])
        return self._run(call, secrets, None)

    def _run(
        self, call: Call, secrets: list[Secret], planned: Rows | None
    ) -> tuple[str, dict[str, Tensor]]:  # fmt: skip
        """planned: the rows of a call that was preprocessed."""
        total = call.rows
        held, picks = self._kept.of_call(call)
        where = self._reserved(held or planned, total, self._kept.together(call))
        with where as rows, self._using(rows), ExitStack() as stack:
            waiting = []
            for number, part, mine in parts_of_call(call, rows, picks):
                lane = self._lanes[number]
                place = None if planned is None else lane.place_of(part)
                waiting.append(stack.enter_context(lane.asking(part, secrets_of(secrets, mine, total), place)))
            answers = [answer() for answer in waiting]
        self._kept.keep_call(call, rows)
        kinds = {(kind, *opened) for kind, opened in answers}
        if len(kinds) != 1:
            raise TransportError("the lanes gave different answers: they do not run the same model or version")
        return answers[0][0], {name: torch.cat([opened[name] for _, opened in answers]) for name in answers[0][1]}

    @contextmanager
    def _reserved(self, rows: Rows | None, total: int, together: int) -> Iterator[Rows]:
        """The lanes of a call: those that hold what it continues, or idle ones; other calls keep off while it runs."""
        with self._choice:
            rows = spread(total, together, self._busy) if rows is None else rows
            used = [lane for lane, count in enumerate(rows) if count]
            for lane in used:
                self._busy[lane] += 1
        try:
            yield rows
        finally:
            with self._choice:
                for lane in used:
                    self._busy[lane] -= 1

    def command(self, edit: CacheEdit) -> None:
        """Cache management in every lane that holds rows of the cache."""
        with self.lock:
            planned = self.place_of(edit) is not None
            rows, picks = self._kept.of_command(edit)
            with self._using(rows):
                for number, part in parts_of_command(edit, rows, picks):
                    lane = self._lanes[number]
                    if planned:
                        lane.tell(ManageCache(part, lane.place_of(part)), lane.online)
                    else:
                        lane.tell(ManageCache(part))
            self._kept.keep_command(edit)

    # -- preprocessing ----------------------------------------------------------------------------------------
    def preprocess(self, entries: list[Request]) -> int:
        """As `Parties.preprocess`, in every lane. Raises UnsupportedOp, before anything is sent, as `command` does."""
        self._check_helped()
        planned, parts = plan_lanes(entries, len(self._lanes))
        schedule = Schedule(next(self._plans), entries)
        with self.lock, self._using([1] * len(self._lanes)):
            self._drop_schedule()
            waiting = [lane.prepare(part) for lane, part in zip(self._lanes, parts, strict=True)]
            stored = sum(prepared() for prepared in waiting)
            self._planned, self._schedule = planned, schedule if entries else None
        return stored

    def _drop_schedule(self) -> None:
        """Forget the plan as a whole; what the parties keep for it is each lane's to free."""
        self._schedule = None

    # -- handles, costs -------------------------------------------------------------------------------------
    def keep_together(self, handle: int, rows: int) -> None:
        """Rows that may be reordered among themselves go to one lane."""
        self._kept.keep_together(handle, rows)

    def release(self, handle: int) -> None:
        """Forget a handle in every lane with its next call."""
        self._kept.release(handle)
        for filled in self._filled.values():
            filled.discard(handle)
        for lane in self._lanes:
            lane.release(handle)

    def costs(self, reset: bool = False) -> Costs:
        """All lanes together: bytes add up, rounds are those of the lane that waited most."""
        with self._call():
            each = [lane.costs(reset) for lane in self._lanes]
        return Costs(
            tuple(ledger for costs in each for ledger in costs.ledgers),
            tuple(ledger for costs in each for ledger in costs.helpers),
        )
