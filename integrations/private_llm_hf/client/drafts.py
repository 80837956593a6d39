"""Drafts: guesses at the client of what the private model will say next, from the text itself or by a small model; and
which of a tree of them are kept, so that the text keeps the distribution of the private model exactly.

A tree holds what may follow the text: each node is a token after its parent. From the text on:

1. p is what the model gives the next token here, after all logits processors (greedy: 1 for the likeliest).
2. The drafted tokens x that follow here are tried in their order. One drawn from q is kept with the probability
   min(1, p(x) / q(x)), else p becomes max(p - q, 0); one that was certain (no q) is kept with p(x), else p(x) becomes
   0. p is scaled to 1 again.
3. A token that is kept is the place to go on from; if none is, the next token is drawn from what is left of p.

Source: Leviathan et al. 2023 (arXiv 2211.17192), algorithm 1, for one token; SpecInfer (arXiv 2305.09781), algorithm 2,
for several, drawn without replacement as in Sequoia (arXiv 2402.12374), each q being what its own draw was made from:
sum_x q(x) min(1, p(x) / q(x)) delta_x + (rejected) * max(p - q, 0) / (its sum) = p; tries draw from that in turn.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

from private_llm_hf.transformers_versions import CACHE

ROOT = -1  # the last token of the text, which no node is


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

    def cut(self, length: int) -> "Tree":
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


Chances = Callable[[int], Tensor]  # of the token after a node (or ROOT): float [V], sum 1; asked once each, in order


def accept(tree: Tree, chances: Chances) -> tuple[list[int], int]:
    """The nodes that are kept, a path from the text, and the token after them; draws from torch's generator. Local."""
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


LONGEST, SHORTEST = 4, 2  # tokens at the end of the text that a look-up searches for before it: the most first


class Draft(ABC):
    """Something that guesses. Runs at the client, in plaintext; the parties see nothing of it but shapes."""

    @abstractmethod
    def add(self, tree: Tree, ids: Sequence[int], paths: int, length: int) -> None:
        """Add up to `paths` paths of up to `length` tokens after the text `ids`; certain ones depend on it alone."""


class LookUp(Draft):
    """What followed the last words where they occurred before: the longest and latest match first."""

    def add(self, tree: Tree, ids: Sequence[int], paths: int, length: int) -> None:
        """Certain tokens; nothing where the last words are new."""
        known, text, found = len(tree.leaves()), list(ids), 0
        for size in range(min(LONGEST, len(text) - 1), SHORTEST - 1, -1):
            end = text[-size:]
            for start in range(len(text) - size - 1, -1, -1):
                if found == paths:
                    return
                if text[start : start + size] == end:
                    following = itertools.cycle(text[start + size :])  # where it ends too soon, what repeats goes on
                    tree.add(list(itertools.islice(following, length)))
                    found = len(tree.leaves()) - known


class ModelDraft(Draft):
    """A plaintext model of the same vocabulary, with its own cache. Greedy: its greedy path and others by beam search,
    certain. Sampled: first tokens without replacement, and a drawn path each, by the caller's processors.
    """

    def __init__(self, model: PreTrainedModel, processors: LogitsProcessorList, sample: bool) -> None:
        self._model, self._processors, self._sample = model, processors, sample
        self._cache, self._held = DynamicCache(), list[int]()

    @torch.no_grad()
    def add(self, tree: Tree, ids: Sequence[int], paths: int, length: int, kept: int | None = None) -> None:
        """The same number of steps whatever the text is. kept: how many of the paths are added; default, all."""
        text = list(ids)
        scores = self._read(text)
        taken = [tree.nodes[number].token for number in tree.children(-1)]
        if self._sample:
            self._drawn(tree, text, scores, taken, paths, length, kept)
        else:
            self._likeliest(tree, text, scores, paths, length, kept)

    def _read(self, text: list[int]) -> Tensor:
        """Chances of the next token [V], as logarithms; the cache then holds the text, and nothing else."""
        same = next((n for n, pair in enumerate(zip(text[:-1], self._held, strict=False)) if pair[0] != pair[1]), None)
        same = min(len(text) - 1, len(self._held)) if same is None else same
        if same < len(self._held):
            self._cache.crop(same - len(self._held))
        self._held = text
        return self._chances(self._cache, torch.tensor([text[same:]]), torch.tensor([text]))[0]

    def _chances(self, cache: DynamicCache, fed: Tensor, text: Tensor) -> Tensor:
        """Logarithms of the chances [R, V] after rows of text [R, n], whose last tokens `fed` are new to the cache."""
        logits = self._model(input_ids=fed, **{CACHE: cache}, use_cache=True).logits[:, -1].float()
        scores: Tensor = self._processors(text, logits)
        return scores.log_softmax(-1)

    def _copied(self, rows: int) -> DynamicCache:
        pairs = [(layer.keys, layer.values) for layer in self._cache.layers]
        copied = DynamicCache(pairs)
        copied.batch_repeat_interleave(rows)
        return copied

    def _likeliest(
        self, tree: Tree, text: list[int], scores: Tensor, paths: int, length: int, kept: int | None
    ) -> None:  # fmt: skip
        sums, tokens = scores.topk(paths)
        made, cache = tokens[:, None], self._copied(paths)
        for _ in range(length - 1):
            following = sums[:, None] + self._chances(cache, made[:, -1:], _after(text, made))
            greedy = following[0].argmax().view(1)
            others = following.view(-1).index_fill(0, greedy, -torch.inf).topk(paths - 1).indices
            places = torch.cat([greedy, others])
            origin, sums = places // following.shape[1], following.view(-1)[places]
            cache.reorder_cache(origin)
            made = torch.cat([made[origin], (places % following.shape[1])[:, None]], 1)
        for row in made[:kept].tolist():
            tree.add(row)

    def _drawn(
        self, tree: Tree, text: list[int], scores: Tensor, taken: list[int], paths: int, length: int, kept: int | None
    ) -> None:  # fmt: skip
        """One path for each first token; `taken`: first tokens that are in the tree."""
        first, given = list[int](), list[Tensor]()
        left = scores.exp()
        left[taken] = 0.0
        for _ in range(paths):
            if not bool(left.sum() > 0):
                break
            left = left / left.sum()
            given.append(left)
            first.append(int(torch.multinomial(left, 1)))
            left = left.clone()
            left[first[-1]] = 0.0
        if not first:
            return
        made, cache, chances = torch.tensor(first)[:, None], self._copied(len(first)), [torch.stack(given)]
        for _ in range(length - 1):
            chances.append(self._chances(cache, made[:, -1:], _after(text, made)).exp())
            made = torch.cat([made, torch.multinomial(chances[-1], 1)], 1)
        for row, tokens in enumerate(made[:kept].tolist()):
            tree.add(tokens, [step[row] for step in chances])


def _after(text: list[int], made: Tensor) -> Tensor:
    """Paths [R, n] after the text, as rows of whole texts."""
    return torch.cat([torch.tensor([text]).expand(len(made), -1), made], 1)


class Both(Draft):
    """A look-up for one path where the last words occurred before; the model for the others, or for all."""

    def __init__(self, model: ModelDraft) -> None:
        self._look_up, self._model = LookUp(), model

    def add(self, tree: Tree, ids: Sequence[int], paths: int, length: int) -> None:
        """The model drafts as many paths whether one was found or not, so that time does not tell."""
        self._look_up.add(tree, ids, 1, length)
        self._model.add(tree, ids, paths, length, paths - bool(tree.nodes))
