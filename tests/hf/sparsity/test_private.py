"""Private runs that compute predicted neurons and heads only, against the plaintext model that does the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from private_llm_hf import patch
from private_llm_hf.checkpoint.model_spec import ModelSpec
from private_llm_hf.checkpoint.norm_readers import norms_read
from private_llm_hf.checkpoint.weights import WeightsDigest
from private_llm_hf.sparsity import sharing
from private_llm_hf.sparsity.predictor_run import predicted_only
from private_llm_hf.sparsity.predictor_set import PredictorSet, SitePredictor, fingerprint
from private_llm_hf.sparsity.sharing import SharedPredictors
from private_llm_hf.sparsity.sites import find_sites
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    OPTForCausalLM,
    PreTrainedModel,
)

import private_llm.nn.predicted as predicted
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, PatchMismatch, UnsupportedOp
from private_llm.sparsity_config import CometConfig
from tests.hf.compare import LOGIT_ERROR
from tests.hf.sparsity.models import RELU, batch, sparse
from tests.hf.sparsity.test_apply import constant, exact
from tests.hf.tiny import build

FAMILY = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1,
          "intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 32}  # fmt: skip
PLAIN = {"protocol": "plain", "insecure": True}
ORDERED = ("opt", "llama", "bert", "vit")
"""Models whose heads can be put in a secret order."""


def saved(model: PreTrainedModel, name: str, folder: Path, kinds: str = "ffn", heads: tuple[int, ...] = (0, 3)) -> str:
    """Predictors that are right for neurons, and that always predict these heads."""
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", RELU)
@pytest.mark.parametrize("settings", [{"orders": "kept", "levels": "open"}, {"orders": "kept", "neuron_budget": 0.95},
                                      {"neuron_budget": 0.95}, {"levels": "noisy", "epsilon": 0.5}],
                         ids=["open", "budget", "fresh", "noisy"])  # fmt: skip
def test_right_predictions_change_nothing(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = sparse(name)
    config = CometConfig(saved(model, name, tmp_path), **settings)
    close(run(model, name, config)[0], answer(model, name))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("levels", ["open", "budget"])
def test_heads_that_are_not_predicted_are_left_out(name: str, levels: Any, tmp_path: Path) -> None:
    model = sparse(name)
    folder = saved(model, name, tmp_path, "ffn heads")
    budgets = {"neuron_budget": 1.0, "head_budget": 0.5} if levels == "budget" else {}
    with predicted_only(model, PredictorSet.from_pretrained(folder)):
        want = answer(model, name)
    config = CometConfig(folder, orders="kept", levels=levels, **budgets)
    close(run(model, name, config)[0], want)
    assert float((want - answer(model, name)).abs().max()) > 10 * LOGIT_ERROR


@pytest.mark.sampled(3)
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
    """Two of four heads, with the neurons of two blocks: scores, softmax, queries, FC1 and ReLU shrink.

    Norms keep the weights that predictors read, which they lose otherwise (8 % of all that is sent here), and 18
    fractional bits; results at chosen places are whole, of which dense products send what is read alone (1 %).
    """
    model = sparse("opt")
    found = []
    for site in find_sites(model, batch("opt")):
        found.append(SitePredictor(site, constant(site, [0, 1], block=12 if site.kind == "ffn" else 1)))
    PredictorSet(fingerprint(model), found).save_pretrained(tmp_path)
    config = CometConfig(str(tmp_path), orders="kept", neuron_budget=0.25, head_budget=0.5)
    _, whole = run(model, "opt", None, protocol="trio")
    _, less = run(model, "opt", config, protocol="trio")
    assert less < 0.93 * whole


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


def test_in_fresh_orders_every_position_of_every_row_has_its_own_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last positions choose the next token, and a row must not depend on those beside it."""
    model, counts = sparse("opt"), []
    original = predicted.choose

    def noted(session: Any, active: Any, budget: int, vectors: int) -> Any:
        choice = original(session, active, budget, vectors)
        counts.append(torch.bincount(choice.places // (active.count // vectors), minlength=vectors))
        return choice

    monkeypatch.setattr(predicted, "choose", noted)
    run(model, "opt", CometConfig(saved(model, "opt", tmp_path), neuron_budget=0.3))
    assert len(counts) == model.config.num_hidden_layers
    assert all(found.tolist() == [int(0.3 * 96)] * (2 * 9) for found in counts)


def test_a_budget_of_all_units_asks_and_opens_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sparse("opt")
    monkeypatch.setattr(predicted, "choose", None)
    close(run(model, "opt", CometConfig(saved(model, "opt", tmp_path), neuron_budget=1.0))[0], answer(model, "opt"))


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
    for orders in ("kept", "fresh"):
        with pytest.raises(ConfigError, match="weights='public'"):
            PrivateConfig(weights="public", sparsity=CometConfig(folder, orders=orders))
    with pytest.raises(ConfigError, match="levels='open' goes with orders='kept'"):
        CometConfig(folder, orders="fresh", levels="open")
    with pytest.raises(ConfigError, match="other weights"):
        run(sparse("opt", seed=1), "opt", CometConfig(folder, neuron_budget=0.5))
    with pytest.raises(ConfigError, match="another model"):
        run(build("opt", ffn_dim=64), "opt", CometConfig(folder, neuron_budget=0.5))


def family(model_type: str, **changes: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **{**FAMILY, **changes})
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return made


@pytest.mark.parametrize(("model_type", "changes", "message"), [
    ("gpt_neo", {"attention_types": [[["global"], 1]], "num_layers": 1}, "computes attention in code of its own"),
    ("stablelm", {"qk_layernorm": True}, "norms' has entries for each head"),
    ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 4}, "sinks' has entries for each head"),
])  # fmt: skip
def test_heads_that_a_model_tells_apart_are_refused(
    model_type: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Attention that does not go through the mask of heads, and weights of single heads that look shared."""
    model = family(model_type, **changes)
    given = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    found = [SitePredictor(site, constant(site, [0])) for site in find_sites(model, given, ("heads",))]
    PredictorSet(fingerprint(model), found).save_pretrained(tmp_path)
    config = CometConfig(str(tmp_path), neurons=False, orders="kept", levels="open")
    with pytest.raises(PatchMismatch, match=message), patch(model, PrivateConfig(**PLAIN, sparsity=config)):
        pass


def test_attention_that_passes_by_the_mask_of_heads_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it not refused before, the answer would have heads with queries of zero in it."""
    monkeypatch.setattr(sharing, "attention_of", lambda *_: sharing.NAME)
    model = family("gpt_neo", attention_types=[[["global"], 1]], num_layers=1)
    given = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    found = [SitePredictor(site, constant(site, [0])) for site in find_sites(model, given, ("heads",))]
    PredictorSet(fingerprint(model), found).save_pretrained(tmp_path)
    config = CometConfig(str(tmp_path), neurons=False, orders="kept", levels="open")
    with (
        patch(model, PrivateConfig(**PLAIN, sparsity=config)) as private,
        pytest.raises(UnsupportedOp, match="where heads cannot be left out"),
    ):
        private(**given)


def sized(model: PreTrainedModel, name: str, gain: float, folder: Path) -> str:
    """Right predictors whose first layer, and so whose scores, are `gain` times FC1's."""
    found = []
    for site in find_sites(model, batch(name), ("ffn",)):
        made = exact(model, site)
        with torch.no_grad():
            made.fc1.weight.mul_(gain)
            made.fc2.bias.mul_(gain)
        found.append(SitePredictor(site, made))
    PredictorSet(fingerprint(model), found).save_pretrained(folder)
    return str(folder)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "gain", "norm"),
    [("opt", 2.0**12, 1), ("opt", 2.0**-12, 1), ("opt", 1, 2048), ("llama", 1, 1 / 64), ("bert", 2.0**-12, 2048),
     ("t5", 1, 2048), ("gpt2", 2.0**12, 1 / 64)],
)  # fmt: skip
def test_the_size_of_scores_and_of_inputs_means_nothing(name: str, gain: float, norm: float, tmp_path: Path) -> None:
    """Scores that would wrap, or fall below what a comparison resolves, predict the same."""
    model = sparse(name)
    read = norms_read(type(model), model.config)
    with torch.no_grad():
        for site in find_sites(model, batch(name), ("ffn",)):
            for value in model.get_submodule(read[site.name]).parameters():
                value.mul_(norm)
            for reader in site.readers:  # so that the model stays what it is
                model.get_submodule(reader).weight.div_(norm)
    config = CometConfig(sized(model, name, gain, tmp_path), orders="kept", levels="open")
    difference = run(model, name, config)[0] - answer(model, name)
    assert float(difference.abs().max()) < 2 * LOGIT_ERROR


