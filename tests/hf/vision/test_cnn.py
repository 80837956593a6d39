"""Image models through both entry points: every family and plain network against its plaintext self, batch of two.

ERROR: in the 64-bit ring as in `compare.py` (18 fractional bits). In the 32-bit ring with 10 fractional bits every
rounding is 2^8 times coarser; all roundings to one side would give 1, independent ones 2^-11 times the root of their
number, which is a few thousand on the way to a logit: 0.05. A wrong layer is off by more than 1.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as tr
from private_llm_hf import AutoPrivateModelForImageClassification, Network, PrivateConfig, patch
from private_llm_hf.api import share_checkpoint
from private_llm_hf.client.preprocess import ForwardPlan
from torch import nn

from private_llm.errors import ConfigError, DomainError, PatchMismatch
from tests.hf import images
from tests.hf.compare import LOGIT_ERROR, worst
from tests.hf.conftest import PLAIN, TRIO

ERROR = {64: LOGIT_ERROR, 32: 0.05}
SMALL = {"ring": 32, "frac_bits": 10}


def config(base: PrivateConfig, ring: int, **more: object) -> PrivateConfig:
    return replace(base, **(SMALL if ring == 32 else {}), **more)  # type: ignore[arg-type]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("weights", ["secret", "public"])
@pytest.mark.parametrize("name", [*images.HF, *(name for name in images.NETWORKS if name != "alexnet")])
def test_every_network_in_the_large_ring(name: str, weights: str) -> None:
    model, pixels = images.build(name)
    with patch(model, config(PLAIN, 64, weights=weights)) as private:
        assert worst(images.logits(private, pixels), images.logits(model, pixels)) < ERROR[64]


LARGE = ("convnext", "regnet", "efficientnet")
"""Need the 64-bit ring: layer norms and GELU, SiLU, sigmoid."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*(name for name in images.HF if name not in LARGE), *images.NETWORKS])
def test_every_network_in_the_small_ring(name: str) -> None:
    model, pixels = images.build(name)
    with patch(model, config(PLAIN, 32)) as private:
        assert worst(images.logits(private, pixels), images.logits(model, pixels)) < ERROR[32]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("ring", [64, 32])
@pytest.mark.parametrize("protocol", ["trio", "quad", "dealer"])
@pytest.mark.parametrize("name", ["resnet-basic", "mobilenet_v2", "lenet5", "vgg16", "vgg16-imagenet", "mixed"])
def test_under_every_protocol(name: str, protocol: str, ring: int) -> None:
    model, pixels = images.build(name)
    with patch(model, config(TRIO, ring, protocol=protocol)) as private:
        assert worst(images.logits(private, pixels), images.logits(model, pixels)) < ERROR[ring]
        costs = private.cost()
    assert sum(sent for sent, _ in costs.by_module().values()) == costs.bytes_total > 0


@pytest.mark.parametrize("protocol", ["trio", "quad", "dealer"])
def test_convnext_under_every_protocol(protocol: str) -> None:
    model, pixels = images.build("convnext")
    with patch(model, config(TRIO, 64, protocol=protocol)) as private:
        assert worst(images.logits(private, pixels), images.logits(model, pixels)) < ERROR[64]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", images.HF)
def test_from_pretrained(name: str, tmp_path: Path) -> None:
    """The checkpoint's batch norms are folded while it streams."""
    model, pixels = images.build(name)
    model.save_pretrained(tmp_path)
    with AutoPrivateModelForImageClassification.from_pretrained(str(tmp_path), PLAIN) as private:
        assert type(private).__name__ == f"Private{type(model).__name__}"
        with torch.no_grad():
            out = private(pixel_values=pixels)
            want = model(pixel_values=pixels)
    assert type(out) is type(want)
    assert worst(out.logits, want.logits) < ERROR[64]


def test_a_network_is_called_like_the_module_it_was() -> None:
    model, pixels = images.build("mixed")
    with patch(model, PLAIN) as private:
        assert isinstance(private, nn.Module)
        out = private(pixels)
        assert isinstance(out, torch.Tensor)
        assert out.dtype == torch.float32
        assert torch.allclose(out.exp().sum(1), torch.ones(2)), "the log-softmax is the client's"
        assert private(pixels[:1]).shape == (1, 4), "another batch"


