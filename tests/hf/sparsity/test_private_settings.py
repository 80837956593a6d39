"""What goes with predicted neurons and heads, what does not, and what no call leaves behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from private_llm_hf import GeneratePlan, patch
from private_llm_hf.models import sparse_blocks
from private_llm_hf.party import model as party_model
from private_llm_hf.sparsity.predictor_run import predicted_only
from private_llm_hf.sparsity.predictor_set import PredictorSet, SitePredictor, fingerprint
from private_llm_hf.sparsity.sites import find_sites
from torch import Tensor

import private_llm.nn.predicted as predicted
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PrivateLLMError
from private_llm.sparsity_config import CometConfig
from tests.hf.compare import LOGIT_ERROR
from tests.hf.sparsity.models import batch, sparse
from tests.hf.sparsity.test_apply import constant
from tests.hf.sparsity.test_private import PLAIN, answer, close, run, saved


@pytest.mark.parametrize(
    "settings",
    [
        {"parallel_sessions": 2, "rotate_roles": True},
        {"protocol": "dealer", "matmul": "remask"},
        {"truncation": "exact"},
    ],
    ids=["sessions", "remask", "exact"],
)
def test_other_settings_go_with_it(settings: dict[str, Any], tmp_path: Path) -> None:
    model = sparse("llama")
    folder = saved(model, "llama", tmp_path, "ffn heads")
    with predicted_only(model, PredictorSet.from_pretrained(folder)):
        want = answer(model, "llama")
    config = CometConfig(folder, orders="kept", neuron_budget=0.95, head_budget=0.5)
    close(run(model, "llama", config, **settings)[0], want)


def test_what_does_not_go_with_it_is_said(tmp_path: Path) -> None:
    model = sparse("opt")
    config = CometConfig(saved(model, "opt", tmp_path), orders="kept", neuron_budget=0.5)
    disk = {"device_map": "auto", "max_memory": {"cpu": "30KB"}, "offload_folder": str(tmp_path)}
    with pytest.raises(PrivateLLMError, match="on disk, but listed neurons are read from memory"):
        run(model, "opt", config, protocol="trio", **disk)
    with patch(model, PrivateConfig(sparsity=config)) as private:
        with pytest.raises(ConfigError, match="cannot run ahead"):
            private.preprocess(GeneratePlan(prompt=5, new_tokens=2))
        assert private.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=2).shape == (1, 7)


@pytest.mark.full
@pytest.mark.parametrize("name", ["opt", "t5"])
def test_an_order_serves_as_many_positions_as_was_said(name: str, tmp_path: Path) -> None:
    """T5: nine of the encoder and five of the decoder, in two rows."""
    model = sparse(name)
    settings = {"orders": "kept", "levels": "open", "positions": 2 * 14}
    config = PrivateConfig(**PLAIN, sparsity=CometConfig(saved(model, name, tmp_path), **settings))
    with patch(model, config) as private:
        private(**batch(name))
        assert private.parties.opened_positions == (18 if name == "opt" else 28)
        with pytest.raises(ConfigError, match=r"positions=28 were computed.* share it anew"):
            private(**batch(name))
    with patch(model, config) as private:
        private(**batch(name))


def test_nothing_of_a_call_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns, queries and chosen neurons of each block are as large as the prompt is long."""
    model, blocks = sparse("llama"), []
    for kind in (predicted.SparseFeedForward, predicted.SparseHeads):

        class Watched(kind):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                blocks.append(self)

        monkeypatch.setattr(sparse_blocks, kind.__name__, Watched)
    config = CometConfig(
        saved(model, "llama", tmp_path, "ffn heads"), orders="kept", neuron_budget=0.9, head_budget=0.5
    )
    run(model, "llama", config)
    assert len(blocks) == 4
    for block in blocks:
        held = [*vars(block).values(), *vars(block._pieces).values()]
        flat = [each for value in held for each in (value if isinstance(value, list | tuple) else [value])]
        assert not [each for each in flat if isinstance(each, Tensor) and each.numel()]


def test_the_threshold_is_the_predictors_own(tmp_path: Path) -> None:
    """It is no public fact: the owner takes it off the bias."""
    model, found = sparse("opt"), []
    for site in find_sites(model, batch("opt"), ("ffn",)):
        predictor = constant(site, list(range(40)))
        with torch.no_grad():
            predictor.fc2.bias[20:60] = 3.0
        found.append(SitePredictor(site, predictor.with_config(replace(predictor.config, threshold=2.0))))
    predictors = PredictorSet(fingerprint(model), found)
    predictors.save_pretrained(tmp_path)
    with predicted_only(model, predictors):
        want = answer(model, "opt")
    close(run(model, "opt", CometConfig(str(tmp_path), orders="kept", levels="open"))[0], want)
    assert float((want - answer(model, "opt")).abs().max()) > 10 * LOGIT_ERROR


def test_a_text_never_gets_the_neurons_that_an_earlier_one_opened(tmp_path: Path) -> None:
    """One text until its steps would repeat as programs, then others of its length."""
    model = sparse("opt")
    config = PrivateConfig(sparsity=CometConfig(saved(model, "opt", tmp_path), orders="kept", levels="open"))
    texts = [torch.randint(3, 60, (1, 6), generator=torch.Generator().manual_seed(seed)) for seed in range(12)]
    with patch(model, config) as private, torch.no_grad():
        for ids in [texts[0]] * 4 + texts:
            close(private(input_ids=ids)[0], model(input_ids=ids)[0])


def test_blocks_of_predicted_neurons_are_no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they write depends on what was opened, which is no input of theirs."""
    asked: list[str] = []
    monkeypatch.setattr(party_model, "repeated", lambda forward, name, *rest: asked.append(name) or forward)
    model = sparse("opt")
    run(model, "opt", CometConfig(saved(model, "opt", tmp_path), neuron_budget=0.95))
    assert {name.rpartition(".")[2] for name in asked} == {"q_proj+k_proj+v_proj"}, "products of inputs and weights"
    run(model, "opt", None)
    assert any(name.endswith("fc2") for name in asked)
