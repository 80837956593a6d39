"""Private text: three parties on this machine run a language model on shares of its weights and of the prompt.

    python examples/generate_text.py

Uses the small model that comes with the package. For one of your own put a hub id or a folder in its place, such as
"facebook/opt-125m". All parties run on this machine, which protects nobody from its owner: see three_hosts.py.
"""

from __future__ import annotations

from importlib import resources

from private_llm_hf import AutoPrivateModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = str(resources.files("private_llm_hf") / "demo_model")
PROMPT = "The history of the city begins with"


def main() -> None:
    """Generate the same text in plaintext and in private, and say what the private one cost."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    how = {"max_new_tokens": 6, "do_sample": False}

    plain = AutoModelForCausalLM.from_pretrained(MODEL).float().eval()
    print("plaintext:", tokenizer.decode(plain.generate(**inputs, **how)[0], skip_special_tokens=True))

    with AutoPrivateModelForCausalLM.from_pretrained(MODEL) as private:  # starts the parties, shares the weights
        made = private.generate(**inputs, **how)
        print("private:  ", tokenizer.decode(made[0], skip_special_tokens=True))
        print("cost:     ", repr(private.cost()))


if __name__ == "__main__":
    main()
