"""Private runs that compute foretold neurons and heads only, against the plaintext model that does the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from private_llm_hf import GeneratePlan, patch
from private_llm_hf.models import sparse_blocks
from private_llm_hf.sparsity.apply import predicted_only
from private_llm_hf.sparsity.predictor_set import PredictorSet, SitePredictor, fingerprint
from private_llm_hf.sparsity.sites import find_sites
from torch import Tensor
from transformers import PreTrainedModel

import private_llm.nn.predicted as predicted
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PatchMismatch, PrivateLLMError
from private_llm.sparsity_config import CometConfig
from tests.hf.compare import LOGIT_ERROR
from tests.hf.tiny import build
from tests.sparsity.models import RELU, batch, sparse
from tests.sparsity.test_apply import constant, exact

PLAIN = {"protocol": "plain", "insecure": True}
ORDERED = ("opt", "llama", "bert", "vit")
"""Models whose heads can be put in a secret order."""


def saved(model: PreTrainedModel, name: str, folder: Path, kinds: str = "ffn", heads: tuple[int, ...] = (0, 3)) -> str:
    """Predictors that are right for neurons, and that always foretell these heads."""
    found = []
    for site in find_sites(model, batch(name)):
        if site.kind == "ffn" and "ffn" in kinds:
            found.append(SitePredictor(site, exact(model, site)))
        elif site.kind == "heads" and "heads" in kinds:
            found.append(SitePredictor(site, constant(site, list(heads))))
    PredictorSet(fingerprint(model), found).save_pretrained(folder)
    return str(folder)


def run(model: PreTrainedModel, name: str, sparsity: CometConfig | None, **settings: Any) -> tuple[Tensor, int]:
    """The answer, and bytes over all links."""
    config = PrivateConfig(**(settings or PLAIN), sparsity=sparsity)
    with patch(model, config) as private:
        return private(**batch(name))[0], private.cost().bytes_total


def answer(model: PreTrainedModel, name: str) -> Tensor:
    with torch.no_grad():
        return model(**batch(name))[0]


def close(private: Tensor, plain: Tensor) -> None:
    assert float((private - plain).abs().max()) < LOGIT_ERROR


@pytest.mark.parametrize("name", RELU)
@pytest.mark.parametrize("settings", [{"orders": "kept", "levels": "open"}, {"orders": "kept", "neuron_budget": 0.95},
                                      {"neuron_budget": 0.95}, {"levels": "noisy", "epsilon": 0.5}],
                         ids=["open", "budget", "fresh", "noisy"])  # fmt: skip
def test_right_predictions_change_nothing(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = sparse(name)
    config = CometConfig(saved(model, name, tmp_path), **settings)
    close(run(model, name, config)[0], answer(model, name))


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("levels", ["open", "budget"])
def test_heads_that_are_not_foretold_are_left_out(name: str, levels: Any, tmp_path: Path) -> None:
    model = sparse(name)
    folder = saved(model, name, tmp_path, "ffn heads")
    budgets = {"neuron_budget": 1.0, "head_budget": 0.5} if levels == "budget" else {}
    with predicted_only(model, PredictorSet.from_pretrained(folder)):
        want = answer(model, name)
    config = CometConfig(folder, orders="kept", levels=levels, **budgets)
    close(run(model, name, config)[0], want)
    assert float((want - answer(model, name)).abs().max()) > 10 * LOGIT_ERROR


@pytest.mark.parametrize("protocol", ["trio", "dealer", "quad"])
@pytest.mark.parametrize("orders", ["kept", "fresh"])
def test_protocols_agree(protocol: str, orders: Any, tmp_path: Path) -> None:
    model = sparse("opt")
    folder = saved(model, "opt", tmp_path, "ffn heads" if orders == "kept" else "ffn")
    with predicted_only(model, PredictorSet.from_pretrained(folder)):
        want = answer(model, "opt")
    config = CometConfig(folder, orders=orders, neuron_budget=0.95, head_budget=0.5)
    close(run(model, "opt", config, protocol=protocol)[0], want)


def test_generate_agrees_token_for_token(tmp_path: Path) -> None:
    """With a cache: keys and values of heads that were left out are there when later tokens want them."""
    model = sparse("llama")
    folder = saved(model, "llama", tmp_path, "ffn heads", (1, 2))
    asked = {**batch("llama"), "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with predicted_only(model, PredictorSet.from_pretrained(folder)):
        want = model.generate(**asked)
    config = PrivateConfig(sparsity=CometConfig(folder, orders="kept", neuron_budget=0.9, head_budget=0.5))
    with patch(model, config) as private:
        assert torch.equal(private.generate(**asked), want)


def test_less_is_sent(tmp_path: Path) -> None:
    """Two of four heads, with the neurons of two blocks: scores, softmax, queries, FC1 and ReLU shrink."""
    model = sparse("opt")
    found = []
    for site in find_sites(model, batch("opt")):
        found.append(SitePredictor(site, constant(site, [0, 1], block=12 if site.kind == "ffn" else 1)))
    PredictorSet(fingerprint(model), found).save_pretrained(tmp_path)
    config = CometConfig(str(tmp_path), orders="kept", neuron_budget=0.25, head_budget=0.5)
    _, whole = run(model, "opt", None, protocol="trio")
    _, less = run(model, "opt", config, protocol="trio")
    assert less < 0.85 * whole


class Openings:
    """Notes what is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Tensor] = []
        original = predicted.opened_units

        def noted(*args: Any) -> Tensor:
            found = original(*args)
            self.seen.append(found)
            return found

        monkeypatch.setattr(predicted, "opened_units", noted)


