"""Secret complex numbers: turned by public ones as rotary embeddings do, and good for nothing else."""

from __future__ import annotations

import pytest
import torch

from private_llm.errors import UnsupportedOp
from tests.tensor.secrets import noise, opened, plain_session, secret

S = plain_session()
TURNS = torch.polar(torch.ones(1, 3, 2), torch.arange(6.0).view(1, 3, 2))


@pytest.mark.parametrize("side", ["left", "right"])
def test_pairs_are_turned(side: str) -> None:
    x = noise(2, 3, 4)

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(2, 3, 2, 2))
        return torch.view_as_real(TURNS * pairs if side == "left" else pairs * TURNS).flatten(2)

    found = turned(secret(S, x))
    assert (opened(found) - turned(x.float())).abs().max() < 1e-4


def test_shape_and_device_are_public() -> None:
    made = torch.view_as_complex(secret(S, noise(2, 3, 2)))
    assert (made.shape, made.device.type) == (torch.Size([2, 3]), "cpu")


def test_anything_else_is_refused() -> None:
    made = torch.view_as_complex(secret(S, noise(2, 3, 2)))
    with pytest.raises(UnsupportedOp, match=r"abs.* of secret complex numbers"):
        torch.abs(made)
    with pytest.raises(UnsupportedOp, match="public complex tensors"):
        made * torch.ones(2, 3)
    with pytest.raises(UnsupportedOp, match="public complex tensors"):
        made * made
    with pytest.raises(UnsupportedOp, match="want pairs"):
        torch.view_as_complex(secret(S, noise(2, 3)))
