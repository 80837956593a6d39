"""Faults for `walk_deploy.py`: while the user's request runs, a party is killed, or its link is unplugged.

A fault comes after a random number of the request's tokens and a random part of a token's time, so it always hits a
running request. Checked of each: the request ended in time, with the plaintext's tokens or with an error that names the
party and says what happened; the tokens until then are the first of the plaintext's; the next request after the party
is back is right; no other party's process ended.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from walk_client import Answer, Client
from walk_commands import Running

PROMPT = "The history of"
TOKENS = 24
"""Of a request that a fault hits."""
NEXT = 8
"""Of the request after it."""
TIMEOUT_S = 6.0
"""Of parties and user: seconds of silence after which another endpoint counts as dead."""
SLACK_S = 4.0
"""Seconds beyond that within which a request must have ended with its error."""
START_S = 120.0
BACK_S = 90.0
"""Seconds in which the service must be back."""
CAUSES = ("its connection closed", "was silent for", "sent nothing for", "was not reached within")
"""What an error may say of the party that a fault hit."""


class Place(Protocol):
    """Where parties run."""

    parties: dict[int, Running]

    def start(self, number: int) -> None:
        """Start a party's process."""

    def link(self, number: int, *, up: bool) -> None:
        """Plug a party in, or out."""

    def check(self, what: str, good: bool, why: str = "") -> None:
        """Count a check."""


@dataclass(frozen=True)
class Fault:
    """What happens to whom, after how many tokens and what part of the next one's time, for how many seconds."""

    kind: str
    party: int
    tokens: int
    part: float
    hold_s: float


def plan(count: int, kinds: tuple[str, ...], parties: int, chance: random.Random) -> list[Fault]:
    """`count` faults in random order, of all kinds and parties as evenly as that number allows."""
    hit: Mapping[str, list[int]] = {kind: chance.sample(range(parties), parties) for kind in kinds}
    pairs = [(kinds[i % len(kinds)], i // len(kinds)) for i in range(count)]
    found = [
        Fault(
            kind, hit[kind][turn % parties], chance.randint(1, TOKENS // 2), chance.random(),
            chance.uniform(0.5, TIMEOUT_S + 3),
        )
        for kind, turn in pairs
    ]  # fmt: skip
    chance.shuffle(found)
    return found


def until_right(place: Place, client: Client, right: Answer, limit_s: float, what: str) -> float:
    """Ask until there is no error; the text must be right then. Returns the seconds that took."""
    began = time.monotonic()
    while True:
        answer = client.ask(PROMPT, NEXT, limit_s)
        took = time.monotonic() - began
        if answer is None:
            place.check(what, False, f"no answer within {limit_s:g} s")
            return took
        if answer.error is None or took > limit_s:
            good = answer.error is None and answer.ids == right.ids[:NEXT]
            place.check(what, good, f"{answer} after {took:.1f} s")
            return took
        place.check(f"{what}: no wrong token", _begins(right, answer), f"{answer.ids}")
        time.sleep(0.2)


def happen(place: Place, client: Client, right: Answer, fault: Fault, token_s: float) -> list[str]:
    """One fault while the user generates. Returns a row of the table."""
    what, name = f"{fault.kind} of party {fault.party}", f"party {fault.party}"
    before = {n: each.pid for n, each in place.parties.items() if fault.kind == "unplug" or n != fault.party}
    client.begin(PROMPT, TOKENS)
    there = client.running(fault.tokens, START_S)
    time.sleep(fault.part * token_s)
    place.check(f"{what}: a request runs", there and not client.ended, "it had ended before")
    began = time.monotonic()
    undo = _break(place, fault)
    answer = client.end(fault.hold_s)
    time.sleep(max(0.0, began + fault.hold_s - time.monotonic()))
    undo()
    if answer is None:
        answer = client.end(began + fault.hold_s + TIMEOUT_S + SLACK_S + 2 * TOKENS * token_s - time.monotonic())
    took = time.monotonic() - began if answer is None else answer.ended - began
    _judge(place, what, answer, right, name, took)
    back = until_right(place, client, right, BACK_S, f"{what}: service back")
    gone = [n for n, pid in before.items() if place.parties[n].poll() is not None or place.parties[n].pid != pid]
    place.check(f"{what}: other parties untouched", not gone, f"ended: {gone}")
    if answer is None:
        return [fault.kind, name, str(fault.tokens), "", f"{fault.hold_s:.1f}", f"{took:.1f}", f"{back:.1f}", "none"]
    told = "right text" if answer.error is None else answer.error
    counts = [str(fault.tokens), str(len(answer.ids))]
    return [fault.kind, name, *counts, f"{fault.hold_s:.1f}", f"{took:.1f}", f"{back:.1f}", told]


def _break(place: Place, fault: Fault) -> Callable[[], None]:
    """Let a fault begin. Returns what ends it."""
    if fault.kind == "unplug":
        place.link(fault.party, up=False)
        return lambda: place.link(fault.party, up=True)
    place.parties[fault.party].kill()
    place.parties[fault.party].wait()
    return lambda: place.start(fault.party)


def _begins(right: Answer, answer: Answer) -> bool:
    return answer.ids == right.ids[: len(answer.ids)]


def _judge(place: Place, what: str, answer: Answer | None, right: Answer, name: str, took: float) -> None:
    """A request during a fault: it ended, with the right text or an error that says why, and no wrong token."""
    place.check(f"{what}: the request ended", answer is not None, f"no answer after {took:.1f} s")
    if answer is None:
        return
    place.check(f"{what}: no wrong token", _begins(right, answer), f"{answer.ids}; want the start of {right.ids}")
    if answer.error is None:
        place.check(f"{what}: the whole text", answer.ids == right.ids and answer.text == right.text, answer.text)
        return
    place.check(f"{what}: ended in time", took <= TIMEOUT_S + SLACK_S, f"{took:.1f} s")
    cause = name in answer.error and any(each in answer.error for each in CAUSES)
    place.check(f"{what}: the error says why", cause, answer.error)
