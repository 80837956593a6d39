"""Which characters may come next: a small grammar, run as a set of stacks.

A grammar is made of nodes: a text, a class of characters, a sequence, a choice, a repetition, and a reference to a node
that is made later (for recursion). A state is the set of stacks of nodes still to be matched, each with a text or class
on top, found by the character that it wants. JSON needs no more than a few stacks at a time; a grammar that needs
thousands, because it says the same in many ways, raises TooWide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress

MOST_STACKS = 5000
"""Of one state."""


class TooWide(Exception):
    """A text may go on in too many ways."""


class Node:
    """A part of a grammar. size: characters of a shortest text that it matches. Made from its parts, so never deep."""

    size: int


@dataclass(frozen=True, eq=False)
class Text(Node):
    """This very text, from one character on."""

    text: str

    @property
    def size(self) -> int:  # type: ignore[override]
        """Its length."""
        return len(self.text)


@dataclass(frozen=True, eq=False)
class OneOf(Node):
    """One character that `holds` allows, `example` among them."""

    holds: Callable[[str], bool]
    example: str
    size: int = 1


@dataclass(frozen=True, eq=False)
class Sequence(Node):
    """One after the other."""

    parts: tuple[Node, ...]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(part.size for part in self.parts))


@dataclass(frozen=True, eq=False)
class Choice(Node):
    """One of these. best: the first of the shortest, so list first what ends soonest and does not recur."""

    options: tuple[Node, ...]
    best: Node = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        found = min(self.options, key=lambda option: option.size)
        object.__setattr__(self, "best", found.best if isinstance(found, Choice) else found)
        object.__setattr__(self, "size", found.size)


@dataclass(frozen=True, eq=False)
class Reference(Node):
    """A node that is made when it is needed. shortest: a shortest text of that node, known before."""

    make: Callable[[], Node]
    shortest: str

    @property
    def size(self) -> int:  # type: ignore[override]
        """Of that text."""
        return len(self.shortest)


@dataclass(frozen=True, eq=False)
class Repeat(Node):
    """`part`, from `least` to `most` times (None: any number)."""

    part: Node
    least: int = 0
    most: int | None = None
    _fewer: list[Repeat] = field(default_factory=list, repr=False)

    @property
    def size(self) -> int:  # type: ignore[override]
        """The fewest parts'."""
        return self.part.size * self.least

    def fewer(self) -> Repeat:
        """What is left after one part: the same object each time, so that states are found again."""
        if self.least == 0 and self.most is None:
            return self
        if not self._fewer:
            self._fewer.append(Repeat(self.part, max(0, self.least - 1), None if self.most is None else self.most - 1))
        return self._fewer[0]


Stack = tuple[tuple[Text, int] | Node, ...]
"""Nodes still to match, the next one last; a text with the number of its next character."""


@dataclass(frozen=True)
class State:
    """Where one is in a text. Equal states go on alike."""

    stacks: frozenset[Stack]

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return () in self.stacks

    @property
    def finished(self) -> bool:
        """Whether it must end here."""
        return self.stacks == frozenset({()})

    @cached_property
    def _by_character(self) -> dict[str, list[Stack]]:
        """Of stacks with a text on top what is left behind its next character, by that."""
        found: dict[str, list[Stack]] = {}
        for stack in self.stacks:
            if stack and isinstance(top := stack[-1], tuple):
                node, at = top
                rest = stack[:-1]
                behind = (*rest, (node, at + 1)) if at + 1 < len(node.text) else rest
                found.setdefault(node.text[at], []).append(behind)
        return found

    @cached_property
    def _classes(self) -> tuple[dict[OneOf, set[Stack]], int]:
        """Classes on top, and what is left behind each: the same whichever character it was. And the looks it took."""
        found: dict[OneOf, set[Stack]] = {}
        looks = 0
        for stack in self.stacks:
            if stack and isinstance(top := stack[-1], OneOf):
                every, took = expand(stack[:-1])
                found.setdefault(top, set()).update(every)
                looks += took
        return found, looks

    @cached_property
    def _behind(self) -> dict[tuple[bool, ...], State | None]:
        """The states behind characters that no text on top wants, by the classes that hold them. Few, once found."""
        return {}

    def after(self, character: str) -> tuple[State | None, int]:
        """The state after one more character, None if it may not follow; and the looks it took. Raises TooWide."""
        classes = self._classes[0]
        held = tuple(one.holds(character) for one in classes)
        texts = self._by_character.get(character, ())
        if not texts and held in self._behind:
            return self._behind[held], 1
        found: set[Stack] = set()
        for every in compress(classes.values(), held):
            found |= every
        looks = 1 + len(found)
        _check_width(found)
        for behind in texts:
            every, took = expand(behind)
            found |= every
            looks += took
            _check_width(found)
        made = State(frozenset(found)) if found else None
        if not texts:
            self._behind[held] = made
        return made, looks

    @property
    def upkeep(self) -> int:
        """Looks that a new state takes once."""
        return 4 * len(self.stacks) + self._classes[1]

    def closing(self) -> str:
        """A shortest text that completes it."""
        return _shortest(min(self.stacks, key=lambda stack: sum(map(_left, stack))))


def start(node: Node) -> State:
    """Before the first character. Raises TooWide."""
    found, _ = expand((node,))
    _check_width(found)
    return State(frozenset(found))


def _check_width(stacks: set[Stack]) -> None:
    if len(stacks) > MOST_STACKS:
        raise TooWide


def expand(stack: Stack) -> tuple[set[Stack], int]:
    """All stacks that this one stands for, with a text or a class on top, or none left; and how many were looked at."""
    done: set[Stack] = set()
    seen = {stack}
    open_: list[Stack] = [stack]
    while open_:
        now = open_.pop()
        if not now or isinstance(now[-1], tuple | OneOf):
            done.add(now)
            continue
        for further in _steps(now[-1], now[:-1]):
            if further not in seen:
                seen.add(further)
                open_.append(further)
    return done, len(seen)


def _steps(top: Node, rest: Stack) -> list[Stack]:
    """What a node on top of `rest` stands for, one step on."""
    if isinstance(top, Text):
        return [(*rest, (top, 0)) if top.text else rest]
    if isinstance(top, Sequence):
        return [(*rest, *reversed(top.parts))]
    if isinstance(top, Choice):
        return [(*rest, option) for option in top.options]
    if isinstance(top, Reference):
        return [(*rest, top.make())]
    found: list[Stack] = []
    if isinstance(top, Repeat):
        if top.least == 0:
            found.append(rest)
        if top.most is None or top.most > 0:
            found.append((*rest, top.fewer(), top.part))
    return found


def _left(item: tuple[Text, int] | Node) -> int:
    """Characters that a part of a stack still needs."""
    return item[0].size - item[1] if isinstance(item, tuple) else item.size


def _shortest(stack: Stack) -> str:
    """A shortest text that completes a stack."""
    made: list[str] = []
    open_ = list(stack)
    while open_:
        item = open_.pop()
        if isinstance(item, tuple):
            made.append(item[0].text[item[1] :])
        elif isinstance(item, Text):
            made.append(item.text)
        elif isinstance(item, OneOf):
            made.append(item.example)
        elif isinstance(item, Sequence):
            open_ += reversed(item.parts)
        elif isinstance(item, Choice):
            open_.append(item.best)
        elif isinstance(item, Reference):
            made.append(item.shortest)
        elif isinstance(item, Repeat) and item.least:
            made.append(_shortest((item.part,)) * item.least)
    return "".join(made)
