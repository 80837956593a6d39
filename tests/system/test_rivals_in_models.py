"""Models under other systems' functions: against the plaintext model with the same ones, and what users are told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from private_llm_hf import patch
from private_llm_hf.tools.compare import compare
from rivals import formulas
from torch import Tensor, nn

from private_llm.approximations import emulated
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, NeedsDistillation

PLAIN = PrivateConfig(protocol="plain", insecure=True, party_mode="threads")
TRIO = PrivateConfig(party_mode="threads")
named = pytest.mark.parametrize("name", ["mpcformer", "secformer", "puma"])
IDS = torch.tensor([[5, 9, 30, 11, 17, 2, 8], [3, 22, 13, 1, 1, 1, 1]])
Make = Callable[[], transformers.PreTrainedModel]
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]])


def bert() -> transformers.PreTrainedModel:
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=32, num_attention_heads=2, num_hidden_layers=2, intermediate_size=48, num_labels=2,
        max_position_embeddings=16, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config).eval()


def gpt2() -> transformers.PreTrainedModel:
    """Its GELU is spelled out by hand."""
    config = transformers.GPT2Config(
        vocab_size=40, n_embd=32, n_head=2, n_layer=2, n_positions=16, initializer_range=0.3, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(config).eval()


def logits(model: nn.Module, mask: Tensor = MASK) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, attention_mask=mask).logits
    return found[mask.bool()] if found.ndim == 3 else found


@pytest.mark.sampled(4)
@named
@pytest.mark.parametrize("make", [bert, gpt2], ids=["bert", "gpt2"])
@pytest.mark.parametrize("config", [PLAIN, TRIO], ids=["plain", "trio"])
@pytest.mark.filterwarnings("ignore::private_llm.errors.NeedsDistillation")
def test_private_is_plaintext_with_the_same_functions(name: str, make: Make, config: PrivateConfig) -> None:
    model = make()
    with emulated(name, model):
        wanted = logits(model)
    own = logits(model)
    with patch(model, replace(config, approximations=name, plugins=("rivals",))) as private:
        found = logits(private)
    spread = float(own.std())
    assert float((found - wanted).abs().max()) <= 5e-3 * spread
    # These functions are not GELU and softmax: a comparison with the model's own outputs would not pass.
    assert float((wanted - own).abs().max()) >= 2e-2 * spread
    assert torch.equal(logits(model), own)


@named
def test_what_a_user_is_told(name: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with patch(bert(), replace(PLAIN, approximations=name, plugins=("rivals",))):
            pass
    about = [str(w.message) for w in told if w.category is NeedsDistillation]
    if name == "puma":
        assert not about
    else:
        assert len(about) == 1
        assert "distilled" in about[0]
        assert name in about[0]


def test_own_functions_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NeedsDistillation)
        with patch(bert(), PLAIN) as private:
            assert float((logits(private) - logits(bert())).abs().max()) <= 5e-3


@named
def test_every_module_agrees(name: str) -> None:
    rows = compare(bert(), IDS, replace(PLAIN, approximations=name, plugins=("rivals",))).modules
    assert len(rows) > 20
    assert all(row.error_max <= 2e-3 * max(row.largest, 1.0) for row in rows)


@named
def test_emulation_of_operations(name: str) -> None:
    x = torch.randn(2, 4, 5, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gelu, softmax = formulas.gelu(name), formulas.softmax(name)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    scores = (x @ x[:, :2].repeat_interleave(2, 1).mT / 6**0.5).masked_fill(~seen, -torch.inf)
    mixed = softmax(scores) @ x[:, :2].repeat_interleave(2, 1)
    with emulated(name):
        assert torch.equal(F.gelu(x, approximate="tanh"), gelu(x))
        assert torch.equal(x.softmax(-1), softmax(x))
        assert torch.equal(torch.softmax(x, 1), softmax(x.movedim(1, -1)).movedim(-1, 1))
        assert F.softmax(x.float(), dim=-1, dtype=torch.float64).dtype == torch.float64
        fused = F.scaled_dot_product_attention
        for mask in (seen, torch.zeros(5, 5).double().masked_fill(~seen, torch.finfo(torch.float32).min)):
            assert torch.allclose(fused(x, x[:, :2], x[:, :2], attn_mask=mask, enable_gqa=True), mixed)
        assert torch.allclose(fused(x, x[:, :2], x[:, :2], is_causal=True, enable_gqa=True), mixed)


def test_the_emulation_ends_and_leaves_nothing_behind() -> None:
    model = gpt2()
    before = logits(model)
    with pytest.raises(ZeroDivisionError), emulated("mpcformer", model):
        _ = 1 // 0
    assert torch.equal(logits(model), before)
    with emulated("ours", model):
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["mpcformer", "secformer"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore::private_llm.errors.NeedsDistillation")
def test_rows_that_do_not_sum_to_one_are_withheld(name: str, padded: bool) -> None:
    """Scores of hundreds leave the range of means whose reciprocal 2Quad takes; the mask makes rows ragged."""
    model = bert()
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            layer.attention.self.query.weight *= 30
    with (
        patch(model, replace(PLAIN, approximations=name, plugins=("rivals",))) as private,
        pytest.raises(DomainError, match="left its range"),
    ):
        logits(private, MASK if padded else torch.ones_like(MASK))
