"""Convolutions under protocol "assisted": those that servers multiply give what PyTorch's give; others stay."""

from __future__ import annotations

import pytest
import torch
from private_llm_hf import patch
from private_llm_hf.client import assisted_rows
from private_llm_hf.client.assisted_layers import AssistedConvolution, Products
from private_llm_hf.client.assisted_rows import RowCounts, is_sent, sides_of
from private_llm_hf.client.launch import start_parties
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from private_llm.assisted.fixed_point import BYTES
from tests.hf import tiny
from tests.hf.compare import worst
from tests.hf.test_assisted import ASSISTED, ERROR


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(5, 7, 3, stride=2, padding=1), (2, 5, 11)),
        (nn.Conv2d(3, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 3), bias=False), (2, 3, 9, 10)),
        (nn.Conv2d(3, 6, 4, padding="same", padding_mode="reflect"), (1, 3, 8, 8)),
        (nn.Conv2d(3, 6, 4, stride=4), (3, 8, 8)),  # without a batch
        (nn.Conv3d(2, 5, 2, stride=(1, 2, 2)), (2, 2, 3, 4, 4)),
    ],
)
def test_convolutions_are_pytorchs(layer: nn.Conv2d, shape: tuple[int, ...]) -> None:
    servers, x = start_parties(ASSISTED), torch.randn(shape)
    try:
        made = AssistedConvolution(layer, Products(servers, RowCounts(), "layer", [sides_of(layer)]), 0, "layer")
        made.take("weight", layer.weight)
        made.bias = layer.bias
        with torch.no_grad():
            want = layer(x)
            assert worst(made(x), want) < ERROR
        assert (made.stride, made.kernel_size, made.weight.shape) == (
            layer.stride,
            layer.kernel_size,
            layer.weight.shape,
        )
        windows, inputs = want.numel() // layer.out_channels, layer.weight[0].numel()
        assert servers.costs().bytes_total > windows * BYTES[16] * (inputs + 2 * layer.out_channels)
    finally:
        servers.close()


def test_which_layers_are_sent() -> None:
    """A linear layer of 480 inputs and outputs has 32 multiply-adds a byte; so must a convolution have."""
    assert is_sent(nn.Linear(1, 1))
    assert is_sent(nn.Conv2d(3, 768, 16, stride=16))  # ViT's patches
    assert is_sent(nn.Conv1d(1280, 1280, 3, stride=2))  # Whisper's second
    assert is_sent(nn.Conv2d(512, 512, 3))
    assert is_sent(nn.Conv2d(480, 480, 1))
    assert not is_sent(nn.Conv2d(479, 479, 1))
    assert not is_sent(nn.Conv2d(64, 64, 3))
    assert not is_sent(nn.Conv2d(1024, 1024, 7, groups=1024))
    assert not is_sent(nn.ConvTranspose2d(512, 512, 3))
    assert not is_sent(nn.LayerNorm(4))
    assert not is_sent(nn.MultiheadAttention(4, 2).out_proj)  # whose weight it reads itself


def _resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 256], depths=[1, 2], layer_type="basic", num_labels=4, num_channels=3
    )
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def _vit() -> tuple[nn.Module, dict[str, Tensor]]:
    plain = tiny.build("vit")
    size = plain.config.image_size
    return plain, {"pixel_values": torch.randn(2, 3, size, size)}


@pytest.mark.parametrize(("made", "sent"), [(_resnet, 3), (_vit, 1)])
def test_models_of_images(made: object, sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    plain, given = made()  # type: ignore[operator]
    if made is _vit:  # a tiny one
        monkeypatch.setattr(assisted_rows, "_MACS_AN_ELEMENT", 5)
    with patch(plain.eval(), ASSISTED) as private, torch.no_grad():
        found = [module for module in private.modules() if isinstance(module, AssistedConvolution)]
        assert len(found) == sent
        assert all(module.weight.is_meta for module in found)
        assert worst(private(**given)[0], plain(**given)[0]) < ERROR
