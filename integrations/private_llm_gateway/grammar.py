"""Which characters may come next: a small grammar, run as a set of stacks.

A grammar is made of nodes: a text, a class of characters, a sequence, a choice, a repetition, and a reference to a node
that is made later (for recursion). A state is the set of stacks of nodes still to be matched, each with a text or class
on top, so it is one set lookup to know what may follow. JSON needs no more than a few stacks at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property


class Node:
    """A part of a grammar. `shortest`: a shortest text that it matches."""

    shortest: str


@dataclass(frozen=True, eq=False)
class Text(Node):
    """This very text, from one character on."""

    text: str

    @property
    def shortest(self) -> str:  # type: ignore[override]
        """Itself."""
        return self.text


@dataclass(frozen=True, eq=False)
class OneOf(Node):
    """One character that `holds` allows, `shortest` among them."""

    holds: Callable[[str], bool]
    shortest: str


@dataclass(frozen=True, eq=False)
class Sequence(Node):
    """One after the other."""

    parts: tuple[Node, ...]

    @cached_property
    def shortest(self) -> str:  # type: ignore[override]
        """The parts' together."""
        return "".join(part.shortest for part in self.parts)


@dataclass(frozen=True, eq=False)
class Choice(Node):
    """One of these; the first of the shortest, so list first what ends soonest and does not recur."""

    options: tuple[Node, ...]

    @cached_property
    def shortest(self) -> str:  # type: ignore[override]
        """The shortest of the options'."""
        return min((option.shortest for option in self.options), key=len)


@dataclass(frozen=True, eq=False)
class Reference(Node):
    """A node that is made when it is needed. shortest: of that node, known before."""

    make: Callable[[], Node]
    shortest: str


@dataclass(frozen=True, eq=False)
class Repeat(Node):
    """`part`, from `least` to `most` times (None: any number)."""

    part: Node
    least: int = 0
    most: int | None = None
    _fewer: list[Repeat] = field(default_factory=list, repr=False)

    @property
    def shortest(self) -> str:  # type: ignore[override]
        """The fewest parts."""
        return self.part.shortest * self.least

    def fewer(self) -> Repeat:
        """What is left after one part: the same object each time, so that states are found again."""
        if self.least == 0 and self.most is None:
            return self
        if not self._fewer:
            self._fewer.append(Repeat(self.part, max(0, self.least - 1), None if self.most is None else self.most - 1))
        return self._fewer[0]


Stack = tuple[tuple[Node, int] | Node, ...]
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

    def after(self, character: str) -> State | None:
        """The state after one more character, or None if it may not follow."""
        found: set[Stack] = set()
        for stack in self.stacks:
            if not stack:
                continue
            top, rest = stack[-1], stack[:-1]
            if isinstance(top, tuple):
                node, at = top
                text = node.shortest
                if text[at] == character:
                    found |= expand((*rest, (node, at + 1)) if at + 1 < len(text) else rest)
            elif isinstance(top, OneOf) and top.holds(character):
                found |= expand(rest)
        return State(frozenset(found)) if found else None

    def closing(self) -> str:
        """A shortest text that completes it."""
        return min((_closing(stack) for stack in self.stacks), key=len)


def start(node: Node) -> State:
    """Before the first character."""
    return State(frozenset(expand((node,))))


def expand(stack: Stack) -> set[Stack]:
    """All stacks that this one stands for, with a text or a class on top, or none left."""
    done: set[Stack] = set()
    open_: list[Stack] = [stack]
    while open_:
        now = open_.pop()
        if not now or isinstance(now[-1], tuple | OneOf):
            done.add(now)
            continue
        top, rest = now[-1], now[:-1]
        if isinstance(top, Text):
            open_.append((*rest, (top, 0)) if top.text else rest)
        elif isinstance(top, Sequence):
            open_.append((*rest, *reversed(top.parts)))
        elif isinstance(top, Choice):
            open_ += [(*rest, option) for option in top.options]
        elif isinstance(top, Reference):
            open_.append((*rest, top.make()))
        elif isinstance(top, Repeat):
            if top.least == 0:
                open_.append(rest)
            if top.most is None or top.most > 0:
                open_.append((*rest, top.fewer(), top.part))
    return done


def _closing(stack: Stack) -> str:
    return "".join(
        item[0].shortest[item[1] :] if isinstance(item, tuple) else item.shortest for item in reversed(stack)
    )
