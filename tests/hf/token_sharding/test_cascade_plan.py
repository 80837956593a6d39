"""The patch plan of token sharding says what runs at which kind of node and what that node sees; nothing is secret."""

from __future__ import annotations

import pytest
import torch
import transformers as tr
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.patch_plan import PatchPlan, make_patch_plan, unknown_modules

from private_llm.token_sharding import ShardingPlan
from tests.hf import tiny
from tests.hf.token_sharding.test_cascade import settings
from tests.hf.token_sharding.test_cascade_families import roberta

PLAN = ShardingPlan(3, 4, 2)
SPLIT = PrivateConfig(weights="public", plan=PLAN, split=1)


def rows(plan: PatchPlan) -> dict[str, tuple[str, str]]:
    return {row.name: (row.becomes, row.public) for row in plan.rows}


COMP = ("its own forward at CompNodes", "tokens, states of 1 in 3 rows")
ATTN = ("attention at 21 AttnNodes", "q, k, v of at most 2 in 6 shards")


@pytest.mark.parametrize("name", ["llama", "bloom", "falcon", "roberta"])
def test_every_module_runs_in_the_clear_at_nodes(name: str) -> None:
    model = tiny.build(name)
    plan = make_patch_plan(model, PrivateConfig(protocol="cascade", plan=PLAN))
    assert plan.total == sum(parameter.numel() for parameter in model.parameters())
    for row in plan.rows:
        assert (row.becomes, row.public) == (ATTN if "Attention" in row.kind else COMP)
    text = str(plan)
    assert "secret" not in text
    assert "shares" not in text
    assert "each node sees" in text
    assert text.splitlines()[-1].strip().endswith("public; statistical protection only, 24 nodes")


def test_nodes_need_no_rules() -> None:
    model = roberta(tr.XLMRobertaForMaskedLM)
    model.lm_head.layer_norm = torch.nn.PReLU()
    assert rows(make_patch_plan(model, PrivateConfig(protocol="cascade", plan=PLAN)))["lm_head"] == COMP
    assert "lm_head.layer_norm (PReLU)" in unknown_modules(model)


def test_behind_a_split_nodes_see_states() -> None:
    """OPT's final norm is registered before its layers and runs behind them; the embedding runs before the split."""
    plan = make_patch_plan(tiny.build("opt"), SPLIT)
    found, states = rows(plan), ("its own forward at CompNodes", "states of 1 in 3 rows")
    assert found["(model)"][0] == "its own forward on shares, then at CompNodes"
    assert found["model.decoder.embed_tokens"][0] == "lookup by index shares (tokens)"
    assert found["model.decoder.layers.0.fc1"][0] == "secret matrix product"
    assert found["model.decoder.layers.0"][0] == "its own forward on shares"
    assert found["model.decoder.layers.0.self_attn"][0] == "secret scores, softmax and cache"
    assert found["model.decoder.layers.1.self_attn"] == ATTN
    assert found["model.decoder.layers.1.fc1"] == states
    assert found["model.decoder.final_layer_norm"] == states
    assert found["lm_head"] == states
    assert (
        str(plan)
        .splitlines()[-1]
        .strip()
        .endswith("public; 'trio' up to layer 0, then statistical protection only, 24 nodes")
    )


def test_a_party_of_a_split_has_a_model_of_secret_layers() -> None:
    plan = make_patch_plan(tiny.build("opt", num_hidden_layers=1), SPLIT)
    assert "CompNodes" not in "".join(row.becomes for row in plan.rows)


def test_explain_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    with patch(tiny.build("gpt2"), settings()) as private:
        assert private.explain().heading == "each node sees"
    assert "attention at 6 AttnNodes" in capsys.readouterr().out
