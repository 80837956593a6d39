"""The bundled network on digits it never saw: private accuracy within half a point of plaintext."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from private_llm_hf import AutoPrivateModelForImageClassification, Network, PrivateConfig
from private_llm_hf.vision.networks import digits, digits_model
from torch import Tensor

from tests.hf.conftest import TRIO

POINTS = 0.5
"""Of 360 images one may come out differently (0.28 points), not two."""

SMALL = {"ring": 32, "frac_bits": 10}


def accuracy(model: torch.nn.Module, images: Tensor, labels: Tensor) -> float:
    """Per cent of right answers."""
    with torch.no_grad():
        return 100.0 * float((model(images).argmax(1) == labels).double().mean())


@pytest.fixture(scope="module")
def plain() -> Network:
    found: Network = Network.from_pretrained(digits_model())
    return found.eval()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", [
    replace(TRIO, **SMALL, reveal="class"),
    replace(TRIO, **SMALL, weights="public"),
    replace(TRIO, **SMALL, relu_bits=18),
    replace(TRIO, reveal="class"),
    replace(TRIO, **SMALL, protocol="quad", reveal="class"),
], ids=["32-bit", "32-bit public weights", "32-bit key bits", "64-bit", "32-bit four parties"])  # fmt: skip
def test_private_accuracy(plain: Network, config: PrivateConfig) -> None:
    images, labels = digits(held_out=True)
    with AutoPrivateModelForImageClassification.from_pretrained(digits_model(), config) as private:
        found = accuracy(private, images, labels)
    assert abs(found - accuracy(plain, images, labels)) <= POINTS


def test_the_bundled_network_is_as_good_as_its_card_says(plain: Network) -> None:
    images, labels = digits(held_out=True)
    assert len(labels) == 360
    assert bool((labels.bincount(minlength=10) > 20).all())
    assert f"{accuracy(plain, images, labels):.2f} % of 360 images" in (Path(digits_model()) / "README.md").read_text()
    assert sum(path.stat().st_size for path in Path(digits_model()).iterdir()) < 500_000


def test_held_out_digits_are_not_among_the_others() -> None:
    kept, rest = digits(held_out=True)[0], digits(held_out=False)[0]
    assert len(kept) + len(rest) == 1797
    assert kept.shape[1:] == rest.shape[1:] == (1, 8, 8)
    assert 0.0 <= float(rest.min()) < float(rest.max()) == 1.0
    assert not {tuple(row.flatten().tolist()) for row in kept} & {tuple(row.flatten().tolist()) for row in rest}