def test_a_stored_network_comes_back_through_from_pretrained_and_share_files(tmp_path: Path) -> None:
    model, pixels = images.build("small-resnet")
    Network.of(model, (1, 8, 8)).save_pretrained(tmp_path / "net")
    with AutoPrivateModelForImageClassification.from_pretrained(str(tmp_path / "net"), PLAIN) as private:
        assert worst(private(pixels), images.logits(model, pixels)) < ERROR[64]
    paths = share_checkpoint(
        str(tmp_path / "net"), tmp_path / "shares", TRIO, auto=AutoPrivateModelForImageClassification
    )
    assert [path.exists() for path in paths] == [True] * 3
    assert all(b"running_mean" not in path.read_bytes() for path in paths), "statistics stay with the owner"


# -- what is revealed ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ring", [64, 32])
@pytest.mark.parametrize("name", ["resnet-basic", "small-lenet"])
def test_only_the_class_is_revealed(name: str, ring: int) -> None:
    model, pixels = images.build(name)
    pixels = images.images(pixels.shape[1:], 16)
    best = images.logits(model, pixels).topk(2).values
    pixels = pixels[best[:, 0] - best[:, 1] > 2 * ERROR[ring]][:2]  # both logits may be off
    want = images.logits(model, pixels)
    with patch(model, config(TRIO, ring, reveal="class")) as private:
        got = images.logits(private, pixels)
        opened = private.cost().by_op()["reveal"]
    assert torch.equal(got.argmax(1), want.argmax(1))
    assert torch.equal(got == 0.0, torch.nn.functional.one_hot(want.argmax(1), want.shape[1]).bool())
    assert bool((got.isneginf() | (got == 0.0)).all())
    guard = 1 if ring == 64 or private.patch_plan.ranges.modules else 0
    assert opened[0] == 2 * (2 + guard) * ring // 8, "two evaluators send one ring element per image"


def test_a_sentence_classifier_reveals_only_its_class() -> None:
    from tests.hf import tiny

    model = tiny.build("bert", tr.BertForSequenceClassification)
    ids = torch.tensor([[5, 6, 7], [9, 8, 7]])
    with patch(model, replace(PLAIN, reveal="class")) as private, torch.no_grad():
        assert torch.equal(private(input_ids=ids).logits.argmax(1), model(input_ids=ids).logits.argmax(1))


@pytest.mark.parametrize(("name", "reveal"), [("lenet5", "token"), ("resnet-basic", "token")])
def test_a_classifier_has_no_token(name: str, reveal: str) -> None:
    with pytest.raises(ConfigError, match=r"reveal: got 'token' for .*; want a model that generates"):
        patch(images.build(name)[0], replace(PLAIN, reveal=reveal))


def test_a_model_without_classes_has_no_class() -> None:
    model = tr.ResNetModel(images.HF["resnet-basic"][1]())
    with pytest.raises(ConfigError, match="reveal: got 'class' for ResNetModel; want a classifier"):
        patch(model, replace(PLAIN, reveal="class"))


# -- refusals -----------------------------------------------------------------------------------------------------
def test_images_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    model, pixels = images.build("small-lenet")
    with patch(model, PLAIN) as private:
        with pytest.raises(DomainError, match=r"images of shape \(2, 1, 9, 12\) do not fit Network"):
            private(torch.zeros(2, 1, 9, 12))
        with pytest.raises(DomainError, match=r"images of shape \(2, 3, 8, 8\) do not fit Network"):
            private(torch.zeros(2, 3, 8, 8))
        with pytest.raises(DomainError, match="want a floating-point tensor"):
            private(torch.zeros(2, 1, 8, 8, dtype=torch.int64))
        with pytest.raises(DomainError, match=r"shape \(0, 1, 8, 8\)"):
            private(torch.zeros(0, 1, 8, 8))
        with pytest.raises(DomainError, match="NaN or infinite"):
            private(torch.full((1, 1, 8, 8), float("nan")))
        assert private.cost().bytes_total == 0
        assert worst(private(pixels), images.logits(model, pixels)) < ERROR[64], "the session goes on"


