"""Which characters may come next: a small grammar, run as a set of stacks.

A grammar is made of nodes: a text, a class of characters, a sequence, a choice, a repetition, and a reference to a node
that is made later (for recursion). A state is the set of stacks of nodes still to be matched, each with a text or class
on top, found by the character that it wants. JSON needs no more than a few stacks at a time; a grammar that needs
thousands, because it says the same in many ways, raises TooWide.

Stacks are linked lists, and equal ones are one object, so that no step depends on how deep they are: each is one look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import compress
from weakref import WeakValueDictionary


class TooWide(Exception):
    """A text may go on in too many ways."""


class WorkBudget:
    """Looks at stacks that may still be taken."""

    def __init__(self, most: int) -> None:
        self.left = most

    def look(self, times: int = 1) -> None:
        """Take some. Raises TooWide if none are left."""
        self.left -= times
        if self.left < 0:
            raise TooWide


class GrammarNode:
    """A part of a grammar. size: characters of a shortest text that it matches. Made from its parts, so never deep."""

    size: int


@dataclass(frozen=True, eq=False)
class Text(GrammarNode):
    """This very text, from one character on."""

    text: str

    @property
    def size(self) -> int:  # type: ignore[override]
        """Its length."""
        return len(self.text)


@dataclass(frozen=True, eq=False)
class CharClass(GrammarNode):
    """One character that `holds` allows, `example` among them."""

    holds: Callable[[str], bool]
    example: str
    size: int = 1


@dataclass(frozen=True, eq=False)
class Sequence(GrammarNode):
    """One after the other."""

    parts: tuple[GrammarNode, ...]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(part.size for part in self.parts))


@dataclass(frozen=True, eq=False)
class Choice(GrammarNode):
    """One of these. best: the first of the shortest, so list first what ends soonest and does not recur."""

    options: tuple[GrammarNode, ...]
    best: GrammarNode = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        found = min(self.options, key=lambda option: option.size)
        object.__setattr__(self, "best", found.best if isinstance(found, Choice) else found)
        object.__setattr__(self, "size", found.size)


@dataclass(frozen=True, eq=False)
class Reference(GrammarNode):
    """A node that is made when it is needed. shortest: a shortest text of that node, known before."""

    make: Callable[[], GrammarNode]
    shortest: str

    @property
    def size(self) -> int:  # type: ignore[override]
        """Of that text."""
        return len(self.shortest)


@dataclass(frozen=True, eq=False)
class Repeat(GrammarNode):
    """`part`, from `least` to `most` times (None: any number)."""

    part: GrammarNode
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


class Stack:
    """Nodes still to match: `top`, a text from its character `at` on, and then `rest`. Both are None for no nodes.

    size: characters of a shortest text that completes it. Equal stacks are one object, as `with_` makes them.
    """

    __slots__ = ("__weakref__", "at", "rest", "size", "top")

    def __init__(self, rest: Stack | None, top: GrammarNode | None, at: int) -> None:
        self.rest, self.top, self.at = rest, top, at
        self.size: int = 0 if rest is None or top is None else rest.size + top.size - at

    def with_(self, top: GrammarNode, at: int = 0) -> Stack:
        """The same nodes after another one."""
        key = (self, top, at)
        found = _STACKS.get(key)
        if found is None:
            found = _STACKS[key] = Stack(self, top, at)
        return found


_STACKS: WeakValueDictionary[tuple[Stack, GrammarNode, int], Stack] = WeakValueDictionary()
_EMPTY = Stack(None, None, 0)


class State:
    """Where one is in a text. Equal states go on alike."""

    __slots__ = ("_behind", "_next", "stacks")

    def __init__(self, stacks: Iterable[Stack]) -> None:
        self.stacks = frozenset(stacks)
        self._next: tuple[dict[str, list[Stack]], dict[CharClass, set[Stack]]] | None = None
        self._behind: dict[tuple[bool, ...], State | None] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and self.stacks == other.stacks

    def __hash__(self) -> int:
        return hash(self.stacks)

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return _EMPTY in self.stacks

    @property
    def finished(self) -> bool:
        """Whether it must end here."""
        return self.complete and len(self.stacks) == 1

    @property
    def size(self) -> int:
        """Characters of a shortest text that completes it."""
        return min(stack.size for stack in self.stacks)

    def after(self, character: str, work: WorkBudget) -> State | None:
        """The state after one more character, None if it may not follow. Raises TooWide."""
        texts, classes = self._tops(work)
        held = tuple(one.holds(character) for one in classes)
        behind = texts.get(character, ())
        work.look()
        if not behind and held in self._behind:
            return self._behind[held]
        found = expand(behind, work)
        for every in compress(classes.values(), held):
            work.look(len(every))
            found |= every
        made = State(found) if found else None
        if not behind:  # characters that no text wants lead to few states, by the classes that hold them
            self._behind[held] = made
        return made

    def _tops(self, work: WorkBudget) -> tuple[dict[str, list[Stack]], dict[CharClass, set[Stack]]]:
        """What is left behind the next character of texts on top, by that; and behind classes on top, whichever
        character it was. Found once.
        """
        if self._next is None:
            texts: dict[str, list[Stack]] = {}
            classes: dict[CharClass, list[Stack]] = {}
            work.look(len(self.stacks))
            for stack in self.stacks:
                top, at, rest = stack.top, stack.at, stack.rest
                if rest is not None and isinstance(top, Text):
                    behind = rest if at + 1 == len(top.text) else rest.with_(top, at + 1)
                    texts.setdefault(top.text[at], []).append(behind)
                elif rest is not None and isinstance(top, CharClass):
                    classes.setdefault(top, []).append(rest)
            self._next = texts, {top: expand(rests, work) for top, rests in classes.items()}
        return self._next

    def closing(self) -> str:
        """A shortest text that completes it."""
        stack: Stack | None = min(self.stacks, key=lambda stack: stack.size)
        made: list[str] = []
        while stack is not None and stack.top is not None:
            made.append(_shortest(stack.top)[stack.at :])
            stack = stack.rest
        return "".join(made)


def start(node: GrammarNode, work: WorkBudget) -> State:
    """Before the first character. Raises TooWide."""
    return State(expand([_EMPTY.with_(node)], work))


def expand(stacks: Iterable[Stack], work: WorkBudget) -> set[Stack]:
    """All stacks that these stand for, with a text or a class on top, or none left. Raises TooWide."""
    done: set[Stack] = set()
    seen = set(stacks)
    open_ = list(seen)
    while open_:
        now = open_.pop()
        top, rest = now.top, now.rest
        if top is None or rest is None or isinstance(top, CharClass) or (isinstance(top, Text) and top.text):
            work.look()
            done.add(now)
            continue
        for further in _steps(top, rest, work):
            if further not in seen:
                seen.add(further)
                open_.append(further)
    return done


def _steps(top: GrammarNode, rest: Stack, work: WorkBudget) -> list[Stack]:
    """What a node on top of `rest` stands for, one step on."""
    if isinstance(top, Sequence):
        work.look(len(top.parts))
        for part in reversed(top.parts):
            rest = rest.with_(part)
        return [rest]
    if isinstance(top, Choice):
        work.look(len(top.options))
        return [rest.with_(option) for option in top.options]
    work.look()
    if isinstance(top, Reference):
        return [rest.with_(top.make())]
    if isinstance(top, Repeat):
        found = [rest] if top.least == 0 else []
        if top.most is None or top.most > 0:
            work.look()
            found.append(rest.with_(top.fewer()).with_(top.part))
        return found
    return [rest]  # of an empty text


def _shortest(node: GrammarNode) -> str:
    """A shortest text that a node matches."""
    made: list[str] = []
    open_ = [node]
    while open_:
        item = open_.pop()
        if isinstance(item, Text):
            made.append(item.text)
        elif isinstance(item, CharClass):
            made.append(item.example)
        elif isinstance(item, Sequence):
            open_ += reversed(item.parts)
        elif isinstance(item, Choice):
            open_.append(item.best)
        elif isinstance(item, Reference):
            made.append(item.shortest)
        elif isinstance(item, Repeat) and item.least:
            made.append(_shortest(item.part) * item.least)
    return "".join(made)
