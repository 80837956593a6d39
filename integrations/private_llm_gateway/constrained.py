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
from private_llm_gateway.grammar import GrammarNode, State, TooWide, WorkBudget, start

_MOST_WORK = 60_000
"""Looks at ways to go on, to find what may follow one state: a tenth of a second, besides one look at each branch of
the vocabulary. An object with 12 members of several types takes 2,000, one with 1,500 optional members 20,000."""
_REMEMBERED = 4 * _MOST_WORK
"""Of what was found, what is kept of a grammar."""
_ONE_AT_A_TIME = threading.Lock()
"""Grammars of all requests together keep one processor busy at most."""
_CLOSING = 4
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


@dataclass(frozen=True, eq=False)
class Following:
    """Tokens that may follow (int32 [T]), the number of the state that each leads to (int32 [T]), these states, and how
    many tokens complete each (int64 [S]). looks: what finding them took.
    """

    tokens: Tensor
    leads: Tensor
    states: tuple[State, ...]
    closing: Tensor
    looks: int

    @property
    def size(self) -> int:
        """What keeping it takes, in looks: each leaves some 300 bytes, and a token 8."""
        return 1 + self.looks + len(self.tokens) // 32

    def after(self, token: int) -> State | None:
        """The state that one of the tokens leads to."""
        found = self.leads[self.tokens == token].tolist()
        return self.states[found[0]] if found else None


class Grammar:
    """A grammar over one vocabulary. Thread-safe. Raises ApiError (400) where it goes on in too many ways."""

    def __init__(self, node: GrammarNode, tree: TokenTree) -> None:
        self.tree = tree
        try:
            self.start = start(node, WorkBudget(_MOST_WORK))
        except TooWide:
            raise _too_wide() from None
        self._known: OrderedDict[State, Following] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def following(self, state: State) -> Following:
        """All tokens that may follow. Raises ApiError (400) for too many ways."""
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
            if self._known.setdefault(state, made) is made:
                self._held += made.size
            while self._held > _REMEMBERED:
                self._held -= self._known.popitem(last=False)[1].size
        return made

    def _walk(self, state: State) -> Following:
        reached: dict[State, _Reached] = {}
        open_ = [(self.tree.root, _Reached(state))]
        work = WorkBudget(_MOST_WORK)
        while open_:
            branch, at = open_.pop()
            known = at.after
            for character, below in branch.further.items():
                if character not in known:
                    after = at.state.after(character, work)
                    known[character] = None if after is None else reached.setdefault(after, _Reached(after))
                found = known[character]
                if found is not None:
                    found.tokens += below.tokens
                    if below.further:
                        open_.append((below, found))
        ended = [each for each in reached.values() if each.tokens]
        for each in ended:
            work.look(1 + each.state.size // _CLOSING)
        leads = [number for number, each in enumerate(ended) for _ in each.tokens]
        return Following(
            torch.tensor([token for each in ended for token in each.tokens], dtype=torch.int32),
            torch.tensor(leads, dtype=torch.int32),
            tuple(each.state for each in ended),
            torch.tensor([self.tree.count(each.state.closing()) for each in ended], dtype=torch.int64),
            _MOST_WORK - work.left,
        )


@dataclass(eq=False, slots=True)
class _Reached:
    """A state that some tokens lead to. after: by the next character."""

    state: State
    tokens: list[int] = field(default_factory=list)
    after: dict[str, _Reached | None] = field(default_factory=dict)


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
        most = left - 1
        if self.state.complete:
            mask[list(self._ends)] = True
        elif choices.states:  # where none completes it in time, those that come nearest
            most = max(most, int(choices.closing.min()))
        mask[choices.tokens[(choices.closing <= most)[choices.leads]]] = True
        return mask

    def take(self, token: int) -> None:
        """The token that came."""
        self.state = self._grammar.following(self.state).after(token) or self.state
