"""The requests that the helping party has run ahead for, and whether the requests that come are those."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from private_llm.errors import DomainError
from private_llm_hf.wire.codec import text_of
from private_llm_hf.wire.commands import Call, CallOrEdit, CopyCache, CropCache, ResetCache, SelectRows

_WORDS = {SelectRows: "select", CropCache: "crop", ResetCache: "reset", CopyCache: "copy"}


class Schedule:
    """The requests that were preprocessed, and how far they were made."""

    def __init__(self, number: int, entries: list[CallOrEdit]) -> None:
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

    def take(self, message: CallOrEdit, known: set[int]) -> int:
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
        if not (
            fresh and one_to_one and text_of(_renamed(message, named), ordered=True) == text_of(want, ordered=True)
        ):
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


def handles_of(message: CallOrEdit) -> list[int]:
    """The handles in a request, in a fixed order."""
    if isinstance(message, Call):
        encoded = None if message.encoded is None else message.encoded.handle
        found = [message.cache, message.encode_to, encoded]
    else:
        found = [message.handle, message.to if isinstance(message, CopyCache) else None]
    return [handle for handle in found if handle is not None]


def _renamed(message: CallOrEdit, names: dict[int, int]) -> CallOrEdit:
    """A request with planned handles for its own; one that nobody planned becomes 0, which no handle is."""
    if isinstance(message, CopyCache):
        return CopyCache(names.get(message.handle, 0), names.get(message.to, 0))
    if not isinstance(message, Call):
        return replace(message, handle=names.get(message.handle, 0))
    encoded = message.encoded
    return replace(
        message,
        cache=None if message.cache is None else names.get(message.cache, 0),
        encode_to=None if message.encode_to is None else names.get(message.encode_to, 0),
        encoded=None if encoded is None else replace(encoded, handle=names.get(encoded.handle, 0)),
    )


def _words(message: CallOrEdit) -> str:
    """A request for people: shapes and the names of public facts."""
    if not isinstance(message, Call):
        return f"'{_WORDS[type(message)]}' of a cache"
    inputs = ", ".join(f"{item.name} {item.shape}" for item in message.secret)
    facts = [
        f"{name}={value}" if not isinstance(value, Tensor) else f"{name} {tuple(value.shape)}"
        for name, value in sorted(message.public.items())
    ]
    place = "no cache" if message.cache is None else f"cache number {message.cache}"
    return "; ".join([inputs, place, *facts])
