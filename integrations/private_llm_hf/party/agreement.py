"""What parties tell each other before they run a call: which requests of a service run now, and under protocols that
notice lies (quad) what each of them was told.

What a party runs is said to it alone: by its client, and in a service by party 0 (the messages below). Told
different things, parties would run different calls under the same masks and open one user's output to another; their
records would then differ, but party 0 alone is the judge of records, and may be the one that lied. So each party keeps
a digest of all that it was told, in order, sends it to all others before a call, and runs the call when everybody has
sent the same. Of two honest parties one is told what the other is, or both stop before anything is masked or opened.

Which messages this covers, and which reach one party only: docs/decisions/020-what-quad-parties-were-told.md.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from private_llm.errors import ProtocolAbort
from private_llm.net.transport import Transport
from private_llm.protocols.session import Session
from private_llm_hf.wire.codec import Between, Message, text_of
from private_llm_hf.wire.commands import recv_message, send_message


class Told(Message):
    """To each other party, before a call: digests by name. Those of one name must be equal at all who state it."""

    facts: dict[str, str]


class Transcript:
    """Digests of what one party was told since its links were made; none under protocols that do not compare."""

    def __init__(self, session: Session) -> None:
        self._session, self._told = session, dict[str, str]()

    def add(self, message: object, among: str = "all") -> None:
        """The next thing that this party was told, or found. among: a name for those who were told the same. Local."""
        if self._session.protocol.compares:
            text = text_of(message, ordered=True)
            self._told[among] = digest(self._told.get(among, "").encode(), text.encode())

    def compare(self, links: Transport, parties: Iterable[int], facts: Mapping[str, str]) -> None:
        """Go on if these parties were told and got the same (facts: of the next call). A message of some hundred bytes
        each, booked as control; no round. Raises ProtocolAbort, with nothing of the call sent, if one differs.
        """
        if not self._session.protocol.compares:
            return
        mine, others = Told({**self._told, **facts}), [party for party in parties if party != links.me]
        for other in others:
            send_message(links, other, mine)
        for other in others:
            theirs: Told = recv_message(links, other, (Told,))
            if not agree([mine.facts, theirs.facts]):
                raise ProtocolAbort(
                    "the parties were told to run different things: one of them, or the client, deviates; nothing of "
                    "this call was sent or opened; end the session and find out why"
                )


def digest(*pieces: bytes | memoryview) -> str:
    """64 hexadecimal digits that stand for public bytes, or for what all compared parties hold anyway."""
    made = hashlib.blake2b(digest_size=32, person=b"pllm-service")
    for piece in pieces:
        made.update(len(piece).to_bytes(8, "little"))
        made.update(piece)
    return made.hexdigest()


def agree(facts: Sequence[Mapping[str, str]]) -> bool:
    """Whether no two parties state different digests under one name."""
    seen: dict[str, str] = {}
    return all(seen.setdefault(name, value) == value for each in facts for name, value in each.items())


def joined(facts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Of the facts of several requests one digest a name."""
    names = {name for each in facts for name in each}
    return {name: digest(*(each.get(name, "").encode() for each in facts)) for name in names}


# -- what the parties of a service say to each other before a batch ----------------------------------------------------
# Each step has three messages: party 0 proposes requests, the others say which of them they have, and party 0 says
# which run; and a fourth when a batch is over. They carry numbers and digests of public facts, and are booked to no
# request. What follows from them is done in the same order at all parties, so that all hold the same caches. Party 0
# alone proposes, compares the votes and says what runs. Under quad, where it may lie, all parties then compare
# what they were told and what they got from the clients, before anything is opened.
StepNumber = Annotated[int, Between(0, 1 << 62)]  # the number of a step, from 1 since the parties connected


class RequestRef(Message):
    """A request: the session that it belongs to, and its number there, from 1."""

    session: str
    number: StepNumber


class Proposal(Message):
    """From party 0: have you got these? live: the sessions that party 0 serves, now and then (None: not said)."""

    step: StepNumber
    requests: tuple[RequestRef, ...]
    live: tuple[str, ...] | None


class Vote(Message):
    """To party 0: what this party holds of each proposed request (None: not there yet). facts: digests by name, equal
    at all parties that state them. ended: sessions that are over here. leaving: it wants to stop.
    """

    step: StepNumber
    facts: tuple[dict[str, str] | None, ...]
    ended: tuple[str, ...]
    leaving: bool


class Commit(Message):
    """From party 0: the requests at these places of its proposal run next. ended: sessions to forget first."""

    step: StepNumber
    places: tuple[StepNumber, ...]
    ended: tuple[str, ...]


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
