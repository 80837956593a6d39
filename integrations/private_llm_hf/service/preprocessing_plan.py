"""What a session has planned with `model.preprocess`, and how far it has come: the part that its own thread looks at.

A plan is prepared and then run call by call, each with the changes of caches before it. Its caches are apart from
the session's others, and end with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from private_llm.errors import DomainError, ProtocolAbort, TransportError
from private_llm_hf.wire.commands import CacheEdit, Call, CallOrEdit, Place

MOST_CALLS = 1 << 12
"""Calls of one plan."""


@dataclass(frozen=True)
class PlannedCall:
    """A call of a plan. number: its own among the plan's requests. index: among its calls. last: whether it ends it.

    positions: that the caches of the whole plan hold at most.
    """

    plan: int
    number: int
    index: int
    call: Call
    edits: tuple[CacheEdit, ...]
    last: bool
    positions: int


class PreprocessingPlan:
    """The planned calls of one session, and which of them comes next."""

    def __init__(self, number: int, requests: Sequence[CallOrEdit], before: int) -> None:
        """before: the number of the session's last plan. Raises ProtocolAbort for a number that does not rise, and
        DomainError for more calls than a service takes.
        """
        if number <= before:
            raise ProtocolAbort(f"preprocessing plan {number} was prepared before; masks must never repeat")
        self.number = number
        self.calls = _planned_calls(number, requests)
        if len(self.calls) > MOST_CALLS:
            raise DomainError(f"preprocess: got {len(self.calls)} calls; this service takes {MOST_CALLS} in a plan")
        self._next = 0

    @property
    def finished(self) -> bool:
        """Whether every call was made."""
        return self._next == len(self.calls)

    def take(self, at: Place) -> PlannedCall:
        """The call at this place, which must be the next one. Raises TransportError for another."""
        planned = None if self.finished else self.calls[self._next]
        if planned is None or at != (self.number, planned.number):
            raise TransportError(
                f"request {at[1]} of preprocessing plan {at[0]} is not what comes next; what was prepared is used in "
                "order and once, because masks must never repeat"
            )
        self._next += 1
        return planned


def _planned_calls(plan: int, requests: Sequence[CallOrEdit]) -> tuple[PlannedCall, ...]:
    """One for each call; changes of caches after the last one matter to nobody."""
    places = [number for number, request in enumerate(requests) if isinstance(request, Call)]
    calls = [request for request in requests if isinstance(request, Call)]
    held = sum(math.prod(call.secret[0].shape[:2]) for call in calls if call.secret and (call.cache or call.encode_to))
    found: list[PlannedCall] = []
    edits: list[CacheEdit] = []
    for number, request in enumerate(requests):
        if isinstance(request, Call):
            found.append(PlannedCall(plan, number, len(found), request, tuple(edits), number == places[-1], held))
            edits = []
        else:
            edits.append(request)
    return tuple(found)
