"""The attacks on the bundled model: they win where the theory says so, one by one and together."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import pytest
import torch
from attacks.attacked import RowsAt, likely_tokens
from attacks.collusion import Loot, bounds, collude
from attacks.row_matching import ALIKE, flat, match_rows
from attacks.row_space import read_from_front
from attacks.view import View, view_of
from attacks.vocab_matching import Recovered, cost_bound, match_permuted, match_states
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from private_llm.errors import DomainError
from private_llm.token_sharding import ShardingPlan

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
def first(model: PreTrainedModel) -> RowsAt:
    return RowsAt(model, 0)


@pytest.fixture(scope="module")
def second(model: PreTrainedModel) -> RowsAt:
    return RowsAt(model, 1)


EVERYTHING = torch.arange(4096)


def likely(ids: Tensor, count: int) -> Tensor:
    """An attacker's prior: `count` tokens, the true ones among them."""
    others = [t for t in range(3, 4096) if t not in ids.tolist()]
    return torch.tensor(sorted({*ids.tolist(), *others[: count - len(set(ids.tolist()))]}))


def seen(plan: ShardingPlan, nodes: Sequence[int], ids: Tensor, *models: RowsAt) -> list[tuple[View, RowsAt]]:
    return [(view_of(plan, nodes, m.call, m.layer, ids, m.of(ids)), m) for m in models]


def right(loot: Loot, ids: Tensor) -> list[int]:
    """Positions that were found; a wrong token fails the test."""
    assert all(int(ids[p]) == token for p, token in loot.tokens.items())
    return sorted(loot.tokens)


def states(model: RowsAt, rows: Tensor, positions: Sequence[int], vocabulary: Tensor, budget: int) -> Recovered:
    return match_states(
        {p: rows[p] for p in positions}, lambda text, tails: flat(model.rows(text, tails)), vocabulary, budget
    )


# -- vocab-matching ------------------------------------------------------------------------------------------------
def test_all_states_give_the_text_away(second: RowsAt, ids: Tensor) -> None:
    """The vanilla attack over the whole vocabulary: V candidates a token."""
    found = states(second, flat(second.of(ids)), range(5), EVERYTHING, 4096)
    assert list(found.tokens) == ids[:5].tolist()
    assert found.candidates == 5 * 4096 == cost_bound(range(5), 4096)
    assert max(found.distances) < 1e-2


@pytest.mark.parametrize("layer", [1, 3])
def test_permuted_states_give_the_text_away(model: PreTrainedModel, ids: Tensor, layer: int) -> None:
    attacked = RowsAt(model, layer)
    rows = flat(attacked.of(ids))[torch.tensor([3, 0, 1, 2])]
    found = match_permuted(rows, lambda text, tails: flat(attacked.rows(text, tails)), EVERYTHING)
    assert list(found.tokens) == ids[:4].tolist()


def test_gaps_are_searched_and_known_tokens_save_candidates(second: RowsAt, ids: Tensor) -> None:
    """Every second state: V^2 a gap; with the tokens of the seen positions known, V."""
    prior, rows = likely(ids, 40), flat(second.of(ids))
    found = states(second, rows, [1, 3, 5], prior, 40**2)
    assert (list(found.tokens), found.candidates) == (ids[:6].tolist(), 3 * 40**2)
    known = {p: int(ids[p]) for p in (1, 3, 5)}
    again = match_states(
        {p: rows[p] for p in known}, lambda text, tails: flat(second.rows(text, tails)), prior, 40, known
    )
    assert (
        (list(again.tokens), again.candidates)
        == (ids[:6].tolist(), 3 * 40)
        == (again.tokens and ids[:6].tolist(), cost_bound(list(known), 40, list(known)))
    )


def test_a_gap_beyond_the_budget_stops_the_attack(second: RowsAt, ids: Tensor) -> None:
    rows = flat(second.of(ids))
    found = states(second, rows, [0, 1, 4, 5], likely(ids, 40), 40**2)
    assert (list(found.tokens), found.stopped_at) == (ids[:2].tolist(), 4)


