"""Calibration and massive activations: models as large as real ones answer right, or say which module does not fit."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig, patch
from private_llm_hf.api import ranges_of_checkpoint, share_checkpoint
from private_llm_hf.checkpoint import calibration_runs
from private_llm_hf.checkpoint.calibration import watching
from private_llm_hf.checkpoint.calibration_runs import loaded_ranges
from private_llm_hf.checkpoint.loaded import as_built
from private_llm_hf.client.parties import Parties
from private_llm_hf.client.session_client import PrivateCache
from private_llm_hf.party.party import Party
from private_llm_hf.tools.compare import compare
from private_llm_hf.wire.commands import LoadModel
from transformers import PreTrainedModel

from private_llm.errors import ConfigError, DomainError, LowPrecision, TransportError
from private_llm.ranges import Ranges
from tests.hf import tiny
from tests.hf.conftest import PLAIN
from tests.hf.massive import massive

IDS = torch.tensor([[7, 5, 9, 11, 3, 8], [5, 6, 7, 7, 9, 2]])
FAMILIES = ["llama", "gpt2", "opt", "gemma2", "qwen3", "gpt_neox"]


def error(model: PreTrainedModel, private: PreTrainedModel, ids: torch.Tensor = IDS) -> float:
    """Relative to the largest logit where that is above 30: tied embeddings make massive logits of massive tokens."""
    with torch.no_grad():
        truth = model(input_ids=ids).logits
    return float((private(input_ids=ids).logits - truth).abs().max()) / max(1.0, float(truth.abs().max()) / 30)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("calibrate", [True, False])
def test_massive_activations(family: str, calibrate: bool) -> None:
    """Rows of 25,000 beside rows of 3: right with ranges that are known, and without."""
    model = massive(family, 25_000.0)
    with patch(model, PrivateConfig(calibrate=calibrate)) as private:
        assert error(model, private) <= 5e-3
        assert bool(private.patch_plan.ranges.modules) == calibrate


@pytest.mark.parametrize(("family", "norm", "stored"), [("opt", "final_layer_norm", 3.5), ("gemma2", "norm", 2.5)])
def test_the_size_of_a_norm_s_weights_is_known(family: str, norm: str, stored: float) -> None:
    """Gemma's are stored less one."""
    model = tiny.build(family)
    name, module = next((n, m) for n, m in model.named_modules() if n.endswith(norm))
    module.weight.data[1] = stored
    with patch(model, PLAIN) as private:
        ranges = private.patch_plan.ranges
        assert ranges.of(name, "gain") == 2
        assert all(ranges.of(each, "gain") in (0, 1, 2) for each in ranges.modules if each.endswith("norm"))
        assert error(model, private) <= 2e-3


@pytest.mark.parametrize("size", [100_000.0, 900_000.0])
def test_the_end_of_the_domain(size: float) -> None:
    model = massive("llama", size)
    with patch(model, PLAIN) as private:
        assert error(model, private) <= 5e-3


def test_a_model_that_does_not_fit_is_refused_by_module_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("weights were shared")

    monkeypatch.setattr(Parties, "loading", never)
    with pytest.raises(DomainError, match=r"module 'model\.layers\.0\.input_layernorm' has values of 2\^21"):
        patch(massive("llama", 3_000_000.0), PrivateConfig())


def test_a_massive_stream_keeps_fewer_bits_and_norms_one_sum() -> None:
    """If its other rows are large enough; rows of 0.1 keep all bits, and their norms make two sums."""
    model = massive("llama", 25_000.0)
    with patch(model, PLAIN) as private:
        assert private.patch_plan.ranges.of("model.layers.0.self_attn.o_proj", "frac") is None
    with torch.no_grad():
        others = torch.arange(128) != 7
        model.get_input_embeddings().weight[others] *= 100
    with patch(model, PLAIN) as private:
        assert error(model, private) <= 5e-3
        known = private.patch_plan.ranges
        assert 11 <= (known.of("model.layers.0.self_attn.o_proj", "frac") or 0) < 18
        assert known.of("model.layers.0.mlp.gate_proj", "frac") is None
    with patch(tiny.build("llama"), PLAIN) as private:
        assert private.patch_plan.ranges.of("model.layers.0.self_attn.o_proj", "frac") is None


def test_known_ranges_make_calls_cheaper() -> None:
    model = tiny.build("llama")
    costs = []
    for calibrate in (True, False):
        with patch(model, PrivateConfig(calibrate=calibrate, guard=False)) as private:
            private.cost(reset=True)
            private(input_ids=IDS)
            costs.append(private.cost())
    assert costs[0].bytes_total < 0.97 * costs[1].bytes_total
    assert costs[0].rounds < costs[1].rounds


def test_explain_shows_the_exponents(capsys: pytest.CaptureFixture[str]) -> None:
    with patch(tiny.build("llama"), PLAIN) as private:
        private.explain()
        shown = capsys.readouterr().out
    assert "ranges (public)" in shown
    assert "model.layers.#.input_layernorm" in shown


