"""How much of a text was recovered: exact tokens, ROUGE-L, BLEU; all from 0 to 1, over any sequences of symbols."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

Text = Sequence[Hashable]


def exact(found: Text, truth: Text) -> float:
    """Share of positions of `truth` that are right."""
    return sum(a == b for a, b in zip(found, truth, strict=False)) / max(len(truth), 1)


def rouge_l(found: Text, truth: Text) -> float:
    """F1 of the longest common subsequence (Lin 2004, beta = 1)."""
    common = _longest_common(found, truth)
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(truth)
    return 2 * precision * recall / (precision + recall)


def bleu(found: Text, truth: Text, order: int = 4) -> float:
    """Sentence BLEU with one reference (Papineni et al. 2002): geometric mean of clipped n-gram precisions, brevity.

    n-grams longer than the text are left out; no smoothing: 0 if some order has no match.
    """
    logs = []
    for n in range(1, min(order, len(found), len(truth)) + 1):
        made, wanted = _ngrams(found, n), _ngrams(truth, n)
        matched = sum(min(count, wanted[gram]) for gram, count in made.items())
        if not matched:
            return 0.0
        logs.append(math.log(matched / sum(made.values())))
    if not logs:
        return 0.0
    brevity = min(0.0, 1 - len(truth) / len(found))
    return math.exp(brevity + sum(logs) / len(logs))


def _ngrams(text: Text, n: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1))


def _longest_common(a: Text, b: Text) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]
