"""Fewer rounds a token: drafts propose what the private model will say, and one pass checks several tokens.

    python examples/generate_with_drafts.py

The drafts are looked up in the text itself, which needs nothing else; `draft=` takes the folder of a small model that
scripts/train_draft.py has trained. The text stays that of the private model. See docs/speculation.md.
"""

from __future__ import annotations

from importlib import resources

from private_llm_hf import AutoPrivateModelForCausalLM, FixedCounts, SpeculationConfig
from transformers import AutoTokenizer

MODEL = str(resources.files("private_llm_hf") / "demo_model")
PROMPT = "1 2 3 4 5 6 7 8 1 2 3 4 5 6 7 8 1 2 3 4"


def main() -> None:
    """The same text without drafts, with them, and with hidden counts."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ways = {
        "alone:": {},
        "drafts:": {"speculation": SpeculationConfig(draft="lookup", length=4)},
        "hidden:": {"speculation": SpeculationConfig(draft="lookup", fixed_counts=FixedCounts(1, window=6, reserve=1))},
    }
    with AutoPrivateModelForCausalLM.from_pretrained(MODEL) as private:
        for name, how in ways.items():
            private.cost(reset=True)
            made = private.generate(**inputs, max_new_tokens=8, do_sample=False, **how)
            text = tokenizer.decode(made[0, inputs["input_ids"].shape[1] :])
            print(name, private.cost().rounds, "rounds:", text)


if __name__ == "__main__":
    main()
