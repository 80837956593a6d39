"""Calibration of models of images: pictures of noise, or the owner's; tight rings are named, garbage is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from private_llm_hf import AutoPrivateModelForImageClassification, PrivateConfig, patch, ranges_of_checkpoint
from private_llm_hf.checkpoint.calibration_runs import loaded_ranges
from private_llm_hf.checkpoint.sample_inputs import SPAN, pictures
from private_llm_hf.vision.network import Network
from torch import nn

from private_llm.errors import DomainError, TightRange
from private_llm.ranges import Ranges
from tests.hf import images

SMALL = PrivateConfig(ring=32, frac_bits=10)


@pytest.mark.full
@pytest.mark.parametrize("name", ["resnet-basic", "mobilenet_v2", "small-resnet", "lenet5"])
@pytest.mark.parametrize("ring", [64, 32])
def test_known_ranges_make_comparisons_shorter_and_answers_no_worse(name: str, ring: int) -> None:
    model, pixels = images.build(name)
    want, sent = images.logits(model, pixels), []
    for known in (True, False):
        config = PrivateConfig(calibrate=known) if ring == 64 else PrivateConfig(ring=32, frac_bits=10, calibrate=known)
        with patch(model, config, images=pixels) as private:
            assert bool(private.patch_plan.ranges.modules) == known
            assert float((images.logits(private, pixels) - want).abs().max()) <= (2e-3 if ring == 64 else 0.2)
            sent.append(private.cost().by_op()["msb"][0])
    assert sent[0] < sent[1]


def test_pictures_span_what_processors_leave() -> None:
    model, _ = images.build("resnet-basic")
    shown = pictures(model.config)
    assert shown.shape[1] == model.config.num_channels
    assert float(shown.abs().max()) == SPAN
    rough, smooth = (picture.diff(dim=-1).abs().mean() / picture.abs().mean() for picture in shown[:2])
    assert smooth < rough / 2


def test_a_network_that_does_not_say_its_shape_is_calibrated_in_the_small_ring_if_a_usual_one_fits() -> None:
    model, pixels = images.build("lenet5")
    network = Network.of(model)
    assert loaded_ranges(network, SMALL).modules
    assert not loaded_ranges(network, PrivateConfig()).modules
    unusual = Network.of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 17 * 17, 3)))
    with pytest.warns(TightRange, match="no usual image size fits"):
        assert not loaded_ranges(unusual, SMALL).modules
    assert loaded_ranges(unusual, SMALL, torch.zeros(1, 1, 19, 19)).modules
    assert loaded_ranges(Network.of(model, pixels.shape[1:]), SMALL).modules


@pytest.mark.parametrize("ring", [64, 32])
def test_images_far_beyond_calibration_are_right_or_refused(ring: int) -> None:
    """In 32 bits products wrap at 2^10; what wraps everywhere must not come out as an answer."""
    model, pixels = images.build("resnet-basic")
    config = SMALL if ring == 32 else PrivateConfig()
    refused = []
    with patch(model, config, images=pixels) as private:
        for factor in (1.0, 8.0, 300.0, 3000.0, 20_000.0, 100_000.0):
            want = images.logits(model, pixels * factor)
            try:
                wrong = float((images.logits(private, pixels * factor) - want).abs().max())
                assert wrong <= 0.02 * max(1.0, float(want.abs().max()))
            except DomainError as reason:
                refused.append(str(reason))
    assert refused
    assert all("left its range" in reason or "leaves the ring" in reason or "encode" in reason for reason in refused)


def test_a_ring_that_is_nearly_full_is_said_to_be() -> None:
    model, pixels = images.build("small-resnet")
    network = Network.of(model, pixels.shape[1:])
    last = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]
    with torch.no_grad():
        last.weight.mul_(900.0 / float(images.logits(network, pictures(network.config)).abs().max()))
    with pytest.warns(
        TightRange, match=r"reached .* 32-bit ring with 10 fractional bits holds less than 1024.*frac_bits="
    ):
        loaded_ranges(network, SMALL)


@pytest.mark.parametrize("factor", [4, 20])
def test_each_ring_is_refused_at_its_own_limit(factor: int) -> None:
    """A product of 2^32 comes out as 0 in a 32-bit ring, and a check of results cannot see that: calibration does."""
    network, ones = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(6)]), torch.ones(1, 8)
    with torch.no_grad():
        for layer in network:
            layer.weight.copy_(factor * torch.eye(8))
        want = network(ones)
    config = replace(SMALL, protocol="plain", insecure=True)
    calibrated = "module '5' reached .* holds less than 1024" if factor == 4 else "module '4' has values"
    with pytest.raises(DomainError, match=calibrated):
        patch(network, config, images=ones)
    with pytest.raises(DomainError, match=r"holds less than 1024|has values"):
        patch(network, config)  # on noise, of the size that the first layer takes
    with patch(network, replace(config, ring=64, frac_bits=18)) as wide:
        if factor == 4:
            torch.testing.assert_close(wide(ones), want)
        else:
            with pytest.raises(DomainError, match="a value left its range"):
                wide(ones)


def test_images_of_the_owner_s(tmp_path: Path) -> None:
    model, pixels = images.build("resnet-basic")
    model.save_pretrained(tmp_path)
    auto = AutoPrivateModelForImageClassification
    noise = ranges_of_checkpoint(str(tmp_path), PrivateConfig(), auto)
    dark = ranges_of_checkpoint(str(tmp_path), PrivateConfig(), auto, images=pixels / 100)
    assert noise.modules.keys() == dark.modules.keys()
    assert noise != dark


@pytest.mark.parametrize("ring", [32, 64])
@pytest.mark.parametrize("bits", [4, 6])
def test_ranges_of_few_fractional_bits_are_ranges(ring: int, bits: int) -> None:
    """Small weights get a few bits more than these, which are less than 8."""
    torch.manual_seed(3)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    with torch.no_grad():
        network[0].weight.mul_(64.0)  # 7 bits are enough
    given = torch.randn(2, 4) / 16
    config = PrivateConfig(ring=ring, frac_bits=bits, protocol="plain", insecure=True)
    with patch(network, config, images=given) as private:
        found = private.patch_plan.ranges
        assert Ranges(found.to_dict()) == found
        assert (private(given) - network(given)).abs().max() < 2.0 ** (4 - bits)
