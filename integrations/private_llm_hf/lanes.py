"""Several lanes as one set of parties: the rows of a batch are spread over them, and they run at the same time.

Rows go to lanes in order, as evenly as possible. A call with fewer rows than lanes takes lanes that are idle, so calls
from several threads of the user run at the same time, each in lanes of its own. What the parties keep (caches, encoder
outputs) stays in the lane of its rows, so rows may be reordered within a lane only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, TransportError, UnsupportedOp
from private_llm.net.lanes import Casting, casting, lane_links
from private_llm.net.transport import Transport
from private_llm.protocols.session import join_as_client
from private_llm_hf.cascade_client import join_nodes
from private_llm_hf.cascade_split import join_split
from private_llm_hf.client import Parties, Secret
from private_llm_hf.costs import Costs
from private_llm_hf.weights import Sink
from private_llm_hf.wire import Message

Rows = list[int]
"""How many rows each lane holds."""


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
        super().__init__(config, first._transport, first._end, first._shutdown)
        self._lanes = lanes
        self._rows: dict[int, Rows] = {}
        self._groups: dict[int, int] = {}
        self._busy = [0] * len(lanes)
        self._choice = threading.Lock()

    @contextmanager
    def _using(self, rows: Rows) -> Iterator[None]:
        """Have the lanes that hold rows for oneself."""
        with ExitStack() as stack:
            for lane, count in zip(self._lanes, rows, strict=True):  # always in this order: nobody waits in a circle
                if count:
                    stack.enter_context(lane._lock)
            with self._guarded():
                yield

    def _tell(self, message: Message, parties: Iterable[int] | None = None) -> None:
        for lane in self._lanes:
            lane._tell(message, parties)

    # -- weights --------------------------------------------------------------------------------------------
    def use_held(self, description: Message, mine: Callable[[], str | None]) -> bool:
        """As `Parties.use_held`, in every lane: the lanes of a party share its file."""
        with self._call():
            if self.config.permute and self._lanes[0]._held_model() is not None:
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
    def loading(self, description: Message) -> Iterator[Sink]:
        """One dealing, with masks of its own, for every casting; lanes of equal casting use the same shares."""
        first: dict[Casting, int] = {}
        like: dict[int, int] = {}
        for lane in range(len(self._lanes)):
            cast = casting(self.config.parties, lane, self.config.permute and self.config.weights == "secret")
            like[lane] = first.setdefault(cast, lane)
        with self._call():
            with ExitStack() as stack:
                sinks = [stack.enter_context(self._lanes[lane].loading(description)) for lane in first.values()]

                def sink(name: str, tensor: Tensor) -> None:
                    for each in sinks:
                        each(name, tensor)

                yield sink
            self._load_like({lane: other for lane, other in like.items() if lane != other})
            self.ranges = self._lanes[0].ranges

    def _load_like(self, like: dict[int, int]) -> None:
        """Lanes build their model from the shares that another lane of the same party holds."""
        for lane, other in like.items():
            self._lanes[lane]._tell({"do": "load", "held": False, "like": other})
        for lane in like:
            self._lanes[lane]._answers()
            self._lanes[lane]._transport.ledger.reset()

    # -- calls ------------------------------------------------------------------------------------------------
    def forward(self, call: Message, secrets: list[Secret]) -> tuple[str, dict[str, Tensor]]:
        """As `Parties.forward`, every lane its rows, all at the same time."""
        total = int(call["secret"][0]["shape"][0])
        indices: list[Tensor | None] = [None] * len(self._lanes)
        kept_rows: Rows | None
        if call["encoded"] is not None and call["encoded"]["rows"] is not None:
            kept_rows, indices = self._by_lane(call["encoded"]["handle"], call["encoded"]["rows"])
        else:
            handles = (call["encoded"] and call["encoded"]["handle"], call["cache"])
            kept_rows = next((self._rows[h] for h in handles if h is not None and h in self._rows), None)
        if kept_rows is not None and sum(kept_rows) != total:
            raise DomainError(f"rows: got {total}; want {sum(kept_rows)}, as many as the cache or encoder output has")
        with self._reserved(kept_rows, total, self._groups.get(call["cache"], 1)) as rows, self._using(rows):
            busy, start = [], 0
            for lane, count, index in zip(self._lanes, rows, indices, strict=True):
                if count:
                    lane.ask(*_part(call, secrets, slice(start, start + count), total, index))
                    busy.append(lane)
                start += count
            answers = [lane.opened() for lane in busy]
        for kept in (call["cache"], call["encode_to"]):
            if kept is not None:
                self._rows[int(kept)] = rows
        kinds = {(kind, *opened) for kind, opened in answers}
        if len(kinds) != 1:
            raise TransportError("the lanes gave different answers: they do not run the same model or version")
        return answers[0][0], {name: torch.cat([opened[name] for _, opened in answers]) for name in answers[0][1]}

    @contextmanager
    def _reserved(self, rows: Rows | None, total: int, together: int) -> Iterator[Rows]:
        """The lanes of a call: those that hold what it continues, or idle ones; other calls keep off while it runs."""
        with self._choice:
            rows = self._spread(total, together if total % together == 0 else 1) if rows is None else rows
            used = [lane for lane, count in enumerate(rows) if count]
            for lane in used:
                self._busy[lane] += 1
        try:
            yield rows
        finally:
            with self._choice:
                for lane in used:
                    self._busy[lane] -= 1

    def _spread(self, total: int, together: int) -> Rows:
        """Groups of rows over the lanes in order; few groups go to the lanes with the fewest calls."""
        groups, lanes = total // together, len(self._lanes)
        chosen = sorted(sorted(range(lanes), key=lambda lane: self._busy[lane])[:groups])
        rows = [0] * lanes
        for place, lane in enumerate(chosen):
            rows[lane] = (groups // len(chosen) + (place < groups % len(chosen))) * together
        return rows

    def command(self, message: Message) -> None:
        """Cache management in every lane that holds rows of the cache."""
        handle, how = message["handle"], message["how"]
        rows = after = self._rows[handle]
        indices: list[Tensor | None] = [None] * len(rows)
        if how == "select":
            after, indices = self._by_lane(handle, message["index"])
        with self._using(rows):
            for lane, count, index in zip(self._lanes, rows, indices, strict=True):
                if count:
                    lane._tell(message if index is None else {**message, "index": index})
        if how == "reset":
            self._rows.pop(handle)
        else:
            self._rows[message["to"] if how == "copy" else handle] = after

    def _by_lane(self, handle: int, index: Tensor) -> tuple[Rows, list[Tensor | None]]:
        """Chosen rows of a kept state, lane by lane. Raises UnsupportedOp if a row would change its lane."""
        rows = self._rows[handle]
        owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))[index]
        if bool((owner[1:] < owner[:-1]).any()):
            raise UnsupportedOp(
                "a row of the batch would move to another lane, which cannot see it; use lanes=1 for this call, or a "
                "number of prompts that the lanes divide evenly"
            )
        starts = torch.cumsum(torch.tensor([0, *rows]), 0)
        picked: list[Tensor | None] = [index[owner == lane] - starts[lane] for lane in range(len(rows))]
        return [int((owner == lane).sum()) for lane in range(len(rows))], picked

    # -- handles, costs -------------------------------------------------------------------------------------
    def keep_together(self, handle: int, rows: int) -> None:
        """Rows that may be reordered among themselves go to one lane."""
        self._groups[handle] = rows

    def release(self, handle: int) -> None:
        """Forget a handle in every lane with its next call."""
        self._rows.pop(handle, None)
        self._groups.pop(handle, None)
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


def _part(
    call: Message, secrets: list[Secret], rows: slice, total: int, index: Tensor | None
) -> tuple[Message, list[Secret]]:
    """The rows `rows` of a call."""
    count = rows.stop - rows.start
    listed, mine = [], list[Secret]()
    for item, secret in zip(call["secret"], secrets, strict=True):
        listed.append({**item, "shape": [count, *item["shape"][1:]]})
        if isinstance(secret, Tensor):
            mine.append(secret[rows])
        else:
            ids, vocabulary = secret
            mine.append((ids.view(total, -1)[rows].reshape(-1), vocabulary))
    public = {
        name: value[rows] if isinstance(value, Tensor) and value.shape[0] == total else value
        for name, value in call["public"].items()
    }
    part = {**call, "secret": listed, "public": public}
    if index is not None:
        part["encoded"] = {**call["encoded"], "rows": index}
    return part, mine