def test_a_prior_without_the_token_is_noticed(second: RowsAt, ids: Tensor) -> None:
    prior = torch.tensor([t for t in range(300) if t != int(ids[1])] + [int(ids[0])])
    found = match_states(
        dict(enumerate(flat(second.of(ids))[:3])), lambda text, tails: flat(second.rows(text, tails)), prior, 4096,
        alike=ALIKE,
    )  # fmt: skip
    assert (list(found.tokens), found.stopped_at) == (ids[:1].tolist(), 1)


# -- what nodes hold -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_an_attn_node_s_rows_are_its_tokens(first: RowsAt, ids: Tensor, wire: str) -> None:
    plan = ShardingPlan.from_dict({"alpha": 3, "c": 2, "m": 1, "wire": wire, "partials": "open"})
    node = plan.attn_endpoint(0, 2)
    ((view, _),) = seen(plan, [node], ids[:12], first)
    assert not view.tokens
    assert match_rows(view.rows, first, EVERYTHING) == {p: int(ids[p]) for p in plan.held(node, 12)}


def test_known_tokens_leave_smaller_gaps_to_an_attn_node(first: RowsAt, second: RowsAt, ids: Tensor) -> None:
    """Shards 0 and 2 of single positions out of 3: one unknown token between, V candidates and not V^2."""
    plan = ShardingPlan(3, 1, 1, accept_weak_plan=True, partials="open")
    loot = collude(seen(plan, [plan.attn_endpoint(0, 2)], ids[:7], first, second), EVERYTHING, 4096)
    assert right(loot, ids) == list(range(7))
    assert loot.how[1] == "states"


# -- Theorem 6.2 and linear algebra --------------------------------------------------------------------------------
def test_blocks_of_two_fall_to_pairs(first: RowsAt, ids: Tensor) -> None:
    """Theorem 6.2 over the whole vocabulary: V^2 candidates for two tokens."""
    plan = ShardingPlan(2, 2, 1, accept_weak_plan=True, partials="open")
    loot = collude(seen(plan, [1], ids[:4], first), EVERYTHING, 4096**2, ["results"])
    assert right(loot, ids) == [0, 1, 2, 3]
    assert loot.candidates == {"results": 4096**2}


@pytest.mark.parametrize("wire", ["float32", "float16"])
def test_linear_algebra_reads_any_block(first: RowsAt, ids: Tensor, wire: str) -> None:
    """Blocks of four tokens are far beyond V^2 candidates, and are read with 4 V."""
    plan = ShardingPlan.from_dict({"alpha": 3, "c": 4, "m": 1, "rho": 3, "wire": wire, "partials": "open"})
    view = seen(plan, [1], ids[:20], first)
    assert right(collude(view, EVERYTHING, 4096**2, ["results"]), ids) == [4, 5, 6, 7, 16, 17, 18, 19]
    loot = collude(view, EVERYTHING, 0, ["algebra"])
    assert right(loot, ids) == list(range(20))
    assert loot.candidates == {"algebra": 12 * 4096}


def test_linear_algebra_needs_as_many_rows_as_unknown_tokens(first: RowsAt, ids: Tensor) -> None:
    """One row of CompNode 1 against four tokens: nothing; four rows: all."""
    plan = ShardingPlan(3, 4, 1, accept_weak_plan=True, partials="open")
    for rows, expected in ((1, [4]), (3, [4, 5, 6]), (4, list(range(8)))):
        loot = collude(seen(plan, [1], ids[: 4 + rows], first), EVERYTHING, 0, ["algebra"])
        assert right(loot, ids) == expected