def test_calibration_leaves_the_model_as_it_was() -> None:
    model = tiny.build("gpt2").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with patch(model, PLAIN):
        pass
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_is_calibrated_in_several_threads_at_once_as_alone() -> None:
    model = tiny.build("llama").train()
    alone = loaded_ranges(model, PrivateConfig())
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: loaded_ranges(model, PrivateConfig()), range(4)))
    assert alone.modules
    assert found == [alone] * 4
    assert model.training


def test_a_model_is_patched_while_another_thread_calibrates_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, started, looked = tiny.build("llama"), threading.Event(), threading.Event()
    original = calibration_runs.calibrate

    def slow(*args: Any) -> Ranges:
        with watching(model):
            started.set()
            looked.wait(0.3)  # nobody comes while this model is watched
        return original(*args)

    def look() -> None:
        started.wait(60)
        as_built(model, model.config)
        looked.set()

    monkeypatch.setattr(calibration_runs, "calibrate", slow)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(look)
        loaded_ranges(model, PrivateConfig())
        done.result(60)
    assert looked.is_set()


def test_calibration_sees_nothing_of_what_runs_in_other_threads() -> None:
    model, small, large = tiny.build("gpt2"), torch.tensor([[3, 4, 5]]), IDS
    met = []

    def run(ids: torch.Tensor) -> None:
        with torch.no_grad():
            model(input_ids=ids)

    for others in (False, True):
        with watching(model) as largest:
            run(small)
            if others:
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(run, large).result()
        met.append((largest.largest, largest.smallest, largest.widths))
    assert met[0] == met[1]


# -- the guard ------------------------------------------------------------------------------------------------
NARROW = Ranges({"model.layers.1.mlp.down_proj": {"output": -12}})
"""No values of a tiny model are as small as that."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("protocol", ["trio", "quad", "dealer"])
def test_a_value_that_leaves_its_range_withholds_the_answer(protocol: str) -> None:
    model = tiny.build("llama")
    with patch(model, PrivateConfig(protocol=protocol), ranges=NARROW) as private:
        for _ in range(2):  # the session lives on
            with pytest.raises(DomainError, match=r"a value left its range.*private-llm diff"):
                private(input_ids=IDS)
        with pytest.raises(DomainError, match="a value left its range"):
            private.generate(IDS, max_new_tokens=2)


def test_diff_names_the_module_that_the_guard_refuses() -> None:
    found = compare(tiny.build("llama"), IDS, PrivateConfig(), NARROW)
    assert found.stopped is not None
    assert "model.layers.1.mlp.down_proj" in found.stopped


def test_a_product_that_does_not_fit_is_refused_by_module() -> None:
    """gate * up may be larger than everything around it."""
    model = tiny.build("llama")
    with torch.no_grad():
        mlp = model.model.layers[0].mlp
        mlp.gate_proj.weight.mul_(2.0**13)
        mlp.up_proj.weight.mul_(2.0**13)
        mlp.down_proj.weight.mul_(2.0**-26)
    with pytest.raises(DomainError, match=r"module 'model\.layers\.0\.mlp' has values of 2\^"):
        patch(model, PLAIN)


@pytest.mark.parametrize(
    ("large", "small", "scale"), [("model.norm", "lm_head", 2.0**14), ("up_proj", "down_proj", 2.0**11)]
)
def test_small_weights_keep_their_digits(large: str, small: str, scale: float) -> None:
    """Weights of 2^-18 behind large values: rounding to 18 bits would leave nothing of them.

    Where models are calibrated a head takes up its norm, after which its weights are not small.
    """
    model = tiny.build("llama")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(scale if large in name else 1 / scale if small in name else 1.0)
    with patch(model, PLAIN) as private:
        assert error(model, private) <= 2e-3
    with patch(model, PrivateConfig(calibrate=False)) as private:
        assert error(model, private) > 1e-2


def test_layers_that_take_up_small_norms_keep_their_digits() -> None:
    """What counts is the size of a layer's weights with those of its norm in them."""
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.norm.weight.mul_(2.0**-14)
    known = loaded_ranges(model, PLAIN)
    unfolded = loaded_ranges(model, replace(PLAIN, weights="public"))
    assert known.of("lm_head", "weight") == 14 + 14 + 3
    assert unfolded.of("lm_head", "weight") is None


