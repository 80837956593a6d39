"""The requests that the helping party has run ahead for, and whether the requests that come are those."""

from __future__ import annotations

import json

from torch import Tensor

from private_llm.errors import DomainError
from private_llm_hf.wire import Message, packed

_HANDLES = ("cache", "encode_to", "handle", "to")
"""Fields of a request that number something the parties keep."""


class Schedule:
    """The requests that were preprocessed, and how far they were made."""

    def __init__(self, number: int, entries: list[Message]) -> None:
        self.number, self.entries = number, entries
        self._next = 0
        self._handles: dict[int, int] = {}

    @property
    def finished(self) -> bool:
        """Whether every request was made."""
        return self._next == len(self.entries)

    @property
    def planned_handles(self) -> set[int]:
        """The handles under which the helping party keeps what it computed ahead."""
        return {handle for entry in self.entries for handle in handles_of(entry)}

    def take(self, message: Message, known: set[int]) -> int:
        """The place of a request, which must be the next one; `known`: handles that other calls have filled.

        Raises DomainError saying what was planned, before anything changes.
        """
        want = self.entries[self._next]
        named = dict(self._handles)
        fresh = all(
            named.setdefault(real, planned) == planned and (real in self._handles or real not in known)
            for real, planned in zip(handles_of(message), handles_of(want), strict=False)
        )
        one_to_one = len(set(named.values())) == len(named)
        if not (fresh and one_to_one and _text(_renamed(message, named)) == _text(want)):
            raise DomainError(
                f"preprocessing: request {self._next + 1} of {len(self.entries)} was planned as {_words(want)}; got "
                f"{_words(message)}. Make the planned calls in their order, or plan again with model.preprocess(...), "
                "which throws the rest away; model.preprocess() without a plan only throws it away"
            )
        self._handles = named
        self._next += 1
        return self._next - 1

    @property
    def real_handles(self) -> set[int]:
        """The handles that requests of this schedule have filled so far."""
        return set(self._handles)


def handles_of(message: Message) -> list[int]:
    """The handles in a request, in a fixed order."""
    found = [message.get(name) for name in _HANDLES]
    encoded = message.get("encoded")
    found.append(None if encoded is None else encoded["handle"])
    return [handle for handle in found if handle is not None]


def _renamed(message: Message, names: dict[int, int]) -> Message:
    made = dict(message)
    for name in _HANDLES:
        if made.get(name) is not None:
            made[name] = names.get(made[name])
    if made.get("encoded") is not None:
        made["encoded"] = {**made["encoded"], "handle": names.get(made["encoded"]["handle"])}
    return made


def _text(message: Message) -> str:
    return json.dumps(message, default=packed, sort_keys=True)


def _words(message: Message) -> str:
    """A request for people: shapes and the names of public facts."""
    if message["do"] != "forward":
        return f"'{message['how']}' of a cache"
    inputs = ", ".join(f"{item['name']} {tuple(item['shape'])}" for item in message["secret"])
    facts = [
        f"{name}={value}" if not isinstance(value, Tensor) else f"{name} {tuple(value.shape)}"
        for name, value in sorted(message["public"].items())
    ]
    place = "no cache" if message["cache"] is None else f"cache number {message['cache']}"
    return "; ".join([inputs, place, *facts])