def test_units_are_opened_in_an_order_that_each_sharing_draws_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sparse("opt")
    config = CometConfig(saved(model, "opt", tmp_path), orders="kept", levels="open")
    active: list[Tensor] = []
    hook = model.model.decoder.layers[0].fc2.register_forward_pre_hook(lambda _, given: active.append(given[0] > 0))
    answer(model, "opt")
    hook.remove()
    openings = Openings(monkeypatch)
    for _ in range(2):
        run(model, "opt", config)
    one, other = openings.seen[0], openings.seen[2]
    true = active[0].reshape(one.shape)
    assert one.sum().sub(true.sum()).abs() <= 2  # scores next to zero may count either way
    for seen, against in ((one, true), (other, true), (one, other)):
        assert not torch.equal(seen, against)
    assert sorted(one.sum(0).tolist()) == sorted(other.sum(0).tolist())


def test_budgets_are_kept_to_at_every_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sparse("opt")
    openings = Openings(monkeypatch)
    run(model, "opt", CometConfig(saved(model, "opt", tmp_path), orders="kept", neuron_budget=0.3))
    assert {int(count) for seen in openings.seen for count in seen.sum(1)} == {int(0.3 * 96)}


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_heads_that_cannot_be_reordered_are_refused(name: str, tmp_path: Path) -> None:
    """Fused projections, and a position bias for each head."""
    model = sparse(name)
    config = CometConfig(saved(model, name, tmp_path, "ffn heads"), orders="kept", levels="open")
    with pytest.raises(PatchMismatch, match=r"heads=False"):
        run(model, name, config)


def test_bad_wishes_are_named(tmp_path: Path) -> None:
    model = sparse("opt")
    folder = saved(model, "opt", tmp_path / "right")
    for config, message in (
        (CometConfig(str(tmp_path / "none")), "no predictors.json"),
        (CometConfig(folder), "has no budget; train with --budget-share"),
        (CometConfig(), "the model has no predictors"),
        (CometConfig(folder, neurons=False, orders="kept", levels="open"), "holds no predictors of heads"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(model, "opt", config)
    with pytest.raises(ConfigError, match="orders='kept' only"):
        CometConfig(folder, neurons=False)
    with pytest.raises(ConfigError, match="weights='public'"):
        PrivateConfig(weights="public", sparsity=CometConfig(folder, orders="kept"))
    with pytest.raises(ConfigError, match="other weights"):
        run(sparse("opt", seed=1), "opt", CometConfig(folder, neuron_budget=0.5))
    with pytest.raises(ConfigError, match="another model"):
        run(build("opt", ffn_dim=64), "opt", CometConfig(folder, neuron_budget=0.5))


@pytest.mark.parametrize(("change", "message"), [({"units": 0}, "sizes or names"), ({"budget": 999}, "sizes or names"),
                                                 ({"readers": ["model.decoder"]}, "no block"), ({"kind": "x"}, "sizes"),
                                                 ({"more": 1}, "not as this version"), ({"width": 63}, "other sizes"),
                                                 ({"hidden": "gelu"}, "want 'linear' or 'relu'")])  # fmt: skip
def test_facts_from_another_endpoint_are_checked(change: dict[str, Any], message: str) -> None:
    model = build("opt")
    name = "model.decoder.layers.0.fc1"
    facts = {"name": name, "kind": "ffn", "width": 64, "units": 96, "block": 1, "rank": 4, "hidden": "linear",
             "budget": 9, "readers": [name], "writer": "model.decoder.layers.0.fc2",
             "activation": "model.decoder.layers.0.activation_fn"}  # fmt: skip
    model.config.private_sparsity = {"blocks": [facts]}
    sparse_blocks.attach_predictors(model)
    assert model.get_submodule(f"{name}_predictor").fc2.weight.is_meta
    other = build("opt")
    other.config.private_sparsity = {"blocks": [{**facts, **change}]}
    with pytest.raises(PatchMismatch, match=message):
        sparse_blocks.attach_predictors(other)


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