def test_resnet_refuses_other_channels() -> None:
    model, _ = images.build("resnet-basic")
    with (
        patch(model, PLAIN) as private,
        pytest.raises(DomainError, match="do not fit ResNetForImageClassification: Make sure that the channel"),
    ):
        private(torch.zeros(1, 1, 16, 16))


def test_unknown_modules_are_listed() -> None:
    class Net(nn.Sequential):
        pass

    unknown = Net(nn.Conv2d(1, 2, 3), nn.PReLU(), nn.Sequential(nn.Flatten(), nn.Bilinear(3, 3, 3)))
    with pytest.raises(PatchMismatch, match=r"2 part\(s\): 1 \(PReLU\), 2.1 \(Bilinear\)"):
        patch(unknown, PLAIN)
    with pytest.raises(PatchMismatch, match=r"patch: got int; want a transformers model or a torch.nn.Module"):
        patch(3, PLAIN)


def test_a_debug_run_names_the_layer_that_leaves_the_range() -> None:
    """The owner can try a network before sharing it: products of 2^10 and more do not fit 10 fractional bits."""
    model, pixels = images.build("small-lenet")
    debug = config(PLAIN, 32, debug_ranges=True)
    with patch(model, debug) as private:
        assert worst(private(pixels), images.logits(model, pixels)) < ERROR[32]
    with torch.no_grad():
        model[4].weight *= 3000.0
        model[4].bias *= 0.0
    tried = replace(debug, calibrate=False)  # calibration would name it before anything is shared
    with patch(model, tried) as private, pytest.raises(DomainError, match=r"conv2d in module '4' reaches 2\^"):
        private(pixels)


# -- plan and costs -------------------------------------------------------------------------------------------------
def test_the_plan_shows_what_happens_to_norms_and_heads() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(27, 4), nn.Softmax(dim=1),
    )  # fmt: skip
    with patch(images.lively(model), PLAIN) as private:
        rows = {row.name: row for row in private.explain().rows}
        assert private.num_parameters() == 4 + (54 + 3) + (27 * 4 + 4), "factor and addend; the convolution has a bias"
    assert rows["0"].becomes == "secret factor and addend per channel"
    assert rows["2"].becomes == "folded into the layer before it, by the owner"
    assert rows["7"].becomes == "left to the client, on opened logits"


def test_a_folded_norm_costs_nothing_and_pools_go_before_their_relu() -> None:
    model, pixels = images.build("vgg16-imagenet")
    with patch(model, TRIO) as private:
        private(pixels)
        costs = private.cost().by_module()
    relus = [name for name, kind in model.named_modules() if isinstance(kind, nn.ReLU)]
    pools = [name for name, kind in model.named_modules() if isinstance(kind, nn.MaxPool2d)]
    assert costs[relus[1]][0] < costs[relus[0]][0] / 3, "a quarter of the elements are left after the pool"
    assert costs[pools[0]][0] > 0
    resnet, pixels = images.build("resnet-basic")
    with patch(resnet, TRIO) as private:
        private(pixels)
        costs = private.cost().by_module()
    assert not any(name.endswith("normalization") for name in costs)
    assert costs["resnet.embedder.pooler"][0] < costs["resnet.embedder.embedder.activation"][0], "swapped likewise"


# -- with everything else -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings",
    [
        {"parallel_sessions": 2},
        {"parallel_sessions": 3, "rotate_roles": True},
        {"device_map": {"": "disk"}},
        {"truncation": "exact"},
    ],
    ids=str,
)
def test_settings_of_every_model_hold_for_images(settings: dict[str, object], tmp_path: Path) -> None:
    model, pixels = images.build("mixed")
    with patch(model, config(TRIO, 64, **settings, offload_folder=str(tmp_path))) as private:
        assert worst(images.logits(private, pixels), images.logits(model, pixels)) < ERROR[64]


def test_preprocessing_of_a_batch_of_images() -> None:
    model, pixels = images.build("resnet-basic")
    with patch(model, config(TRIO, 32)) as private:
        private.preprocess(ForwardPlan({"pixel_values": tuple(pixels.shape)}))
        assert worst(images.logits(private, pixels), images.logits(model, pixels)) < ERROR[32]
        costs = private.cost().to_dict()
    assert 0 < costs["bytes_preprocessing"] < costs["bytes_total"]
