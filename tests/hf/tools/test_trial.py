"""Model classes that nobody has looked at: they run if a small one agrees with plaintext, and are refused if not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as tr
from private_llm_hf import PrivateConfig, patch, register_handler, unregister_handler
from private_llm_hf.api import _open_small
from private_llm_hf.checkpoint.miniature import miniature, small_config
from private_llm_hf.models.architectures import architecture, compared
from private_llm_hf.tools import trial
from torch import Tensor, nn

from private_llm.errors import DomainError, PatchMismatch
from tests.hf.compare import BATCH, LOGIT_ERROR, MASK, worst
from tests.hf.conftest import PLAIN, TRIO

AUTO = {
    "decoder": tr.AutoModelForCausalLM, "encoder": tr.AutoModelForMaskedLM,
    "encoder-decoder": tr.AutoModelForSeq2SeqLM, "vision": tr.AutoModelForImageClassification,
}  # fmt: skip
AGREE = (
    "olmo3", "ministral3", "vaultgemma", "nanochat", "modernbert-decoder", "jais2", "xglm", "openai-gpt", "bitnet",
    "gpt_neox_japanese", "internlm3", "lfm2", "flex_olmo", "bart", "mbart", "pegasus", "blenderbot", "deberta",
    "rembert", "roformer", "megatron-bert", "mobilebert", "roc_bert", "xlm-roberta-xl", "eurobert", "mpnet", "trocr",
    "layoutlm", "swin", "donut-swin", "beit", "dinov2_with_registers", "clip", "focalnet", "levit", "pp_lcnet",
    "minicpm3", "youtu", "diffllama", "doge", "laguna",
)  # fmt: skip


def class_of(name: str) -> tuple[type[tr.PreTrainedModel], tr.PretrainedConfig]:
    config = tr.AutoConfig.for_model(name)
    found = AUTO[architecture(config).kind]._model_mapping[type(config)]
    return (found[0] if isinstance(found, tuple) else found), config


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial is remembered."""
    monkeypatch.setattr(trial, "FOLDER", None)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", AGREE)
def test_classes_that_no_other_test_compares_agree(name: str) -> None:
    model_class, config = class_of(name)
    assert model_class.__name__ not in compared() or name == "internlm3"
    trial.require_agreement(model_class, config, _open_small)


DISENTANGLED = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}
ESM = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "max_position_embeddings": 66}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("DebertaForSequenceClassification", DISENTANGLED),
        ("DebertaV2ForSequenceClassification", {**DISENTANGLED, "position_buckets": 16, "share_att_key": True}),
        ("EsmForMaskedLM", {**ESM, "position_embedding_type": "rotary", "token_dropout": True}),
        ("EsmForSequenceClassification", {**ESM, "emb_layer_norm_before": True}),
    ],
)
def test_heads_of_encoders_agree(name: str, settings: dict[str, object]) -> None:
    model_class = getattr(tr, name)
    trial.require_agreement(model_class, model_class.config_class(**settings), _open_small)


def test_what_esm_and_deberta_cannot_share_is_refused_at_the_client() -> None:
    ids, quick = torch.tensor([[5, 6, 32]]), dataclasses.replace(PLAIN, calibrate=False)
    esm = miniature(tr.EsmForMaskedLM, tr.EsmConfig(**ESM, token_dropout=True))
    with patch(esm, quick) as private, pytest.raises(DomainError, match=r"got the mask token \(32\)"):
        private(input_ids=ids)
    deberta = miniature(tr.DebertaForSequenceClassification, tr.DebertaConfig(**DISENTANGLED))
    with patch(deberta, quick) as private, pytest.raises(DomainError, match="padding on the left"):
        private(input_ids=ids, attention_mask=torch.tensor([[0, 1, 1]]))


@pytest.mark.parametrize("name", ["bart", "mbart"])
def test_bart_reads_its_prompt_twice(name: str) -> None:
    model = miniature(*class_of(name))
    ids = torch.tensor([[5, 6, 7, 2], [8, 9, 10, 2]])
    with patch(model, dataclasses.replace(PLAIN, calibrate=False)) as private, torch.no_grad():
        assert worst(private(input_ids=ids).logits, model(input_ids=ids).logits) < LOGIT_ERROR