def test_rows_too_small_for_their_digits_are_warned_of() -> None:
    model = tiny.build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2.0**-11)
    with pytest.warns(LowPrecision, match=r"model\.layers\.\d\.\w+layernorm.* fractional bits that is"):
        loaded_ranges(model, PLAIN)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_far_beyond_calibration_are_right_or_refused(family: str) -> None:
    """Norms hold what the guard lets pass: between calibration and the end of the ring there is no silent gap."""
    model = tiny.build(family)
    ranges, refused = loaded_ranges(model, PLAIN), []
    for factor in (12.0, 20.0, 60.0, 300.0, 2000.0, 30000.0):
        grown = tiny.build(family)
        with torch.no_grad():
            table = grown.get_input_embeddings()
            table.weight = torch.nn.Parameter(table.weight * factor)  # the head keeps its own
            grown.config.tie_word_embeddings = False
        with patch(grown, PLAIN, ranges=ranges) as private:
            try:
                assert error(grown, private) <= 1e-2
            except DomainError as reason:
                refused.append(str(reason))
    assert all("left its range" in reason for reason in refused)
    assert 1 <= len(refused) < 6


@pytest.mark.parametrize("name", ["down_proj", "up_proj"])
def test_modules_of_zeros_are_no_mistake(name: str) -> None:
    model = tiny.build("llama")
    with torch.no_grad():
        getattr(model.model.layers[0].mlp, name).weight.zero_()
        model.get_input_embeddings().weight.mul_(0.1)
    with patch(model, PLAIN) as private:
        assert error(model, private) <= 5e-3


def test_a_refused_call_leaves_no_cache_to_go_on_with() -> None:
    with patch(tiny.build("llama"), PLAIN, ranges=NARROW) as private:
        cache = PrivateCache(private.parties, 2)
        with pytest.raises(DomainError, match="left its range"):
            private(input_ids=IDS, past_key_values=cache)
        with pytest.raises(DomainError, match="start again"):
            private(input_ids=IDS[:, :1], past_key_values=cache)


def test_an_encoder_s_verdict_is_its_own() -> None:
    model = tiny.build("t5")
    with patch(model, PLAIN, ranges=Ranges({"encoder.block.0.layer.1.DenseReluDense.wo": {"output": -12}})) as private:
        with pytest.raises(DomainError, match="left its range"):
            private.get_encoder()(IDS)
        with pytest.raises(DomainError, match="left its range"):
            private(input_ids=IDS, decoder_input_ids=IDS)


def test_without_the_guard_nobody_says_so() -> None:
    model = tiny.build("llama")
    with patch(model, PrivateConfig(guard=False), ranges=NARROW) as private:
        assert torch.isfinite(private(input_ids=IDS).logits).all()


def test_products_that_leave_the_ring_are_seen() -> None:
    """Nobody has calibrated, and products wrap: the ring's garbage does not reach the user."""
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e12)
    with (
        patch(model, PrivateConfig(calibrate=False)) as private,
        pytest.raises(DomainError, match="a value left its range"),
    ):
        private(input_ids=IDS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reveal", ["logits", "token"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_the_guard_costs_at_most_6_percent_and_no_round_in_a_layer(family: str, reveal: str) -> None:
    model = tiny.build(family)
    found = []
    for guard in (True, False):
        with patch(model, PrivateConfig(guard=guard, reveal=reveal)) as private:
            ids = IDS.repeat(1, 8)
            private.cost(reset=True)
            private(input_ids=ids)
            found.append(private.cost())
    with_guard, without = found
    assert with_guard.bytes_total <= 1.06 * without.bytes_total  # of a toy: 0.8 % of LLaMA-7B's
    for ledger, other in zip(with_guard.ledgers, without.ledgers, strict=True):
        layers = {key: count for key, count in ledger.rounds.items() if key[0] != "range check"}
        assert layers == dict(other.rounds)
    assert with_guard.rounds - without.rounds <= 12


def test_share_files_carry_the_ranges(tmp_path: Path) -> None:
    source = tmp_path / "model"
    tiny.build("llama").save_pretrained(source)
    paths = share_checkpoint(str(source), tmp_path / "shares")
    description = json.loads(_metadata(paths[1])["description"])
    assert description["ranges"] == ranges_of_checkpoint(str(source)).to_dict()
    given = Ranges({"lm_head": {"output": 12}})
    paths = share_checkpoint(str(source), tmp_path / "others", ranges=given)
    assert json.loads(_metadata(paths[0])["description"])["ranges"] == given.to_dict()


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as stored:
        return dict(stored.metadata())


def test_from_pretrained_calibrates_and_takes_ranges(tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path)
    with AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), PLAIN) as private:
        assert private.patch_plan.ranges.modules
    given = Ranges({"lm_head": {"output": 12}})
    with AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path), PLAIN, ranges=given) as private:
        assert private.patch_plan.ranges == given


def test_a_text_needs_a_tokenizer(tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer"):
        ranges_of_checkpoint(str(tmp_path), text="Some words.")


def test_parties_with_different_ranges_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Party._load

    def load(self: Party, command: LoadModel) -> None:
        if self.number == 1:
            ranges = {**command.description.ranges, "model.norm": {"square": 9}}
            command = replace(command, description=replace(command.description, ranges=ranges))
        original(self, command)

    monkeypatch.setattr(Party, "_load", load)
    with pytest.raises(TransportError, match="the parties gave different answers"):
        patch(tiny.build("llama"), PrivateConfig(party_mode="threads"))
