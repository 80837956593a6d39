"""Under protocol "assisted" models of any family compute what transformers computes, or an error names the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tr
from private_llm_hf import AutoPrivateModel, patch
from private_llm_hf.checkpoint.miniature import filled, small_config
from private_llm_hf.checkpoint.sample_inputs import outputs, sample_inputs
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.errors import PatchMismatch, UnsupportedOp
from tests.hf import tiny
from tests.hf.compare import GREEDY, worst
from tests.hf.models import families
from tests.hf.test_assisted import ASSISTED

Made = tuple[PreTrainedModel, dict[str, Tensor]]

ERROR = 1e-3
"""Of the largest value of each output."""

TYPES = (
    "afmoe", "albert", "apertus", "bart", "beit", "bert-generation", "bigbird_pegasus", "bitnet", "blenderbot",
    "cohere2", "convbert", "convnext", "convnextv2", "cvt", "data2vec-text", "data2vec-vision", "deberta",
    "deepseek_v4", "diffllama", "dinov2_with_registers", "doge", "ernie4_5_moe", "eurobert", "exaone_moe", "flaubert",
    "flex_olmo", "fnet", "focalnet", "funnel", "gemma3_text", "glm4_moe", "gpt_oss", "gptj", "granitemoe",
    "granitemoeshared", "hiera", "ibert", "jetmoe", "layoutlm", "led", "lfm2", "llama4_text", "longformer", "longt5",
    "m2m_100", "marian", "mbart", "megatron-bert", "mimo_v2_flash", "minimax", "minimax_m2", "mixtral", "mobilenet_v1",
    "mobilenet_v2", "mobilevit", "modernbert-decoder", "mpnet", "mra", "mt5", "mvp", "nanochat", "nllb-moe",
    "nystromformer", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "pegasus", "pegasus_x", "phimoe", "plbart",
    "poolformer", "prophetnet", "qwen2_moe", "qwen3_moe", "qwen3_next", "regnet", "rembert", "resnet", "roformer",
    "seed_oss", "segformer", "siglip", "stablelm", "starcoder2", "swiftformer", "swin", "swinv2", "switch_transformers",
    "t5gemma", "trocr", "umt5", "xglm", "xlm", "yoso",
)  # fmt: skip
_AUTO = (
    tr.AutoModelForCausalLM, tr.AutoModelForSeq2SeqLM, tr.AutoModelForMaskedLM, tr.AutoModelForImageClassification
)  # fmt: skip


def of_type(model_type: str) -> PreTrainedModel:
    """A small model with random weights."""
    known = tr.AutoConfig.for_model(model_type).to_dict()
    settings = {name: value for name, value in families.SETTINGS.items() if name in known}
    config = small_config(tr.AutoConfig.for_model(model_type, **settings))
    torch.manual_seed(0)
    auto = next(each for each in _AUTO if type(config) in each._model_mapping)
    return filled(auto.from_config(config).float().eval())


def agree(plain: PreTrainedModel, given: dict[str, Tensor], **settings: object) -> None:
    """Outputs, and texts where settings say how to generate."""
    with patch(plain, ASSISTED) as private, torch.no_grad():
        want, got = outputs(plain, given), outputs(private, given)
        assert want.keys() == got.keys()
        for name, value in want.items():
            assert worst(got[name], value) <= ERROR * max(1.0, float(value.abs().max())), name
        if settings:
            prompt = {name: value for name, value in given.items() if name != "decoder_input_ids"}
            assert torch.equal(private.generate(**prompt, **settings), plain.generate(**prompt, **settings))


@pytest.mark.full
@pytest.mark.parametrize("model_type", TYPES)
def test_small_models_of_each_type(model_type: str) -> None:
    plain = of_type(model_type)
    given = sample_inputs(plain)
    agree(plain, given, **(GREEDY if plain.can_generate() and "input_ids" in given else {}))


@pytest.mark.full
@pytest.mark.parametrize("name", tiny.ALL)
def test_tiny_models(name: str) -> None:
    plain = tiny.build(name)
    agree(plain, sample_inputs(plain), **(GREEDY if name in tiny.DECODERS else {}))


# -- sound, and images with texts: models that shares are not made of ------------------------------------------------
IDS = torch.arange(6)[None] + 3
PIXELS = torch.linspace(-2, 2, 3 * 16 * 16).view(1, 3, 16, 16)
WAVE = torch.linspace(0, 300, 2000).sin()[None]
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
SPEECH = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64, "max_target_positions": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
WAVES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "conv_dim": (32, 32),
    "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "vocab_size": 32,
}  # fmt: skip


def _both(config: type[PretrainedConfig]) -> PretrainedConfig:
    return config(text_config=TEXT, vision_config=VISION)


def _whisper() -> Made:
    config = tr.WhisperConfig(**SPEECH, max_source_positions=20, num_mel_bins=8)
    sound = torch.linspace(-2, 2, 8 * 40).view(1, 8, 40).sin()
    return tr.WhisperForConditionalGeneration(config), {"input_features": sound, "decoder_input_ids": IDS}


def _speech_to_text() -> Made:
    config = tr.Speech2TextConfig(**SPEECH, max_source_positions=100, input_feat_per_channel=8, conv_channels=32)
    sound = torch.linspace(-2, 2, 8 * 40).view(1, 40, 8).sin()
    return tr.Speech2TextForConditionalGeneration(config), {"input_features": sound, "decoder_input_ids": IDS}


def _spectrogram() -> Made:
    config = tr.ASTConfig(
        **VISION, max_length=64, num_mel_bins=16, frequency_stride=8, time_stride=8, num_labels=3
    )  # fmt: skip
    return tr.ASTForAudioClassification(config), {"input_values": torch.linspace(-2, 2, 64 * 16).view(1, 64, 16)}


def _llava() -> Made:
    config = tr.LlavaConfig(
        vision_config=tr.CLIPVisionConfig(**VISION), text_config=tr.LlamaConfig(**TEXT), image_token_index=60,
        image_seq_length=4, vision_feature_layer=-1,
    )  # fmt: skip
    ids = torch.tensor([[3, 60, 60, 60, 60, 5]])
    return tr.LlavaForConditionalGeneration(config), {"input_ids": ids, "pixel_values": PIXELS}


def _video() -> Made:
    config = tr.VideoMAEConfig(**VISION, num_frames=4, num_labels=3)
    return tr.VideoMAEForVideoClassification(config), {"pixel_values": PIXELS.repeat(4, 1, 1, 1)[None]}


OTHERS: dict[str, Callable[[], Made]] = {
    "clip": lambda: (tr.CLIPModel(_both(tr.CLIPConfig)), {"input_ids": IDS, "pixel_values": PIXELS}),
    "siglip": lambda: (tr.SiglipModel(_both(tr.SiglipConfig)), {"input_ids": IDS, "pixel_values": PIXELS}),
    "blip": lambda: (
        tr.BlipForConditionalGeneration(_both(tr.BlipConfig)), {"input_ids": IDS, "pixel_values": PIXELS}
    ),
    "llava": _llava,
    "videomae": _video,
    "whisper": _whisper,
    "speech_to_text": _speech_to_text,
    "audio-spectrogram-transformer": _spectrogram,
    "wav2vec2": lambda: (tr.Wav2Vec2ForCTC(tr.Wav2Vec2Config(**WAVES)), {"input_values": WAVE}),
    "hubert": lambda: (tr.HubertForCTC(tr.HubertConfig(**WAVES)), {"input_values": WAVE}),
    "sew": lambda: (tr.SEWForCTC(tr.SEWConfig(**WAVES)), {"input_values": WAVE}),
    "choices": lambda: (tr.BertForMultipleChoice(tr.BertConfig(**TEXT)), {"input_ids": IDS.view(1, 2, 3)}),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", OTHERS)
def test_models_that_shares_are_not_made_of(name: str) -> None:
    torch.manual_seed(0)
    plain, given = OTHERS[name]()
    agree(filled(plain.eval()), given, **(GREEDY if name in ("whisper", "speech_to_text", "llava") else {}))


def test_clip_from_a_folder(tmp_path: Path) -> None:
    plain, given = OTHERS["clip"]()
    plain.save_pretrained(tmp_path)
    with AutoPrivateModel.from_pretrained(str(tmp_path), ASSISTED) as private, torch.no_grad():
        got, want = private(**given).logits_per_image, plain.eval()(**given).logits_per_image
        assert worst(got, want) < ERROR * float(want.abs().max())


def test_a_replaced_forward_that_cannot_be_compared_is_named() -> None:
    plain, _ = OTHERS["wav2vec2"]()
    layer = plain.wav2vec2.encoder.layers[0].feed_forward
    layer.forward = lambda x: x
    with pytest.raises(PatchMismatch, match="feed_forward"):
        patch(plain.eval(), ASSISTED)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("falcon_mamba", "reads the weight itself"),
        ("mobilebert", "reads the weight itself"),
    ],
)
def test_what_does_not_work_says_why(model_type: str, why: str) -> None:
    with pytest.raises(PatchMismatch, match=why):
        patch(of_type(model_type), ASSISTED)


def test_a_weight_that_is_read_where_nothing_could_be_tried_ends_the_first_call() -> None:
    plain = tr.WavLMForCTC(tr.WavLMConfig(**WAVES)).eval()
    with patch(plain, ASSISTED) as private, pytest.raises(UnsupportedOp, match=r"out_proj: .* reads the weight itself"):
        private(WAVE)