@pytest.mark.parametrize("name", ["T5EncoderModel", "MT5EncoderModel"])
def test_the_encoder_alone_is_tried_as_one(name: str) -> None:
    model_class = getattr(tr, name)
    trial.require_agreement(model_class, model_class.config_class(), _open_small)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "refused"),
    [("mamba", "with padding and a cache"), ("fnet", "fft"), ("deepseek_v32", "topk"), ("mamba2", ""), ("xlnet", "")],
)
def test_what_cannot_run_is_refused_before_anything_is_sent(name: str, refused: str) -> None:
    model_class, config = class_of(name)
    with pytest.raises(PatchMismatch, match=f"{model_class.__name__}: .*{refused}"):
        trial.require_agreement(model_class, config, _open_small)


def test_all_modules_without_a_rule_are_listed() -> None:
    model_class, config = class_of("fnet")
    with pytest.raises(PatchMismatch) as refused:
        trial.require_agreement(model_class, config, _open_small)
    text = str(refused.value)
    assert re.search(r"2 module\(s\) or operation\(s\)", text)
    assert "fnet.encoder.layer.0.fourier.self (FNetBasicFourierTransform)" in text
    assert "fnet.encoder.layer.1.fourier.self (FNetBasicFourierTransform)" in text


# -- a rule that is wrong ---------------------------------------------------------------------------------------------
class Doubled(nn.Module):
    """Not what it stands for."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x + x


@pytest.fixture
def wrong() -> Iterator[type[nn.Module]]:
    kind = type(tr.activations.ACT2FN["gelu"])
    register_handler(kind, "twice its input")(Doubled)
    yield kind
    unregister_handler(kind)


def test_a_wrong_result_is_refused_with_the_first_module_that_differs(wrong: type[nn.Module]) -> None:
    model_class, config = class_of("roformer")
    with pytest.raises(PatchMismatch, match=r"would be wrong.*on two texts.*differs is .*intermediate_act_fn \(GELU"):
        trial.require_agreement(model_class, config, _open_small)


def test_patch_tries_first(monkeypatch: pytest.MonkeyPatch, wrong: type[nn.Module]) -> None:
    model = miniature(*class_of("roformer"))

    def start(*_: object) -> None:
        pytest.fail("parties were started for a class that does not agree")

    with pytest.raises(PatchMismatch, match="RoFormerForMaskedLM: its private result would be wrong"):
        patch(model, TRIO, start=start)


def test_a_compared_class_with_an_unknown_module_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation without a handler: the class is one of the tests', this setting is not."""
    config = tr.AutoConfig.for_model("llama", hidden_act="mish")
    with pytest.raises(PatchMismatch, match=r"mlp.act_fn \(MishActivation\).*mish"):
        patch(miniature(tr.LlamaForCausalLM, config), PLAIN)


# -- what is remembered ---------------------------------------------------------------------------------------------
def test_a_class_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    monkeypatch.setattr(trial, "FOLDER", tmp_path / "kernels")
    monkeypatch.setattr(trial, "_try", lambda model, *_: tries.append(type(model).__name__))
    (model_class, config), other = class_of("rembert"), tr.AutoConfig.for_model("rembert", hidden_act="relu")
    for settings in (config, config, other, config):
        trial.require_agreement(model_class, settings, _open_small)
    assert len(tries) == 2  # the other setting is another model


def test_a_failed_trial_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "FOLDER", tmp_path / "kernels")
    model_class, config = class_of("fnet")
    for _ in range(2):
        with pytest.raises(PatchMismatch, match="fft"):
            trial.require_agreement(model_class, config, _open_small)
    assert not list((tmp_path / "agreed").iterdir())


# -- the small model --------------------------------------------------------------------------------------------------
def test_a_small_config_keeps_settings_and_the_kind_of_heads() -> None:
    config = tr.LlamaConfig(
        hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, hidden_act="relu", attention_bias=True
    )
    small = small_config(config)
    assert (small.hidden_size, small.num_attention_heads, small.num_key_value_heads) == (32, 4, 2)
    assert (small.hidden_act, small.attention_bias) == ("relu", True)
    assert small_config(tr.LlamaConfig(num_key_value_heads=1)).num_key_value_heads == 1
    assert small_config(tr.LlamaConfig()).num_key_value_heads == 4


def test_every_kind_of_layer_is_in_the_small_model() -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 4
    config = tr.Qwen3Config(num_hidden_layers=8, layer_types=kinds, sliding_window=4096, use_sliding_window=True)
    small = small_config(config)
    assert small.layer_types == kinds[:4]
    assert small.sliding_window == 4


