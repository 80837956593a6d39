"""Questions for the tasks beside this file, from text that comes with the package: sentences of WikiText-2's test."""

from __future__ import annotations

from importlib import resources

from datasets import Dataset

WORDS = (8, 30)
"""Of a sentence."""


def questions(**_: object) -> dict[str, Dataset]:
    """One row for each sentence: its words up to a place, the next word, and two words that others go on with."""
    text = resources.files("private_llm_hf").joinpath("data", "heldout.txt").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if not line.strip().startswith("=")]
    sentences = [part.split() for line in lines for part in line.split(" . ")]
    kept = [words for words in sentences if WORDS[0] <= len(words) <= WORDS[1] and "<unk>" not in words]
    places = [2 * len(words) // 3 for words in kept]
    next_words = [words[place] for words, place in zip(kept, places, strict=True)]
    rows = []
    for number, (words, place) in enumerate(zip(kept, places, strict=True)):
        others = [word for word in next_words[number + 1 :] + next_words[:number] if word != next_words[number]]
        choices = [next_words[number], *list(dict.fromkeys(others))[:2]]
        turned = choices[number % 3 :] + choices[: number % 3]
        rows.append(
            {
                "beginning": " ".join(words[:place]), "next": next_words[number], "choices": turned,
                "answer": turned.index(next_words[number]),
            }
        )  # fmt: skip
    return {"test": Dataset.from_list(rows)}
