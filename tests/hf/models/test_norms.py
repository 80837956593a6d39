"""What a hand-spelled norm computes is found by trying it, whatever it is called."""

from __future__ import annotations

import pytest
import torch
from private_llm_hf.models.norms import Norm, norm_of
from torch import Tensor, nn


class Named(nn.Module):
    """Called nothing in particular; `formula` decides what it is."""

    def __init__(self, kind: str, eps: float, offset: float, bias: bool = False) -> None:
        super().__init__()
        self.kind, self.tiny, self.offset = kind, eps, offset
        self.weight = nn.Parameter(torch.ones(8))
        self.register_parameter("bias", nn.Parameter(torch.zeros(8)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True) if self.kind == "layer" else x
        out = centred / (centred.square().mean(-1, keepdim=True) + self.tiny).sqrt() * (self.weight + self.offset)
        return out if self.bias is None else out + self.bias


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12, 1e-3])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("bias", [False, True])
def test_every_formula_is_found(kind: str, eps: float, offset: float, bias: bool) -> None:
    assert norm_of(Named(kind, eps, offset, bias)) == Norm(kind, eps, offset)  # type: ignore[arg-type]


class Almost(Named):
    """The norm of half of each row."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x)[..., :4], x[..., 4:]], -1)


class L1(Named):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(-1, keepdim=True) + self.tiny) * self.weight


@pytest.mark.parametrize(
    "module",
    [Almost("rms", 1e-5, 0.0), L1("rms", 1e-5, 0.0), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.05),
     nn.Sequential(nn.LayerNorm(8)), nn.Embedding(8, 8)],
)  # fmt: skip
def test_anything_else_is_none(module: nn.Module) -> None:
    assert norm_of(module) is None


def test_a_group_norm_is_none() -> None:
    """On rows it looks like a layer norm; images it takes over channels and places together."""

    class Grouped(nn.GroupNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    assert norm_of(Grouped(1, 8)) is None