def test_stages_keep_windows_and_what_groups_need() -> None:
    """Shifted windows are in every second layer, and the last stage is one window."""
    small = small_config(tr.SwinConfig())
    assert (small.depths, small.embed_dim, small.window_size, small.image_size) == ([2, 2, 2, 2], 24, 2, 64)
    small = small_config(tr.DeepseekV3Config(n_group=8, topk_group=4))
    assert (small.n_routed_experts, small.n_group, small.topk_group, small.num_experts_per_tok) == (8, 4, 2, 2)
    assert small_config(tr.DeepseekV3Config(n_group=1, topk_group=1)).n_group == 1


def test_stored_buffers_are_random_too() -> None:
    """A correction of zero would show nothing."""
    model = miniature(*class_of("deepseek_v3"))
    corrections = [value for name, value in model.named_buffers() if name.endswith("correction_bias")]
    assert corrections
    assert all(float(value.std()) > 0.01 for value in corrections)


def test_the_real_model_runs_after_its_trial() -> None:
    model = miniature(*class_of("xglm"))
    with patch(model, PrivateConfig(protocol="trio", timeout_s=60)) as private, torch.no_grad():
        assert worst(private(**BATCH).logits, model(**BATCH).logits, MASK) < LOGIT_ERROR


# -- token sharding ---------------------------------------------------------------------------------------------------
def test_token_sharding_is_tried_too() -> None:
    model_class, config = class_of("olmo2")
    assert model_class.__name__ not in compared("token sharding")
    trial.require_agreement(model_class, config, _open_small, trial.AT_NODES)


@pytest.mark.parametrize(("name", "reason"), [("mamba", "mixer|cache|MambaForCausalLM"), ("gptj", "attention")])
def test_what_nodes_cannot_share_is_refused(name: str, reason: str) -> None:
    with pytest.raises(PatchMismatch, match=reason):
        trial.require_agreement(*class_of(name), _open_small, trial.AT_NODES)


# -- what a small text does not show ----------------------------------------------------------------------------------
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["mpnet", "xlm-roberta-xl", "data2vec-text", "roberta-prelayernorm"])
@pytest.mark.parametrize("side", ["left", "right", "hole"])
def test_positions_are_counted_after_padding(name: str, side: str) -> None:
    model_class, config = class_of(name)
    model = miniature(model_class, config)
    pad = model.config.pad_token_id
    ids = torch.arange(2 * 20).view(2, 20) % 90 + 5
    mask = torch.ones_like(ids)
    mask[0, {"left": slice(0, 6), "right": slice(14, 20), "hole": slice(7, 9)}[side]] = 0
    ids = ids.masked_fill(mask == 0, pad)
    with patch(model, PLAIN) as private, torch.no_grad():
        found = private(input_ids=ids, attention_mask=mask).logits
        assert worst(found, model(input_ids=ids, attention_mask=mask).logits, mask) < LOGIT_ERROR


def test_a_note_counts_only_if_it_is_whole_and_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    monkeypatch.setattr(trial, "FOLDER", tmp_path / "kernels")
    monkeypatch.setattr(trial, "_try", lambda model, *_: tries.append(type(model).__name__))
    model_class, config = class_of("rembert")
    trial.require_agreement(model_class, config, _open_small)
    (note,) = (tmp_path / "agreed").iterdir()
    note.write_text("")  # a disk that was full
    trial.require_agreement(model_class, config, _open_small)
    assert len(tries) == 2
    (tmp_path / "agreed").chmod(0o777)  # anybody may have put it there
    trial.require_agreement(model_class, config, _open_small)
    assert len(tries) == 3
    monkeypatch.setattr(trial, "FOLDER", tmp_path / "no" / "such" / "kernels")  # nowhere to write
    trial.require_agreement(model_class, config, _open_small)
    assert len(tries) == 4


def test_where_no_small_model_can_be_made_two_layers_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the real widths; sizes whose names only sound like counts of layers stay."""
    config = tr.Qwen2Config(
        hidden_size=48, intermediate_size=80, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, max_window_layers=6,
    )  # fmt: skip
    monkeypatch.setattr("private_llm_hf.checkpoint.miniature.small_config", lambda config: 1 / 0)
    made = miniature(tr.Qwen2ForCausalLM, config).config
    assert (made.num_hidden_layers, made.hidden_size, made.vocab_size, made.max_window_layers) == (2, 48, 200, 6)
    assert len(made.layer_types) == 2
