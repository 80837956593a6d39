"""Drafts: guesses at the client of what the private model will say next, from the text itself or by a small model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

from private_llm_hf.client.acceptance import Tree
from private_llm_hf.transformers_versions import CACHE

LONGEST, SHORTEST = 4, 2
"""Tokens at the end of the text that a look-up searches for earlier in it: first the most, then fewer."""


class Draft(ABC):
    """Something that guesses. Runs at the client, in plaintext; the parties see nothing of it but shapes."""

    @abstractmethod
    def add(self, tree: Tree, ids: Sequence[int], paths: int, length: int) -> None:
        """Add at most `paths` paths of at most `length` tokens that may follow the text `ids`.

        What is added as certain (without chances) is a function of the text alone.
        """


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
                    tree.add(_continued(text, start + size, length))
                    found = len(tree.leaves()) - known


def _continued(text: list[int], start: int, length: int) -> list[int]:
    """The text from `start` on, again and again where it ends before `length` tokens: what repeats goes on."""
    return [text[start + place % (len(text) - start)] for place in range(length)]


class ModelDraft(Draft):
    """A plaintext model of the same vocabulary, with a cache of its own.

    Greedy: its greedy path and the likeliest others by beam search, certain. Sampled: first tokens drawn without
    replacement, each followed by a drawn path; every draw is from the model's chances under the caller's logits
    processors.
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
        """Logarithms of the chances [R, V] behind rows of text [R, n], whose last tokens `fed` are new to the cache."""
        logits = self._model(input_ids=fed, **{CACHE: cache}, use_cache=True).logits[:, -1].float()
        scores: Tensor = self._processors(text, logits)
        return scores.log_softmax(-1)

    def _copied(self, rows: int) -> DynamicCache:
        """The cache of the text, for paths that begin with it."""
        pairs = [(layer.keys, layer.values) for layer in self._cache.layers]
        copied = DynamicCache(pairs)
        copied.batch_repeat_interleave(rows)
        return copied

    def _likeliest(
        self, tree: Tree, text: list[int], scores: Tensor, paths: int, length: int, kept: int | None
    ) -> None:  # fmt: skip
        """The greedy path, and by beam search the likeliest others."""
        sums, tokens = scores.topk(paths)
        made, cache = tokens[:, None], self._copied(paths)
        for _ in range(length - 1):
            following = sums[:, None] + self._chances(cache, made[:, -1:], _behind(text, made))
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
            chances.append(self._chances(cache, made[:, -1:], _behind(text, made)).exp())
            made = torch.cat([made, torch.multinomial(chances[-1], 1)], 1)
        for row, tokens in enumerate(made[:kept].tolist()):
            tree.add(tokens, [step[row] for step in chances])


def _behind(text: list[int], made: Tensor) -> Tensor:
    """Paths [R, n] behind the text, as rows of whole texts."""
    return torch.cat([torch.tensor([text]).expand(len(made), -1), made], 1)


class Both(Draft):
    """A look-up for one path where the last words occurred before; the model for the others, or for all."""

    def __init__(self, model: ModelDraft) -> None:
        self._look_up, self._model = LookUp(), model

    def add(self, tree: Tree, ids: Sequence[int], paths: int, length: int) -> None:
        """The model drafts as many paths whether one was found or not, so that time does not tell."""
        self._look_up.add(tree, ids, 1, length)
        self._model.add(tree, ids, paths, length, paths - bool(tree.nodes))