def test_layers_under_mpc_do_not_stop_the_algebra_of_a_causal_model(model: PreTrainedModel, ids: Tensor) -> None:
    """A CompNode after a split sees states of layer 2 only: it reads the text from the front, V candidates a token."""
    attacked = RowsAt(model, 2)
    plan = ShardingPlan(3, 3, 1, accept_weak_plan=True, partials="open")
    ((view, _),) = seen(plan, [1], ids[:6], attacked)
    assert not view.tokens
    found, tried = read_from_front(view, attacked, [], EVERYTHING)
    assert (found, tried) == (ids[:6].tolist(), 6 * 4096)  # its own tokens, too: nobody told it


def test_behind_a_split_the_first_cluster_is_found_by_its_states(second: RowsAt, ids: Tensor) -> None:
    """CompNode 0 knows no token, but its first rows depend on its own tokens alone: V candidates each."""
    plan = ShardingPlan(3, 3, 1, partials="open")
    for node, expected in ((0, [0, 1, 2]), (1, [])):
        loot = collude(seen(plan, [node], ids[:14], second), EVERYTHING, 4096, ["states"])
        assert right(loot, ids) == expected


# -- together ------------------------------------------------------------------------------------------------------
def test_colluding_nodes_put_all_together(first: RowsAt, second: RowsAt, ids: Tensor) -> None:
    """CompNode 0 and an AttnNode of two foreign shards: rows of one make gaps of the other small."""
    plan = ShardingPlan(4, 1, 1, accept_weak_plan=True, partials="open")
    loot = collude(seen(plan, [0, plan.attn_endpoint(1, 2)], ids[:9], first, second), EVERYTHING, 4096)
    assert right(loot, ids) == list(range(9))
    assert {loot.how[p] for p in (0, 4, 8)} == {"held"}
    assert {loot.how[p] for p in (1, 2, 5, 6)} == {"rows"}
    assert {loot.how[p] for p in (3, 7)} == {"results"}


def test_bounds_are_what_the_attacks_try(first: RowsAt, second: RowsAt, ids: Tensor) -> None:
    plan, prior = ShardingPlan(2, 2, 1, accept_weak_plan=True, partials="open"), likely(ids, 60)
    for nodes in ([1], [0], [0, plan.attn_endpoint(0, 0)]):
        for name in ("results", "algebra"):
            loot = collude(seen(plan, nodes, ids[:8], first), prior, 60**2, [name])
            expected = bounds(plan, nodes, first.call, 8, 60, 0)[name]
            assert loot.candidates.get(name, 0) == sum(expected)
    loot = collude(seen(plan, [0], ids[:6], second), prior, 60, ["states"])
    made = bounds(plan, [0], second.call, 6, 60, 1)["states"]
    assert made == [60, 60, 60**3, 60]
    assert loot.candidates["states"] == 2 * 60


# -- priors and refusals -------------------------------------------------------------------------------------------
def test_the_model_s_own_guesses_are_a_prior(model: PreTrainedModel, ids: Tensor) -> None:
    few, many = (likely_tokens(model, count, texts=16, length=24).tolist() for count in (200, 2000))
    shares = [sum(int(t) in chosen for t in ids) / len(ids) for chosen in (few, many)]
    assert 0.3 < shares[0] < shares[1]
    assert set(few) < set(many)
    with pytest.raises(DomainError, match="want 1 to 4096"):
        likely_tokens(model, 5000)


def test_wrong_layers_are_refused(model: PreTrainedModel, second: RowsAt) -> None:
    with pytest.raises(DomainError, match="layer: got 6; want 0 to 5"):
        RowsAt(model, 6)
    with pytest.raises(DomainError, match="want layer 0"):
        second.alone(0, torch.tensor([1]))


def test_candidates_share_the_known_text(model: PreTrainedModel, ids: Tensor) -> None:
    """Rows behind a kept prefix are those of the whole text run at once, whatever was asked before."""
    attacked = RowsAt(model, 3)
    whole = flat(attacked.of(ids))
    for known, end in ((4, 6), (2, 5), (9, 10), (0, 3)):
        made = flat(attacked.rows(ids[:known].tolist(), ids[known:end].repeat(2, 1)))
        assert float((made - whole[end - 1]).abs().max()) < 1e-4
