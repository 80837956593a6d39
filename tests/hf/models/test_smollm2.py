"""A real chat model, SmolLM2-135M-Instruct: its entries reach 24,926 beside rows near 30, and its answers stay."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.models import smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

ROOT = Path(__file__).resolve().parents[3]
LOGIT_ERROR = 0.02
"""Largest error of a logit; the two best are nowhere closer than 0.08 in the answers, so no token can differ."""
NEW_TOKENS = 8

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.full,
    pytest.mark.skipif(smollm2.missing() is not None, reason=str(smollm2.missing())),
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("real_model", ROOT / "scripts" / "studies" / "real_model.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["real_model"] = made
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2.folder()


@pytest.fixture(scope="module")
def plain(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def private(request: pytest.FixtureRequest, plain: PreTrainedModel) -> Iterator[Any]:
    """One session for each protocol."""
    with patch(plain, PrivateConfig(protocol=request.param, timeout_s=600)) as model:
        yield model


@pytest.mark.parametrize("private", ["trio"], indirect=True)
def test_eight_answers_are_the_plaintext_models(
    private: Any, plain: PreTrainedModel, tokenizer: Any, script: ModuleType
) -> None:
    """As one batch, padded on the left, on both sides."""
    made = script.answers(private, plain, tokenizer, script.PROMPTS, NEW_TOKENS)
    assert made.private == made.plain
    assert made.private[0] == "The capital of France is Paris."
    assert made.equal == made.tokens == 8 * NEW_TOKENS
    assert made.error <= LOGIT_ERROR


@pytest.mark.parametrize("private", ["trio"], indirect=True)
def test_next_tokens_agree_on_real_text(
    private: Any, plain: PreTrainedModel, tokenizer: Any, script: ModuleType
) -> None:
    """Teacher-forced on 512 tokens of WikiText-2's test split.

    At a few positions, 260 first of all, the model itself is ill-conditioned: its bfloat16 logits are off by 18 there.
    Errors may grow with what noise of the last place of the ring, behind every layer, does to the exact model.
    """
    ids = script.bundled_text(tokenizer, 512, 128)
    read = script.forced(private, plain, ids)
    noisy = _changes_by_noise(plain, ids, seeds=2)
    assert len(read.errors) == len(noisy) == 512
    assert read.agreement >= 0.995
    assert (noisy > LOGIT_ERROR / 100).sum() <= 10
    assert (read.errors <= (100 * noisy).clamp(min=LOGIT_ERROR)).all(), read.errors.topk(5)
    assert read.errors.median() <= LOGIT_ERROR / 7


@torch.no_grad()
def _changes_by_noise(plain: PreTrainedModel, ids: torch.Tensor, seeds: int) -> torch.Tensor:
    """Largest change of a logit at each position when normal noise of 2^-18 is added behind every layer."""
    exact, generator = copy.deepcopy(plain).double(), torch.Generator().manual_seed(0)

    def logits() -> torch.Tensor:
        return torch.cat([exact(row).logits[0] for row in ids.split(1)])

    def disturb(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        return out + 2.0**-18 * torch.randn(out.shape, generator=generator, dtype=out.dtype)

    quiet = logits()
    for layer in exact.model.layers:
        layer.register_forward_hook(disturb)
    return torch.stack([(logits() - quiet).abs().amax(-1) for _ in range(seeds)]).amax(0)


@pytest.mark.parametrize("private", ["quad", "dealer"], indirect=True)
def test_one_answer_under_the_other_protocols(
    private: Any, plain: PreTrainedModel, tokenizer: Any, script: ModuleType
) -> None:
    made = script.answers(private, plain, tokenizer, ["What is the capital of France?"], 2)
    assert made.private == made.plain == ["The capital"]
    assert made.error <= LOGIT_ERROR


def test_the_converted_folder_is_a_model_like_any_other(plain: PreTrainedModel, tokenizer: Any) -> None:
    assert not hasattr(plain.config, "quantization_config")
    assert sum(value.numel() for value in plain.parameters()) == 134_515_008
    embedding = plain.get_input_embeddings()
    assert plain.get_output_embeddings().weight.data_ptr() == embedding.weight.data_ptr()
    text = tokenizer.decode(smollm2.chat(tokenizer, ["Hi"])["input_ids"][0])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
