"""Which tokens may come next so that the text stays one of a grammar, and can still be completed in time.

Tokens are kept as a tree of their characters, which is walked with the grammar's state, so that tokens that begin alike
are looked at once. What is found for a state is remembered, for a bounded number of states.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from private_llm_gateway.errors import ApiError, bad
from private_llm_gateway.grammar import Node, State, TooWide, start

_REMEMBERED = 64
"""States of a grammar whose tokens are kept."""
_MOST_WORK = 60_000
"""Looks at ways to go on, to find what may follow one state: a tenth of a second, besides one look at each branch of
the vocabulary. An object with 12 members of several types takes 2,000, one with 1,500 optional members 20,000."""
_ONE_AT_A_TIME = threading.Lock()
"""Grammars of all requests together keep one processor busy at most."""
_CLOSING = 8
"""Characters of a shortest end that take as long as one of them."""
_LONGEST = 64
"""Characters of a token that is used under a grammar."""


class TokenTree:
    """What each token of a vocabulary adds to a text, by its characters. Parts of characters are left out."""

    def __init__(self, tokenizer: Any, size: int) -> None:  # noqa: ANN401 - a transformers tokenizer
        anchor = tokenizer("a", add_special_tokens=False)["input_ids"]
        before = tokenizer.decode(anchor)
        special = set(tokenizer.all_special_ids)
        known = min(size, len(tokenizer))
        self.root = _Branch()
        for first in range(0, known, 4096):
            rows = [[*anchor, number] for number in range(first, min(first + 4096, known))]
            for number, text in enumerate(tokenizer.batch_decode(rows), first):
                added = text[len(before) :]
                usable = text.startswith(before) and 0 < len(added) <= _LONGEST and "\ufffd" not in added
                if usable and number not in special:
                    self.root.add(added, number)

    def count(self, text: str) -> int:
        """How many tokens write this text, taking the longest each time (one a character where none fits)."""
        found, at = 0, 0
        while at < len(text):
            at += max(1, self.root.longest(text, at))
            found += 1
        return found


@dataclass
class _Branch:
    """Tokens that begin alike."""

    tokens: list[int] = field(default_factory=list)
    further: dict[str, _Branch] = field(default_factory=dict)

    def add(self, text: str, number: int) -> None:
        """Put a token where its text ends."""
        at = self
        for character in text:
            at = at.further.setdefault(character, _Branch())
        at.tokens.append(number)

    def longest(self, text: str, start_at: int) -> int:
        """Characters of the longest token that `text` goes on with."""
        at, best = self, 0
        for taken, character in enumerate(text[start_at : start_at + _LONGEST], 1):
            found = at.further.get(character)
            if found is None:
                break
            at = found
            best = taken if at.tokens else best
        return best


@dataclass(frozen=True)
class Following:
    """The state behind some tokens, and how many tokens complete it then."""

    state: State
    tokens: Tensor
    closing: int


class Grammar:
    """A grammar over one vocabulary. Thread-safe. Raises ApiError (400) where it goes on in too many ways."""

    def __init__(self, node: Node, tree: TokenTree) -> None:
        self.tree = tree
        try:
            self.start = start(node)
        except TooWide:
            raise _too_wide() from None
        self._known: OrderedDict[State, tuple[Following, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def following(self, state: State) -> tuple[Following, ...]:
        """All tokens that may follow, by the state that they lead to. Raises ApiError (400) for too many ways."""
        with self._lock:
            found = self._known.get(state)
            if found is not None:
                self._known.move_to_end(state)
                return found
        try:
            with _ONE_AT_A_TIME:
                made = self._walk(state)
        except TooWide:
            raise _too_wide() from None
        with self._lock:
            self._known[state] = made
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return made

    def _walk(self, state: State) -> tuple[Following, ...]:
        reached: dict[State, _Reached] = {}
        open_ = [(self.tree.root, _Reached(state))]
        work = 0
        while open_:
            branch, at = open_.pop()
            known = at.after
            for character, below in branch.further.items():
                if character not in known:
                    after, looks = at.state.after(character)
                    work += looks
                    if after is not None and after not in reached:
                        work += after.upkeep
                        reached[after] = _Reached(after)
                    known[character] = None if after is None else reached[after]
                    _check(work)
                found = known[character]
                if found is not None:
                    found.tokens += below.tokens
                    if below.further:
                        open_.append((below, found))
        made = []
        for each in reached.values():
            if each.tokens:
                closing = each.state.closing()
                work += len(closing) // _CLOSING
                _check(work)
                tokens = torch.tensor(each.tokens, dtype=torch.int64)
                made.append(Following(each.state, tokens, self.tree.count(closing)))
        return tuple(made)


@dataclass(eq=False, slots=True)
class _Reached:
    """A state that some tokens lead to. after: by the next character."""

    state: State
    tokens: list[int] = field(default_factory=list)
    after: dict[str, _Reached | None] = field(default_factory=dict)


def _check(work: int) -> None:
    if work > _MOST_WORK:
        raise TooWide


def _too_wide() -> ApiError:
    told = "schema: it says the same in too many ways; want fewer alternatives at one place"
    return bad("response_format.json_schema.schema", told, "unsupported_schema")


class Written:
    """How far one answer has come in a grammar."""

    def __init__(self, grammar: Grammar, ends: tuple[int, ...]) -> None:
        self._grammar, self._ends = grammar, ends
        self.state = grammar.start

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        return self.state.finished

    def allowed(self, vocabulary: int, left: int) -> Tensor:
        """Which tokens may come (bool [vocabulary]) if `left` tokens, this one included, are all there are."""
        mask = torch.zeros(vocabulary, dtype=torch.bool)
        choices = self._grammar.following(self.state)
        if self.state.complete:
            mask[list(self._ends)] = True
        in_time = [each for each in choices if each.closing <= left - 1]
        if not in_time and choices and not self.state.complete:
            least = min(each.closing for each in choices)
            in_time = [each for each in choices if each.closing == least]
        for each in in_time:
            mask[each.tokens] = True
        return mask

    def take(self, token: int) -> None:
        """The token that came."""
        for each in self._grammar.following(self.state):
            if bool((each.tokens == token).any()):
                self.state = each.state
                return
