"""What the parties of a service say to each other before a batch: which requests are there, and which run now.

Each step has three messages: party 0 proposes requests, the others say which of them they have, and party 0 says which
run; and a fourth when a batch is over. They carry numbers and digests of public facts. Whatever follows from them is
done at the same place in the same order at all parties, so that all hold the same caches.

Party 0 alone proposes, compares the votes and says what runs. Under quad, where it may lie, all parties then compare
what they were told and what they got from the clients (`party/transcript.py`): before a batch, and so before
anything is opened. These messages are booked to no request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from private_llm_hf.party.transcript import agree
from private_llm_hf.wire.codec import Between, Message

StepNumber = Annotated[int, Between(0, 1 << 62)]
"""The number of a step, from 1 since the parties connected."""


@dataclass(frozen=True)
class RequestRef(Message):
    """A request: the session that it belongs to, and its number there, from 1."""

    session: str
    number: StepNumber


@dataclass(frozen=True)
class Proposal(Message):
    """From party 0: have you got these? live: the sessions that party 0 serves, now and then (None: not said)."""

    step: StepNumber
    requests: tuple[RequestRef, ...]
    live: tuple[str, ...] | None


@dataclass(frozen=True)
class Vote(Message):
    """To party 0: for each request of the proposal what this party holds of it, or None if it is not there (yet).

    facts: digests by name; those of one name must be equal at all parties that state it. ended: sessions that are over
    at this party. leaving: it wants to stop.
    """

    step: StepNumber
    facts: tuple[dict[str, str] | None, ...]
    ended: tuple[str, ...]
    leaving: bool


@dataclass(frozen=True)
class Commit(Message):
    """From party 0: the requests at these places of its proposal run next. ended: sessions to forget first."""

    step: StepNumber
    places: tuple[StepNumber, ...]
    ended: tuple[str, ...]


@dataclass(frozen=True)
class Ack(Message):
    """To party 0: the batch is over here. A helping party is through with its own part long before the others."""

    step: StepNumber


def tally(votes: Iterable[Sequence[Mapping[str, str] | None]], own: Sequence[Mapping[str, str]]) -> list[bool | None]:
    """Of each proposed request: True if all parties have it and agree, None if one lacks it, False if they disagree."""
    verdicts: list[bool | None] = []
    for place, mine in enumerate(own):
        theirs = [vote[place] for vote in votes]
        present = [each for each in theirs if each is not None]
        verdicts.append(None if len(present) < len(theirs) else agree([mine, *present]))
    return verdicts
