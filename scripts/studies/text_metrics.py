"""How right a generated text is, from 0 to 1: LongBench's metrics, and those of the made tasks.

Source: Bai et al., *LongBench* (ACL 2024), and the rules of its published evaluation script. Where several answers are
right, take the best of the scores.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from attacks.scores import exact
from attacks.scores import rouge_l as sequence_rouge_l

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> list[str]:
    """Words in lower case, without punctuation and English articles (the rule of SQuAD)."""
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()


def token_f1(found: str, truth: str) -> float:
    """F1 of the normalised words, each counted as often as it stands; 0 if either text has none."""
    made, wanted = Counter(normalised(found)), Counter(normalised(truth))
    common = (made & wanted).total()
    if not common:
        return 0.0
    precision, recall = common / made.total(), common / wanted.total()
    return 2 * precision * recall / (precision + recall)


def rouge_l(found: str, truth: str) -> float:
    """F1 of the longest common subsequence of words, split at white space.

    LongBench's package counts distinct words, sentence by sentence; figures differ by a few points on long texts.
    """
    return sequence_rouge_l(found.split(), truth.split())


def exact_match(found: str, truth: str) -> float:
    """1 if the normalised words are equal, else 0."""
    return float(normalised(found) == normalised(truth))


def classification(found: str, truth: str, classes: Sequence[str]) -> float:
    """1 / n if the truth is one of the n class names that stand in the text, else 0.

    Names that are a part of the true name do not count, as they stand wherever it stands.
    """
    named = [name for name in classes if name in found and (name == truth or name not in truth)]
    return 1 / len(named) if truth in named else 0.0


def retrieval(found: str, truth: str) -> float:
    """Share of the whole numbers in the text that are the true one; of "Paragraph 7", that is 7. 0 without numbers."""
    wanted = re.findall(r"\d+", truth)
    numbers = re.findall(r"\d+", found)
    return sum(number == wanted[0] for number in numbers) / len(numbers) if numbers and wanted else 0.0


def begins_with(found: str, truth: str) -> float:
    """1 if the words of the text begin with those of the truth, else 0; what follows them does not count."""
    wanted = normalised(truth)
    return float(normalised(found)[: len(wanted)] == wanted)


def words_in_place(found: str, truth: str) -> float:
    """Share of the words of the truth that stand at the same place in the text."""
    return exact(normalised(found), normalised(truth))
