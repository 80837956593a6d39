"""Models that compute the same with other numbers: right, refused by a module's name, or warned of; never silent."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers as tr
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.vision.network import Network
from torch import nn

from private_llm.errors import ConfigError, DomainError, LowPrecision, PatchMismatch
from private_llm.ranges import Ranges
from tests.hf import images, tiny
from tests.hf.conftest import PLAIN

IDS = torch.tensor([[7, 5, 9, 11, 3, 8], [5, 6, 7, 7, 9, 2]])


def scaled(model: tr.PreTrainedModel, **factors: float) -> tr.PreTrainedModel:
    """Parameters whose names contain a key (two underscores for a dot) times its factor."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            for key, factor in factors.items():
                if key.replace("__", ".") in name:
                    weight.mul_(factor)
    return model


def error(model: tr.PreTrainedModel, config: PrivateConfig, **given: object) -> float:
    def run(called: tr.PreTrainedModel) -> torch.Tensor:
        out = called(input_ids=IDS)
        made: torch.Tensor = out.logits if "logits" in out else out.last_hidden_state
        return made

    with torch.no_grad():
        want = run(model)
    with patch(model, config, **given) as private:  # type: ignore[arg-type]
        return float((run(private) - want).abs().max())


SMALL: dict[str, tuple[str, dict[str, float]]] = {
    "query, key and value": ("llama", {"q_proj": 1e-3, "k_proj": 1e-3, "v_proj": 1e-3, "input_layernorm": 1e3}),
    "gate and up": ("qwen3", {"gate_proj": 1e-3, "up_proj": 1e-3, "post_attention_layernorm": 1e3}),
    "with biases": ("opt", {"q_proj__w": 1e-4, "k_proj__w": 1e-4, "v_proj__w": 1e-4, "self_attn_layer_norm": 1e4}),
    "Conv1D": ("gpt2", {"c_fc__weight": 1e-4, "ln_2": 1e4}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("config", [PLAIN, PrivateConfig(parallel_sessions=2)], ids=["one", "parallel_sessions"])
def test_small_weights_that_run_together_keep_their_digits(name: str, config: PrivateConfig) -> None:
    family, factors = SMALL[name]
    assert error(scaled(tiny.build(family), **factors), config) <= 5e-3


def public() -> PrivateConfig:
    return PrivateConfig(weights="public")


@pytest.mark.parametrize(
    ("family", "factors", "config", "message"),
    [
        ("llama", {"q_proj": 1e-4, "k_proj": 1e-4, "input_layernorm": 1e4}, public, r"weights of 'model\.layers\.\d"),
        ("gpt2", {"wte": 1e-4, "wpe": 1e-4, "ln_f": 1e4}, PrivateConfig, r"norm\(s\) get rows|weights of 'lm_head'"),
        ("bert", {"query": 16.0, "key": 16.0}, PrivateConfig, "attention scores of '.*attention.self' reach"),
    ],
)
def test_what_cannot_have_more_digits_is_warned_of(
    family: str, factors: dict[str, float], config: Callable[[], PrivateConfig], message: str
) -> None:
    with pytest.warns(LowPrecision, match=message):
        error(scaled(tiny.build(family), **factors), config())


def test_tokens_of_tiny_embeddings_are_looked_for() -> None:
    model = tiny.build("llama", vocab_size=2048)
    with torch.no_grad():
        model.get_input_embeddings().weight[[1000, 1717]] *= 1e-4
    with pytest.warns(LowPrecision, match=r"norm\(s\) get rows"), patch(model, PLAIN):
        pass


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", list(tiny.DECODERS))
def test_ordinary_models_are_not_warned_of(family: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", LowPrecision)
        with patch(tiny.build(family), PLAIN):
            pass


@pytest.mark.parametrize(("bits", "fits"), [(19, False), (20, False), (26, True)])
def test_key_bits_that_do_not_hold_the_model_are_refused(bits: int, fits: bool) -> None:
    model = tiny.build("opt")
    if fits:
        assert error(model, PrivateConfig(relu_bits=bits)) <= 5e-3
        return
    with pytest.raises(DomainError, match=r"module '.*' gets .*, and relu_bits=.*Want relu_bits=2\d or more"):
        error(model, PrivateConfig(relu_bits=bits))


def test_gains_that_leave_the_ring_are_refused_by_name() -> None:
    model = scaled(tiny.build("opt"), fc1__weight=1e-8, layers__0__final_layer_norm=1e8)
    with pytest.raises(DomainError, match=r"module 'model\.decoder\.layers\.0\.final_layer_norm' has values of 2\^"):
        patch(model, PLAIN)


def plain_network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return network.eval(), images.images((3, 16, 16))


@pytest.mark.parametrize("config", [PrivateConfig(), PrivateConfig(ring=32, frac_bits=10)], ids=["64", "32"])
def test_convolutions_without_activations_are_watched(config: PrivateConfig) -> None:
    network, pixels = plain_network()
    with torch.no_grad():
        network[0].weight *= 2.0 ** (config.ring // 2 - config.frac_bits + (10 if config.ring == 64 else 6))
    if config.ring == 64:
        with pytest.raises(DomainError, match=r"module '.*0' has values of 2\^"):
            patch(network, config, images=pixels)
    known, _ = plain_network()
    with patch(Network.of(known), config, images=pixels) as private:
        ranges = private.patch_plan.ranges
    assert ranges.modules
    with patch(network, config, ranges=ranges) as private, pytest.raises(DomainError, match="left its range"):
        images.logits(private, pixels)


def test_max_pools_are_watched() -> None:
    """Their comparisons hold 2^20, and the check of a convolution 2^23: what lies between must not pass."""
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    pixels = torch.zeros(1, 3, 16, 16)
    pixels[0, 0, 5, 5] = 1.0
    with torch.no_grad():
        network[0].weight.fill_(1.5 * 2.0**21)
    private = patch(network, PrivateConfig(calibrate=False))
    with private, pytest.raises(DomainError, match="left its range"):
        images.logits(private, pixels)


def test_convolutions_that_wrap_before_a_mean_are_seen() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    with torch.no_grad():
        network[0].weight *= 2.0**29
    private = patch(network, PrivateConfig(calibrate=False))
    with private, pytest.raises(DomainError, match="left its range"):
        images.logits(private, images.images((3, 16, 16)))


def test_scores_that_the_check_would_refuse_are_refused_by_name() -> None:
    model = scaled(tiny.build("llama"), q_proj=256.0, k_proj=256.0)
    with pytest.raises(DomainError, match=r"module '.*self_attn' has values of 2\^"):
        patch(model, PLAIN)


def test_small_convolutions_keep_their_digits() -> None:
    network, pixels = plain_network()
    with torch.no_grad():
        network[0].weight *= 1e-5
        network[0].bias *= 1e-5
        pixels = pixels * 1e3
        network[3].weight *= 1e2
    want = images.logits(network, pixels)
    with patch(network, PrivateConfig(), images=pixels) as private:
        assert float((images.logits(private, pixels) - want).abs().max()) <= 5e-3
        assert any("weight" in known for known in private.patch_plan.ranges.modules.values())


def test_smooth_pictures_are_no_false_alarm() -> None:
    """Calibrated on a few of its kind, a network in the 32-bit ring answers the next ones."""
    random = torch.Generator().manual_seed(5)

    def smooth(count: int) -> torch.Tensor:
        rough = torch.randn(count, 3, 4, 4, generator=random) * 1.2 + torch.randn(count, 3, 1, 1, generator=random) / 2
        return F.interpolate(rough, (32, 32), mode="bilinear").clamp(-2.1, 2.6)

    model, _ = images.build("resnet-basic")
    with patch(model, PrivateConfig(ring=32, frac_bits=10), images=smooth(4)) as private:
        for _ in range(6):
            images.logits(private, smooth(8))


def test_large_biases_do_not_break_calibration() -> None:
    model = tiny.build("opt")
    with torch.no_grad():
        model.model.decoder.layers[0].fc2.bias.normal_(0.0, 1e5)
    assert error(model, PLAIN) <= 5e-3


def test_long_rows_near_the_limit_can_be_calibrated() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 4096)).eval()
    with torch.no_grad():
        network[1].bias.fill_(9e5)
    pixels = images.images((3, 2, 2))
    want = images.logits(network, pixels)
    with patch(network, PrivateConfig(), images=pixels) as private:
        assert float((images.logits(private, pixels) - want).abs().max()) <= 0.2  # float32 has units of 0.06 there


@pytest.mark.parametrize("known", [{"weight": 40}, {"weight": 40, "output": 30}, {"weight": 24}])
def test_ranges_whose_products_would_wrap_are_refused(known: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="want them to be 43 or less in sum"):
        Ranges({"lm_head": known})
    assert Ranges({"lm_head": {"weight": 30, "output": 13}}).of("lm_head", "weight") == 30


@pytest.mark.parametrize(
    ("family", "path", "own"),
    [("llama", "model.norm", "variance_epsilon"), ("llama", "model.layers.0.self_attn", "scaling"),
     ("bert", "encoder.layer.0.output.LayerNorm", "eps")],
)  # fmt: skip
def test_constants_that_the_parties_would_not_have_are_refused(family: str, path: str, own: str) -> None:
    model = tiny.build(family)
    setattr(model.get_submodule(path), own, 1.0)
    with pytest.raises(PatchMismatch, match=rf"patch: '{path}\.{own}' is 1 here, and .* by the model's configuration"):
        patch(model, PLAIN)
