"""How alike are two sentences? An encoder turns them into vectors in private; the client compares these.

    python examples/compare_sentences.py

The encoder here is a small BERT without training, so that nothing need be downloaded; sentences with the same words
already come out alike. With a trained one, replace `patch(plain)` by
`AutoPrivateModel.from_pretrained("sentence-transformers/all-MiniLM-L6-v2")`, and take its tokenizer.
"""

from __future__ import annotations

from importlib import resources

import torch
from private_llm_hf import patch
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedModel

TOKENIZER = str(resources.files("private_llm_hf") / "demo_model")
SENTENCES = (
    "The people of the town built a bridge over the river.",
    "A bridge over the river was built by the people.",
    "His speech was about taxes, banks and foreign trade.",
)


def vectors(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """One vector of length 1 for each sentence: the mean of its tokens' hidden states."""
    states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def main() -> None:
    """Compare all sentences with the first, in plaintext and in private."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    plain = BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)).eval()
    inputs = dict(tokenizer(list(SENTENCES), return_tensors="pt", padding=True, return_token_type_ids=False))

    with torch.no_grad(), patch(plain) as private:
        wanted, found = vectors(plain, inputs), vectors(private, inputs)
    for number in (1, 2):
        plaintext, secret = (float(each[0] @ each[number]) for each in (wanted, found))
        print(f"sentences 0 and {number}: plaintext {plaintext:.3f}, private {secret:.3f}")


if __name__ == "__main__":
    main()
