"""What is estimated for a sparsity is what a run with predictors of that budget sends: every byte, every round."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from private_llm_cli.app import app
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.client.costs import Costs
from private_llm_hf.models.sparse_blocks import sparse_blocks
from private_llm_hf.sparsity.predictor import Measures, Predictor
from private_llm_hf.sparsity.predictor_set import PredictorSet, SitePredictor, fingerprint
from private_llm_hf.sparsity.price import PlannedSparsity, sparsity_price
from private_llm_hf.sparsity.settings import PredictorConfig
from private_llm_hf.sparsity.sites import Site, find_sites
from private_llm_hf.tools.estimate import Estimate, estimate
from transformers import PreTrainedModel
from typer.testing import CliRunner

from private_llm.errors import ConfigError
from private_llm.oblivious.budget import _supposed
from private_llm.oblivious.sparse_products import components
from private_llm.sparsity_config import CometConfig
from tests.hf.sparsity.models import RELU, batch, sparse

RANK, HEADS_RANK = 5, 3


def predictor(site: Site, active: int, block: int = 1) -> Predictor:
    """Predicts that many units, whatever it reads."""
    rank = RANK if site.kind == "ffn" else HEADS_RANK
    units = site.units // block
    config = PredictorConfig(rank=rank, kind=site.kind, block=block, budget=(active + 0.5) / units)
    made = Predictor(site.width, site.units, config)
    with torch.no_grad():
        made.fc2.weight.zero_()
        made.fc2.bias.fill_(-1.0)
        made.fc2.bias[:active] = 1.0
    assert made.most == active
    return made


def saved(model: PreTrainedModel, name: str, planned: PlannedSparsity, folder: Path) -> str:
    """A folder of predictors that leave out what is planned."""
    members = []
    for site in find_sites(model, batch(name), planned.settings.kinds):  # type: ignore[arg-type]
        ffn = site.kind == "ffn"
        block = planned.block if ffn else 1
        units = site.units // block
        active = units - int(((planned.neurons if ffn else planned.heads) or 0) * units)
        members.append(SitePredictor(site, predictor(site, active, block)))
    PredictorSet(fingerprint(model), members).save_pretrained(folder)
    return str(folder)


def real(model: PreTrainedModel, config: PrivateConfig, new: int) -> Costs:
    ids = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(5))
    with patch(model, config) as private, torch.no_grad():
        mask = torch.ones_like(ids)
        if new:
            private.generation_config.eos_token_id = None
            private.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
        else:
            private(input_ids=ids, attention_mask=mask)
        return private.cost()


def sent(costs: Costs) -> list[dict[str, dict[object, int]]]:
    return [{"sent": dict(ledger.sent), "rounds": dict(ledger.rounds)} for ledger in costs.ledgers]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "planned", "settings", "new"),
    [
        ("opt", PlannedSparsity(0.75, 0.5, rank=RANK, heads_rank=HEADS_RANK), {}, 3),
        ("opt", PlannedSparsity(0.75, 0.5, rank=RANK, heads_rank=HEADS_RANK, levels="open"), {}, 2),
        ("opt", PlannedSparsity(0.5, None, block=4, rank=RANK), {"protocol": "quad"}, 2),
        ("llama", PlannedSparsity(0.75, 0.5, rank=RANK, heads_rank=HEADS_RANK), {"protocol": "dealer"}, 2),
        ("bert", PlannedSparsity(0.5, block=2, rank=RANK), {}, 0),
    ],
)
def test_estimate_equals_the_ledger(
    name: str, planned: PlannedSparsity, settings: dict[str, Any], new: int, tmp_path: Path
) -> None:
    config = PrivateConfig(timeout_s=60, calibrate=False, sparsity=planned.settings, **settings)
    model = sparse(name)
    shape, replaced = planned.applied(type(model), model.config)
    found = estimate(type(model), shape, config, sequence=7, new_tokens=new, batch=2)
    comet = dataclasses.replace(planned.settings, predictors=saved(model, name, planned, tmp_path))
    run = real(model, dataclasses.replace(config, sparsity=comet), new)
    assert replaced is None
    assert sent(found.costs) == sent(run)
    assert found.costs.bytes_total == run.bytes_total > 0


@pytest.mark.full
@pytest.mark.parametrize("name", [*RELU])
def test_layers_are_priced_once(name: str) -> None:
    model = sparse(name)
    heads = None if name in ("gpt2", "t5") else 0.5  # fused projections, and a position bias for each head
    planned = PlannedSparsity(0.5, heads, rank=RANK, heads_rank=HEADS_RANK)
    shape, _ = planned.applied(type(model), model.config)
    config = PrivateConfig(sparsity=planned.settings)
    new = 0 if name in ("bert", "vit") else 2
    once, each = (
        estimate(type(model), shape, config, sequence=6, new_tokens=new, every_layer=every) for every in (False, True)
    )
    assert ledgers(once) == ledgers(each)
    assert [layer.name for layer in once.layers()] == [layer.name for layer in each.layers()]


def ledgers(found: Estimate) -> list[tuple[object, ...]]:
    return [(dict(ledger.sent), dict(ledger.rounds), dict(ledger.macs)) for ledger in found.costs.ledgers]


def test_another_activation_counts_as_relu() -> None:
    model = sparse("llama")
    planned = PlannedSparsity(0.75, rank=RANK)
    relu, _ = planned.applied(type(model), model.config)
    model.config.hidden_act = "silu"
    made, replaced = planned.applied(type(model), model.config)
    assert replaced == "silu"
    assert made.hidden_act == "relu"
    assert model.config.hidden_act == "silu"
    assert sparse_blocks(made) == sparse_blocks(relu)
    assert {(block.units, block.budget) for block in sparse_blocks(made)} == {
        (block.units, block.units // 4) for block in sparse_blocks(relu)
    }


def test_heads_alone_leave_the_activation() -> None:
    model = sparse("llama")
    model.config.hidden_act = "silu"
    made, replaced = PlannedSparsity(heads=0.5, heads_rank=2).applied(type(model), model.config)
    assert (made.hidden_act, replaced) == ("silu", None)


def test_supposed_patterns_are_of_one_component_and_reach_all_units() -> None:
    pattern = _supposed(9, 40, 6)
    assert pattern.sum(1).tolist() == [6] * 9
    assert bool(pattern.any(0).all())
    assert len(components(pattern)) == 1
    assert bool(_supposed(3, 5, 5).all())


@pytest.mark.parametrize(
    "text",
    [
        "", "neurons", "neurons=nan", "neurons=1", "neurons=-0.1", "heads=x", "block=4", "neurons=0.5,neurons=0.5",
        "neurons=0.5,levels=none", "neurons=0.5,rank=0", "neurons=0.5,other=1", "neurons=0.5,block=1.5",
    ],
)  # fmt: skip
def test_bad_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"sparsity: .*want"):
        PlannedSparsity.parse(text)


def test_texts_are_read() -> None:
    found = PlannedSparsity.parse("neurons=0.9, heads=0.5,block=16,rank=64,heads-rank=8,levels=open")
    assert found == PlannedSparsity(0.9, 0.5, 16, 64, 8, "open")


def test_shapes_that_cannot_be_sparse_are_refused() -> None:
    model = sparse("gpt2")
    with pytest.raises(ConfigError, match="in one"):
        PlannedSparsity(heads=0.5, heads_rank=2).applied(type(model), model.config)
    with pytest.raises(ConfigError, match="does not divide"):
        PlannedSparsity(0.5, block=7, rank=2).applied(type(model), model.config)
    with pytest.raises(ConfigError, match="rank"):
        PlannedSparsity(0.5, rank=10_000).applied(type(model), model.config)


@pytest.mark.full
def test_the_command_says_what_it_supposes() -> None:
    words = ["estimate", "gpt2", "--seq", "4", "--gmacs", "10"]
    runner = CliRunner()
    dense = runner.invoke(app, [*words, "--json"])
    found = runner.invoke(app, [*words, "--json", "--sparsity", "neurons=0.9,block=16,rank=16"])
    assert (dense.exit_code, found.exit_code) == (0, 0), found.output
    before, facts = json.loads(dense.stdout), json.loads(found.stdout)
    assert (before["sparsity"], before["relu_instead_of"]) == (None, None)
    assert (facts["sparsity"], facts["relu_instead_of"]) == ("neurons=0.9,block=16,rank=16", "gelu_new")
    assert facts["bytes_total"] < before["bytes_total"]
    assert "ReLU in place of gelu_new" in " ".join(
        runner.invoke(app, [*words, "--sparsity", "neurons=0.9,block=16,rank=16"]).output.split()
    )


@pytest.mark.parametrize("more", [["--sparsity", "neurons=2"], ["--sparsity", "neurons=0.9", "--plans"]])
def test_the_command_refuses_what_it_cannot_count(more: list[str]) -> None:
    result = CliRunner().invoke(app, ["estimate", "opt-125m", *more])
    assert result.exit_code != 0
    assert "sparsity" in str(result.exception or result.output)


@pytest.mark.full
@pytest.mark.parametrize(
    "settings", [{}, {"orders": "kept"}, {"levels": "noisy", "epsilon": 0.5}], ids=["fresh", "kept", "noisy"]
)
def test_the_price_before_a_run_is_what_it_sends(settings: dict[str, Any], tmp_path: Path) -> None:
    """With predictors, in the orders that they were shared for, and without."""
    model = sparse("opt")
    folder = saved(model, "opt", PlannedSparsity(0.5, rank=RANK), tmp_path)
    config = PrivateConfig(sparsity=CometConfig(folder, heads=False, **settings))
    ids = torch.randint(3, 100, (2, 7), generator=torch.Generator().manual_seed(5))
    sent = []
    for each in (config, dataclasses.replace(config, sparsity=None)):
        with patch(model, each) as private:
            private.generation_config.eos_token_id = None
            if each is config:
                price = sparsity_price(private, 7, 2, batch=2)
            private.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
            sent.append(private.cost().bytes_total)
    assert price.dense_bytes == sent[1]
    assert price.pays == (price.sparse_bytes < sent[1])
    if "levels" in settings:  # how many are active, and the noise, are not known before
        assert price.most
        assert 0.5 < price.sparse_bytes / sent[0] < 2
    else:
        assert (price.sparse_bytes, price.most) == (sent[0], False)


@pytest.mark.full
def test_the_price_counts_units_that_were_predicted(tmp_path: Path) -> None:
    """Not those that were active: a predictor that says more than there are opens more."""
    model = sparse("opt")
    planned = PlannedSparsity(0.5, rank=RANK)
    predictors = PredictorSet.from_pretrained(saved(model, "opt", planned, tmp_path / "plain"))
    for predicted, activity in ((0.5, 0.1), (0.1, 0.5)):
        seen = {"test": Measures(rows=1, recall=1.0, precision=1.0, activity=activity, predicted=predicted, most=1)}
        members = [dataclasses.replace(member, measures=seen) for member in predictors]
        folder = tmp_path / str(predicted)
        PredictorSet(predictors.model, members).save_pretrained(folder)
        comet = CometConfig(str(folder), heads=False, levels="open", orders="kept")
        with patch(model, PrivateConfig(calibrate=False, sparsity=comet)) as private:
            found = sparsity_price(private, 7, 2, batch=2).sparse_bytes
        open_units = dataclasses.replace(planned, neurons=1 - predicted, levels="open")
        shape, _ = open_units.applied(type(model), model.config)
        config = PrivateConfig(calibrate=False, sparsity=dataclasses.replace(comet, predictors=None))
        wanted = estimate(type(model), shape, config, sequence=7, new_tokens=2, batch=2)
        assert found == wanted.costs.bytes_total
