"""Rounded rows: the right candidate stays the nearest down to a few bits."""

from __future__ import annotations

import pytest
import torch
from attack_figures import FORMATS, rounded
from attacks.attacked import RowsAt
from attacks.row_matching import flat
from attacks.vocab_matching import match_states
from transformers import LlamaConfig, LlamaForCausalLM

from private_llm.errors import DomainError

V, TEXT = 300, [7, 250, 31, 31, 128]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, initializer_range=0.1, **sizes)).eval()


def found(attacked: RowsAt, rows: torch.Tensor) -> list[int]:
    seen = dict(enumerate(rows))
    return list(match_states(seen, lambda text, tails: flat(attacked.rows(text, tails)), torch.arange(V), V).tokens)


@pytest.mark.parametrize("form", FORMATS[:-2])
@pytest.mark.parametrize("layer", [1, 2])
def test_the_nearest_candidate_still_wins(model: LlamaForCausalLM, form: str, layer: int) -> None:
    attacked = RowsAt(model, layer)
    assert found(attacked, rounded(flat(attacked.of(torch.tensor(TEXT))), form)) == TEXT


def test_a_model_of_short_numbers_is_attacked_as_well(model: LlamaForCausalLM) -> None:
    """What a node computes with bfloat16 weights, matched with the same weights in float32 arithmetic."""
    attacked = RowsAt(model.to(torch.bfloat16), 2)
    assert found(attacked, rounded(flat(attacked.of(torch.tensor(TEXT))), "bfloat16")) == TEXT


def test_rounding_is_that_of_the_format() -> None:
    rows = torch.tensor([[1.0, -0.6, 0.1], [0.0, 0.0, 0.0]])
    assert rounded(rows, "2 bits").tolist() == [[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]]
    assert torch.equal(rounded(rows, "float16"), rows.half().float())
    with pytest.raises(DomainError, match="number format: got '5 bits'"):
        rounded(rows, "5 bits")
