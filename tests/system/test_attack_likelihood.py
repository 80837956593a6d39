"""Other texts are enough to name the next token from a row's total attention, also after a split."""

from __future__ import annotations

from importlib import resources

import pytest
import torch
from attacks.attacked import RowsAt
from attacks.likelihood import rank_next
from attacks.view import View, view_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from private_llm.errors import DomainError
from private_llm.token_sharding import ShardingPlan

TEXT = "The letter was written in the summer of the year before the war, and nobody had read it since."
CANDIDATES = 1024


@pytest.fixture(scope="module")
def seen() -> tuple[View, RowsAt, Tensor, Tensor]:
    """CompNode 2 of four behind one layer: rows 8 to 11, masked results; its own texts are the bundled ones."""
    folder = str(resources.files("private_llm_hf").joinpath("demo_model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = RowsAt(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), 1)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][0]
    bundled = resources.files("private_llm_hf").joinpath("data", "shakespeare.txt").read_text(encoding="utf-8")
    other = torch.tensor(tokenizer(bundled, add_special_tokens=False, verbose=False)["input_ids"][: 800 * 11])
    texts = torch.cat([ids[:1].expand(800, 1), other.view(800, 11)], 1)
    view = view_of(ShardingPlan(4, 4, 1, front=0), [2], model.call, model.layer, ids, model.of(ids))
    return view, model, ids, texts


@pytest.mark.parametrize("position", [1, 5])
def test_the_true_token_is_among_the_likeliest(seen: tuple[View, RowsAt, Tensor, Tensor], position: int) -> None:
    """By chance it would be in the middle; 7 or 3 unknown tokens follow it before the first row."""
    view, model, ids, texts = seen
    vocabulary = torch.tensor(sorted({*ids.tolist(), *range(4096 - CANDIDATES, 4096)}))
    ranked = rank_next(view, model, ids[:position].tolist(), vocabulary, texts)
    assert sorted(ranked.tolist()) == vocabulary.tolist()
    assert int(ids[position]) in ranked[:5].tolist()


def test_what_the_node_sees_matters(seen: tuple[View, RowsAt, Tensor, Tensor]) -> None:
    """The same ranking against the results of another text does not name this one's token."""
    view, model, ids, texts = seen
    changed = ids.clone()
    changed[1:8] = torch.tensor([900, 901, 902, 903, 904, 905, 906])
    other = view_of(view.plan, [2], model.call, model.layer, changed, model.of(changed))
    vocabulary = torch.tensor(sorted({*ids.tolist(), *changed.tolist(), *range(4000, 4096)}))
    assert int(rank_next(other, model, ids[:1].tolist(), vocabulary, texts)[0]) != int(ids[1])


def test_the_last_unknown_token_is_found_for_certain(seen: tuple[View, RowsAt, Tensor, Tensor]) -> None:
    view, model, ids, texts = seen
    vocabulary = torch.tensor(sorted({*ids.tolist(), *range(4096 - CANDIDATES, 4096)}))
    assert int(rank_next(view, model, ids[:7].tolist(), vocabulary, texts)[0]) == int(ids[7])


def test_rows_must_speak_of_the_position(seen: tuple[View, RowsAt, Tensor, Tensor]) -> None:
    view, model, ids, texts = seen
    with pytest.raises(DomainError, match=r"rows \(none\) speak of it"):
        rank_next(view, model, [*ids[:25].tolist(), 5], torch.arange(9), texts)
    with pytest.raises(DomainError, match="want one of a row up to 5"):
        rank_next(view, model, ids[:1].tolist(), torch.arange(9), texts[:, :5])
