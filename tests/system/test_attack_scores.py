"""Scores against hand-counted examples."""

from __future__ import annotations

import math

import pytest
from attacks.scores import bleu, exact, rouge_l

A, B = ["the", "cat", "sat", "on", "the", "mat"], ["the", "cat", "on", "the", "red", "mat"]


def test_exact() -> None:
    assert exact([1, 2, 3], [1, 5, 3, 4]) == 0.5
    assert exact([], []) == 0.0


def test_rouge_l() -> None:
    """Longest common subsequence: the cat on the mat, 5 of 6 on both sides."""
    assert rouge_l(B, A) == pytest.approx(5 / 6)
    assert rouge_l(A[:3], A) == pytest.approx(2 * 1 * 0.5 / 1.5)
    assert rouge_l(["x"], A) == 0.0


def test_bleu() -> None:
    """Orders 1 and 2: 6 of 6 words less one ('red'), pairs 'the cat' and 'on the' of five."""
    assert bleu(B, A, 2) == pytest.approx(math.sqrt(5 / 6 * 2 / 5))
    assert bleu(A, A) == pytest.approx(1.0)
    assert bleu(A[:3], A, 1) == pytest.approx(math.exp(1 - 6 / 3))
    assert bleu(B, A, 4) == 0.0
    assert bleu(["the"] * 6, A, 1) == pytest.approx(2 / 6)
