"""The 32-bit ring: what it cannot compute is refused when a model is patched, and not by the first call."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers as tr
from private_llm_hf import PrivateConfig, patch, register_handler, unregister_handler
from private_llm_hf.vision.description import KINDS
from torch import Tensor, nn

from private_llm.errors import ConfigError

SMALL = PrivateConfig(ring=32, frac_bits=10, calibrate=False)
PLAIN = dataclasses.replace(SMALL, protocol="plain", insecure=True)
WIDE = {"GELU", "SiLU", "Sigmoid", "Tanh", "LayerNorm"}


def no_start(*_: object) -> Any:
    raise AssertionError("parties were started")


def resnet(activation: str) -> tr.ResNetForImageClassification:
    config = tr.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], hidden_act=activation)
    return tr.ResNetForImageClassification(config).eval()


def layer(kind: str) -> nn.Module:
    sizes = {"LayerNorm": 4, "BatchNorm1d": 4, "BatchNorm2d": 4, "Linear": (4, 4), "Conv2d": (4, 4, 1)}
    size = sizes.get(kind, 1 if "Pool" in kind else ())
    return KINDS[kind].build(*size if isinstance(size, tuple) else (size,))


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"Softmax", "LogSoftmax"}))
def test_each_layer_of_networks_runs_or_is_refused_at_once(kind: str) -> None:
    if kind.endswith("2d"):
        model = nn.Sequential(nn.Conv2d(1, 4, 1), layer(kind), nn.Flatten(), nn.LazyLinear(3))
        model(given := torch.zeros(1, 1, 3, 3))
    else:
        model, given = nn.Sequential(nn.Linear(4, 4), layer(kind), nn.Linear(4, 3)), torch.zeros(1, 4)
    if kind in WIDE:
        with pytest.raises(ConfigError, match=rf"ring: got 32 for Network, whose '1' \({kind}\) .*want ring=64"):
            patch(model.eval(), SMALL, start=no_start)
        return
    with patch(model.eval(), PLAIN) as private:
        private(given)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: resnet("gelu"), r"activation' \(GELUActivation\)"),
        (lambda: resnet("gelu_10"), "a small model of it fails there: .*64-bit ring"),  # no rule of its own
        (
            lambda: tr.RegNetForImageClassification(
                tr.RegNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], groups_width=8, layer_type="y")
            ),
            r"\(Sigmoid\)",
        ),
    ],
)
def test_models_of_transformers(model: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"ring: got 32 for .*{said}"):
        patch(model(), SMALL, start=no_start)


def test_handlers_of_users_are_tried() -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sigmoid()

    register_handler(Gate, "secret gate")(lambda module: module)
    try:
        with pytest.raises(ConfigError, match="Network, and a small model of it fails there"):
            patch(nn.Sequential(nn.Linear(4, 4), Gate()), SMALL, start=no_start)
    finally:
        unregister_handler(Gate)
