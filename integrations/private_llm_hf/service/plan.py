"""What a session has planned with `model.preprocess`, and how far it has come: the part that its own thread looks at.

A plan is prepared and then run in steps: one call each, with the changes of caches before it. Its caches are apart from
the session's others, and end with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from private_llm.errors import DomainError, ProtocolAbort, TransportError
from private_llm_hf.wire.commands import CacheEdit, Call, Place, Request

MOST_STEPS = 1 << 12
"""Calls of one plan."""


@dataclass(frozen=True)
class Step:
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


class Plan:
    """A plan of one session, in steps, and which of them comes next."""

    def __init__(self, number: int, requests: Sequence[Request], before: int) -> None:
        """before: the number of the session's last plan. Raises ProtocolAbort for a number that does not rise, and
        DomainError for more calls than a service takes.
        """
        if number <= before:
            raise ProtocolAbort(f"preprocessing plan {number} was prepared before; masks must never repeat")
        self.number = number
        self.steps = _steps(number, requests)
        if len(self.steps) > MOST_STEPS:
            raise DomainError(f"preprocess: got {len(self.steps)} calls; this service takes {MOST_STEPS} in a plan")
        self._next = 0

    @property
    def finished(self) -> bool:
        """Whether every call was made."""
        return self._next == len(self.steps)

    def take(self, at: Place) -> Step:
        """The step at this place, which must be the next one. Raises TransportError for another."""
        step = None if self.finished else self.steps[self._next]
        if step is None or at != (self.number, step.number):
            raise TransportError(
                f"request {at[1]} of preprocessing plan {at[0]} is not what comes next; what was prepared is used in "
                "order and once, because masks must never repeat"
            )
        self._next += 1
        return step


def _steps(plan: int, requests: Sequence[Request]) -> tuple[Step, ...]:
    """One step for each call; changes of caches behind the last one matter to nobody."""
    places = [number for number, request in enumerate(requests) if isinstance(request, Call)]
    calls = [request for request in requests if isinstance(request, Call)]
    held = sum(math.prod(call.secret[0].shape[:2]) for call in calls if call.secret and (call.cache or call.encode_to))
    steps: list[Step] = []
    edits: list[CacheEdit] = []
    for number, request in enumerate(requests):
        if isinstance(request, Call):
            steps.append(Step(plan, number, len(steps), request, tuple(edits), number == places[-1], held))
            edits = []
        else:
            edits.append(request)
    return tuple(steps)
