"""Speculative sampling keeps the model's distribution: chi-squared against exact chances, on a small vocabulary."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from private_llm_hf.client import drafts
from private_llm_hf.client.drafts import ROOT, Both, Draft, LookUp, ModelDraft, Tree, accept
from private_llm_hf.client.speculation import FixedCounts, SpeculationConfig
from private_llm_hf.client.speculative_loop import Passes, Text, _fixed_counts, _open_counts
from torch import Tensor
from transformers import GPT2Config, LogitsProcessorList, PretrainedConfig, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria, TemperatureLogitsWarper

WORDS, DRAWS, START = 5, 1500, [1, 2, 1]
LIMIT = 75.0
"""Of a chi-squared variable with 24 degrees of freedom: larger once in a million draws."""


class Table:
    """A language of which the next word depends on the last one; it counts what a cache holds."""

    layers = ()

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = 1.5 * torch.randn(WORDS, WORDS, generator=generator)
        self.config, self.length, self.read = PretrainedConfig(), 0, list[torch.Size]()

    def forward(self, input_ids: Tensor, past_key_values: object, use_cache: bool) -> SimpleNamespace:
        self.length += input_ids.shape[1]
        self.read.append(input_ids.shape)
        return SimpleNamespace(logits=self.logits[input_ids])

    __call__ = forward

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, count: int) -> None:
        self.length += count

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows = repeats

    def reorder_cache(self, index: Tensor) -> None:
        assert len(index) == 1
        assert int(index) < self.rows


def sampled(draft: str, paths: int, temperature: float = 1.0) -> Counter[tuple[int, ...]]:
    """The first two words of many texts, through the loop that the private model is decoded with."""
    torch.manual_seed(7)
    target, small, made = Table(1), Table(2), Counter[tuple[int, ...]]()
    warp = LogitsProcessorList([TemperatureLogitsWarper(temperature)] if temperature != 1.0 else [])
    config = SpeculationConfig(length=2, paths=paths)
    for _ in range(DRAWS):
        drafts: dict[str, Draft] = {"look-up": LookUp(), "model": ModelDraft(small, warp, True)}
        drafts["greedy model"] = ModelDraft(small, warp, False)
        drafts["both"] = Both(ModelDraft(small, warp, True))
        text = Text([*START], StoppingCriteriaList([MaxLengthCriteria(len(START) + 2)]), None)
        target.length = 0
        _open_counts(Passes(target, target, warp, True, text), drafts[draft], config, len(START) + 20)
        made[tuple(text.ids[len(START) :])] += 1
    return made


def chi_squared(made: Counter[tuple[int, ...]], temperature: float = 1.0) -> float:
    chances = (Table(1).logits / temperature).softmax(-1)
    want = {(a, b): float(chances[START[-1], a] * chances[a, b]) for a, b in itertools.product(range(WORDS), repeat=2)}
    assert sum(made.values()) == DRAWS
    return sum((made[pair] - DRAWS * chance) ** 2 / (DRAWS * chance) for pair, chance in want.items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("draft", "paths"), [("look-up", 1), ("model", 1), ("model", 3), ("greedy model", 3), ("both", 2)]
)
def test_sampled_texts_have_the_models_distribution(draft: str, paths: int) -> None:
    assert chi_squared(sampled(draft, paths)) < LIMIT


def test_temperature_changes_the_distribution_as_it_does_without_drafts() -> None:
    made = sampled("model", 2, temperature=0.5)
    assert chi_squared(made, temperature=0.5) < LIMIT < chi_squared(made)


@pytest.mark.parametrize("wrong", ["keeps all", "forgets the remainder"])
def test_a_wrong_rule_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "keeps all":
        monkeypatch.setattr(drafts, "_happens", lambda chance: chance > 0.0)
    else:
        monkeypatch.setattr(drafts, "_without", lambda left, node: left)
    assert chi_squared(sampled("model", 2)) > LIMIT


def test_greedy_keeps_the_path_that_the_model_says_and_adds_its_next_token() -> None:
    def says(number: int) -> Tensor:
        word = {ROOT: 3}.get(number, -1)
        word = word if number == ROOT else (tree.nodes[number].token + 1) % WORDS
        return torch.eye(WORDS)[word]

    tree = Tree()
    tree.add([2, 3, 4])
    tree.add([3, 4, 1])
    tree.add([3, 1])
    kept, following = accept(tree, says)
    assert [tree.nodes[number].token for number in kept] == [3, 4]
    assert following == 0
    assert len(tree.leaves()) == 3
    short = tree.cut(1)
    assert [(node.parent, node.token) for node in short.nodes] == [(ROOT, 2), (ROOT, 3)]
    assert accept(Tree(), says) == ([], 3)


def test_chances_that_rounding_left_without_a_remainder_stay_as_they_are() -> None:
    tree = Tree()
    tree.add([1], [torch.eye(WORDS)[1]])
    kept, following = accept(tree, lambda _: torch.eye(WORDS)[1])
    assert ([tree.nodes[number].token for number in kept], following) == ([1], 1)


def test_a_certain_token_that_is_refused_is_not_drawn() -> None:
    torch.manual_seed(3)
    tree = Tree()
    tree.add([1])
    ends = [accept(tree, lambda _: torch.full((WORDS,), 1 / WORDS)) for _ in range(100)]
    assert {following for kept, following in ends if not kept} == {*range(WORDS)} - {1}


def test_fixed_counts_do_not_tell_that_the_first_token_ended_the_text() -> None:
    read = []
    for length in (1, 6):
        target, greedy = Table(1), LogitsProcessorList()
        target.config = GPT2Config()
        text = Text([*START], StoppingCriteriaList([MaxLengthCriteria(len(START) + length)]), None)
        counts = FixedCounts(advance=1, window=4, reserve=1)
        _fixed_counts(Passes(target, target, greedy, False, text), LookUp(), 1, counts, len(START) + 6)
        read.append(target.read)
    assert read[0] == read[1] == [(1, len(START)), *[(1, 4)] * counts.passes(6)]


def test_a_look_up_takes_the_longest_and_latest_match() -> None:
    tree = Tree()
    LookUp().add(tree, [5, 6, 1, 5, 6, 2, 9, 5, 6], 2, 2)
    assert [[tree.nodes[n].token for n in tree.path(leaf)] for leaf in tree.leaves()] == [[2, 9], [1, 5]]
    for text in ([1, 2, 3, 4], [1]):
        nothing = Tree()
        LookUp().add(nothing, text, 1, 3)
        assert nothing.nodes == []
    repeated = Tree()
    LookUp().add(repeated, [7, 8, 7, 8], 1, 5)
    assert [node.token for node in repeated.nodes] == [7, 8, 7, 8, 7]


@pytest.mark.parametrize("paths", [1, 2])
def test_the_draft_model_reads_as_much_where_the_look_up_found_a_path(paths: int) -> None:
    """Parties could tell from the time of a pass that the last words occurred before."""
    read = []
    for text in ([1, 2, 3, 4], [1, 2, 1, 2]):
        small, tree = Table(2), Tree()
        Both(ModelDraft(small, LogitsProcessorList(), True)).add(tree, text, paths, 3)
        read.append(small.read)
        assert len(tree.leaves()) == paths
    assert read == 2 * [[(1, 4), (paths, 1), (paths, 1)]]