def test_scores_that_leave_their_range_withhold_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is known of the input, the check of ranges finds scores that a comparison would get wrong."""
    monkeypatch.setattr(sharing, "norms_read", lambda *_: {})
    model = sparse("opt")
    config = CometConfig(sized(model, "opt", 2.0**14, tmp_path), orders="kept", levels="open")
    with pytest.raises(DomainError, match="a value left its range"):
        run(model, "opt", config)


def test_heads_are_left_out_of_queries_only(tmp_path: Path) -> None:
    """A model may compute keys first; the first layer of a block is the one whose outputs are left out."""
    model, found = sparse("opt"), []
    for site in find_sites(model, batch("opt"), ("heads",)):
        queries, keys, values = site.readers
        moved = replace(site, name=keys, readers=(keys, values, queries))
        found.append(SitePredictor(moved, constant(moved, [0])))
    PredictorSet(fingerprint(model), found).save_pretrained(tmp_path)
    with pytest.raises(PatchMismatch, match="looks like keys or values"):
        run(model, "opt", CometConfig(str(tmp_path), neurons=False, orders="kept", levels="open"))


def test_stacks_may_have_other_numbers_of_heads(tmp_path: Path) -> None:
    """BART: eight heads in the decoder, four in the encoder, and a bias that a checkpoint stores as no parameter."""
    sizes = {f"{stack}_{of}": size for stack in ("encoder", "decoder") for of, size in (("layers", 1), ("ffn_dim", 32))}
    config = BartConfig(
        vocab_size=64, d_model=16, encoder_attention_heads=4, decoder_attention_heads=8, max_position_embeddings=32,
        **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BartForConditionalGeneration(config).eval()
    given = {"input_ids": torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(0))}
    given["decoder_input_ids"] = given["input_ids"][:, :3]
    sites = find_sites(model, given, ("heads",))
    assert [site.units for site in sites] == [4, 8, 8]
    PredictorSet(fingerprint(model), [SitePredictor(site, constant(site, [0, 3])) for site in sites]).save_pretrained(
        tmp_path
    )
    with predicted_only(model, PredictorSet.from_pretrained(tmp_path)), torch.no_grad():
        want = model(**given)[0]
    comet = CometConfig(str(tmp_path), neurons=False, orders="kept", levels="open")
    with patch(model, PrivateConfig(**PLAIN, sparsity=comet)) as private:
        close(private(**given)[0], want)


def test_heads_of_a_group_are_in_a_secret_order(tmp_path: Path) -> None:
    """Groups among themselves, and heads within each: opened patterns name neither. Eight heads are as they were once
    in 40,320."""
    model = build("llama", hidden_size=64, num_attention_heads=16, num_key_value_heads=2, hidden_act="relu")
    shared = SharedPredictors(
        PredictorSet.from_pretrained(saved(model, "llama", tmp_path, "heads")),
        CometConfig(str(tmp_path), neurons=False, orders="kept", levels="open"), type(model), model.config,
    )  # fmt: skip
    for _, _, order in shared._members:
        groups = order.view(2, 8)
        assert sorted(order.tolist()) == [*range(16)]
        assert all(len(set((group // 8).tolist())) == 1 for group in groups)
        assert all(group.tolist() != sorted(group.tolist()) for group in groups)


def test_blocks_that_share_a_weight_are_refused(tmp_path: Path) -> None:
    """One weight has no two orders; a tied one comes under one name."""
    model = sparse("opt")
    shared = SharedPredictors(
        PredictorSet.from_pretrained(saved(model, "opt", tmp_path)),
        CometConfig(str(tmp_path), orders="kept", levels="open"), OPTForCausalLM, model.config,
    )  # fmt: skip
    spec = ModelSpec.of(OPTForCausalLM, shared.config)

    def weights(sink: Any) -> None:
        for name, value in model.state_dict().items():
            if name in spec.source.shapes and name != "model.decoder.layers.1.fc1.weight":
                sink(name, value)

    digest = WeightsDigest()
    weights(digest)
    shared._weights = digest.text()
    with pytest.raises(PatchMismatch, match=r"layers.1.fc1.weight' is tied to another weight"):
        shared.stream(weights, spec, lambda name, value: None)


def test_layers_in_a_list_can_have_predictors(tmp_path: Path) -> None:
    """CTRL's FC1, ReLU and FC2 are a `Sequential`, which would run a predictor that were put into it."""
    model = family("ctrl", n_embd=16, n_layer=1, n_head=4, dff=32, vocab_size=64, n_positions=32)
    given = {"input_ids": torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(0))}
    found = [SitePredictor(site, exact(model, site)) for site in find_sites(model, given, ("ffn",))]
    PredictorSet(fingerprint(model), found).save_pretrained(tmp_path)
    config = CometConfig(str(tmp_path), orders="kept", levels="open")
    with torch.no_grad(), patch(model, PrivateConfig(**PLAIN, sparsity=config)) as private:
        close(private(**given)[0], model(**given)[0])
