"""Which of a tree of drafted tokens are kept, so that the text keeps the distribution of the private model exactly.

A tree holds what may follow the text: each node is a token behind its parent. From the text on:

1. p is what the model gives the next token here, after all logits processors (greedy: 1 for the likeliest).
2. The drafted tokens x that follow here are tried in their order. One drawn from q is kept with the probability
   min(1, p(x) / q(x)); if it is not, p becomes max(p - q, 0), and one that was certain (no q) is kept with p(x); if it
   is not, p(x) becomes 0. p is scaled to 1 again.
3. A token that is kept is the place to go on from; if none is, the next token is drawn from what is left of p.

Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1, for one token; SpecInfer (arXiv 2305.09781), algorithm 2,
for several, which may be drawn without replacement as in Sequoia (arXiv 2402.12374), each q being what its own draw was
made from. For one try, sum_x q(x) min(1, p(x) / q(x)) delta_x + (rejected) * max(p - q, 0) / (its sum) = p; the tries
that follow draw from that remainder in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROOT = -1
"""The last token of the text, which no node is."""


@dataclass(frozen=True, eq=False)
class DraftNode:
    """A drafted token. parent: a node's number or ROOT. chances: q, float [V], that drew it; None: certain."""

    parent: int
    token: int
    chances: Tensor | None = None


@dataclass
class Tree:
    """Drafted tokens, parents before children; siblings in the order in which they are tried, no token twice."""

    nodes: list[DraftNode] = field(default_factory=list)

    def children(self, parent: int) -> list[int]:
        """The numbers of those that follow a node, or the text (ROOT)."""
        return [number for number, node in enumerate(self.nodes) if node.parent == parent]

    def add(self, tokens: Sequence[int], chances: Sequence[Tensor | None] | None = None) -> None:
        """A path from the text on; of its tokens those that are there already, certain or not, are taken."""
        at = ROOT
        for place, token in enumerate(tokens):
            found = [number for number in self.children(at) if self.nodes[number].token == token]
            if found:
                at = found[0]
                continue
            self.nodes.append(DraftNode(at, token, None if chances is None else chances[place]))
            at = len(self.nodes) - 1

    def path(self, number: int) -> list[int]:
        """The nodes from the text to this one."""
        found = list[int]()
        while number != ROOT:
            found.append(number)
            number = self.nodes[number].parent
        return found[::-1]

    def cut(self, length: int) -> Tree:
        """The tree without what lies deeper than `length` tokens."""
        made, names = Tree(), {ROOT: ROOT}
        for number, node in enumerate(self.nodes):
            if len(self.path(number)) <= length:
                names[number] = len(made.nodes)
                made.nodes.append(DraftNode(names[node.parent], node.token, node.chances))
        return made

    def leaves(self) -> list[int]:
        """The nodes that nothing follows."""
        parents = {node.parent for node in self.nodes}
        return [number for number in range(len(self.nodes)) if number not in parents]


Chances = Callable[[int], Tensor]
"""What the model gives the token behind a node (or ROOT): float [V], sum 1. Asked once each, from the text on."""


def accept(tree: Tree, chances: Chances) -> tuple[list[int], int]:
    """The nodes that are kept, a path from the text, and the token behind them.

    Draws from torch's generator, as generate() does. Local to the client.
    """
    at, kept = ROOT, list[int]()
    while True:
        left = chances(at)
        for child in tree.children(at):
            node = tree.nodes[child]
            given = 1.0 if node.chances is None else float(node.chances[node.token])
            if _happens(float(left[node.token]) / given):
                at = child
                kept.append(child)
                break
            left = _without(left, node)
        else:
            return kept, int(torch.multinomial(left, 1))


def _happens(chance: float) -> bool:
    if chance <= 0.0 or chance >= 1.0:
        return chance > 0.0  # as greedy decoding always is: no random number is used up
    return int(torch.multinomial(torch.tensor([1.0 - chance, chance], dtype=torch.float64), 1)) == 1


def _without(left: Tensor, node: DraftNode) -> Tensor:
    """What is left of p after a token was not kept."""
    if node.chances is None:
        rest = left.clone()
        rest[node.token] = 0.0
    else:
        rest = (left - node.chances).clamp(min=0.0)
    total = rest.sum()
    # SAFE: a token is refused with the chance that is left over, so nothing left means rounding; p itself stays exact.
    return rest / total if bool(total > 0) else left
