"""The attacks on the bundled model: they win where the theory says so and lose on a plan that the audit calls sound."""

from __future__ import annotations

from importlib import resources

import pytest
import torch
from private_llm_hf.attacked import FirstRows, StatesAfter
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from private_llm.attacks.partial_results import View, match_results
from private_llm.attacks.scores import exact
from private_llm.attacks.vocab_matching import cost_bound, match_permuted, match_states
from private_llm.errors import DomainError
from private_llm.sharded.attention import attend
from private_llm.sharded.audit import audit
from private_llm.sharding import ShardingPlan

SENTENCE = "The letter was written in the summer of the year before the war, and nobody had read it since."


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    folder = str(resources.files("private_llm_hf").joinpath("demo_model"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    folder = str(resources.files("private_llm_hf").joinpath("demo_model"))
    found: Tensor = AutoTokenizer.from_pretrained(folder)(SENTENCE, return_tensors="pt")["input_ids"][0]
    return found


@pytest.fixture(scope="module")
def everything(model: PreTrainedModel) -> Tensor:
    return torch.arange(model.config.vocab_size)


def likely(ids: Tensor, count: int) -> Tensor:
    """An attacker's prior: `count` tokens, the true ones among them."""
    others = [t for t in range(3, 4096) if t not in ids.tolist()]
    return torch.tensor(sorted({*ids.tolist(), *others[: count - len(set(ids.tolist()))]}))


def test_all_states_give_the_text_away(model: PreTrainedModel, ids: Tensor, everything: Tensor) -> None:
    """The vanilla attack over the whole vocabulary: V candidates a token."""
    states = StatesAfter(model, 1)
    rows = states.of(ids[:5])
    found = match_states(dict(enumerate(rows)), states, everything, budget=5 * len(everything))
    assert list(found.tokens) == ids[:5].tolist()
    assert found.candidates == 5 * len(everything) == cost_bound(range(5), len(everything))
    assert max(found.distances) < 1e-2


@pytest.mark.parametrize("layer", [1, 3])
def test_permuted_states_give_the_text_away(
    model: PreTrainedModel, ids: Tensor, everything: Tensor, layer: int
) -> None:
    states = StatesAfter(model, layer)
    rows = states.of(ids[:4])
    shuffled = rows[torch.tensor([3, 0, 1, 2])]
    assert list(match_permuted(shuffled, states, everything).tokens) == ids[:4].tolist()


def test_a_plan_with_small_gaps_gives_the_text_away(model: PreTrainedModel, ids: Tensor) -> None:
    """Two CompNodes with clusters of one: every gap is V^2, here over 50 likely tokens."""
    plan, prior = ShardingPlan(2, 1, 1), likely(ids, 50)
    assert not audit(plan).sound
    states = StatesAfter(model, 1)
    rows = states.of(ids[:7])
    held = plan.held(0, 7)
    found = match_states({p: rows[p] for p in held}, states, prior, budget=4 * 50**2)
    assert list(found.tokens) == ids[:7].tolist()
    assert found.stopped_at is None


def test_a_sound_plan_stops_the_attack(model: PreTrainedModel, ids: Tensor) -> None:
    """CompNode 0 of the default plan knows its first cluster and gets no further; the others do not start."""
    plan, prior = ShardingPlan(), likely(ids, 200)
    assert audit(plan).sound
    states = StatesAfter(model, 1)
    rows = states.of(ids)
    budget = 200**plan.rho
    for node in range(plan.alpha):
        held = plan.held(node, len(ids))
        found = match_states({p: rows[p] for p in held}, states, prior, budget)
        assert set(range(len(found.tokens))) <= held
        assert exact(found.tokens, ids.tolist()) <= plan.c / len(ids)


# -- Theorem 6.2 ---------------------------------------------------------------------------------------------------
def view_of(model: PreTrainedModel, ids: Tensor, plan: ShardingPlan, node: int) -> tuple[View, FirstRows, float]:
    """What a CompNode sees of layer 0, computed from the definition."""
    rows = FirstRows(model)
    q, k, v = (t[0] for t in rows(ids.unsqueeze(0), torch.arange(len(ids)).unsqueeze(0)))
    scale = 1.0  # OPT scales its queries itself
    results = {}
    for row in plan.rows_of_comp(node, 0, len(ids)):
        for shard in range(plan.beta):
            keys = plan.rows_of_shard(shard, 0, row + 1)
            if keys:
                out, lse = attend(q[None, :, row : row + 1], k[None, :, keys], v[None, :, keys], None, scale)
                results[row, shard] = out[0, :, 0], lse[0, :, 0]
    held = plan.rows_of_comp(node, 0, len(ids))
    return View({p: int(ids[p]) for p in held}, {p: q[:, p] for p in held}, results), rows, scale


def test_partial_results_of_single_tokens_are_read_off(model: PreTrainedModel, ids: Tensor, everything: Tensor) -> None:
    """The paper's split into single positions (m = c): one node learns all text before its last row, V at a time."""
    plan = ShardingPlan(3, 2, 2)
    view, rows, scale = view_of(model, ids[:14], plan, 0)
    found = match_results(plan, view, rows.keys_values, scale, everything, budget=len(everything))
    assert [found.get(p) for p in range(14)] == ids[:14].tolist()


def test_blocks_of_rho_tokens_withstand_the_same_budget(
    model: PreTrainedModel, ids: Tensor, everything: Tensor
) -> None:
    plan = ShardingPlan(3, 3, 1)
    assert audit(plan).sound
    view, rows, scale = view_of(model, ids[:14], plan, 0)
    found = match_results(plan, view, rows.keys_values, scale, everything, budget=len(everything) ** 2)
    assert set(found) == set(view.tokens)


def test_blocks_of_two_fall_to_pairs(model: PreTrainedModel, ids: Tensor) -> None:
    """c / m = 2 against an attacker with a prior of 100 tokens and 100^2 candidates."""
    plan, prior = ShardingPlan(2, 2, 1), likely(ids, 100)
    view, rows, scale = view_of(model, ids[:6], plan, 0)
    found = match_results(plan, view, rows.keys_values, scale, prior, budget=100**2)
    assert [found.get(p) for p in range(6)] == ids[:6].tolist()


def test_wrong_layers_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(DomainError, match="layer: got 7; want 1 to 6"):
        StatesAfter(model, 7)
