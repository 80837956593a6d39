"""Metrics of generated texts, against values worked out by hand."""

from __future__ import annotations

import pytest
import text_metrics as metrics


def test_words_are_normalised() -> None:
    assert metrics.normalised("The  Cat's, an APPLE!\n theatre") == ["cats", "apple", "theatre"]


@pytest.mark.parametrize(
    ("found", "truth", "f1"),
    [
        ("The Eiffel Tower", "eiffel tower.", 1.0),
        ("in Paris France", "Paris", 0.5),  # precision 1/3, recall 1
        ("red red blue", "red blue blue", 2 / 3),  # one red and one blue in common: 2/3 and 2/3
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "a", 0.0),
    ],
)
def test_token_f1(found: str, truth: str, f1: float) -> None:
    assert metrics.token_f1(found, truth) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("found", "truth", "f1"),
    [
        ("the cat sat on the mat", "the cat on a mat", 2 * (4 / 6) * (4 / 5) / (4 / 6 + 4 / 5)),  # the cat on mat
        ("a b c", "c b a", 1 / 3),
        ("", "a", 0.0),
    ],
)
def test_rouge_l(found: str, truth: str, f1: float) -> None:
    assert metrics.rouge_l(found, truth) == pytest.approx(f1)


def test_exact_match() -> None:
    assert metrics.exact_match(" The answer.", "answer") == 1
    assert metrics.exact_match("answer 2", "answer") == 0


def test_classification() -> None:
    classes = ("Person", "Other person", "City", "Country")
    assert metrics.classification("Type: City", "City", classes) == 1
    assert metrics.classification("City or Country", "City", classes) == 0.5
    assert metrics.classification("Other person", "Other person", (*classes, "Other")) == 1
    assert metrics.classification("Country", "City", classes) == 0
    assert metrics.classification("nothing", "City", classes) == 0


def test_retrieval() -> None:
    assert metrics.retrieval("Paragraph 7", "Paragraph 7") == 1
    assert metrics.retrieval("Paragraph 7 or 17, or 7, or 8", "Paragraph 7") == 0.5
    assert metrics.retrieval("Paragraph 17", "Paragraph 7") == 0
    assert metrics.retrieval("none", "Paragraph 7") == 0


def test_the_beginning_counts() -> None:
    assert metrics.begins_with(" 48213. And then", "48213") == 1
    assert metrics.begins_with("482134", "48213") == 0
    assert metrics.begins_with("It is 48213", "48213") == 0


def test_words_in_place() -> None:
    assert metrics.words_in_place("1 2 4 9", "1 2 3") == pytest.approx(2 / 3)
    assert metrics.words_in_place("2 3", "1 2 3") == 0
