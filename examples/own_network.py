"""A network of your own: any torch.nn module made of layers with a private rule, without a transformers configuration.

    python examples/own_network.py

`patch()` follows its forward once. What it cannot run in private is named in the error, before anything is sent.
"""

from __future__ import annotations

import torch
from private_llm_hf import PrivateConfig, patch
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions with norms, and a path around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """x + what the convolutions make of it."""
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(x + self.second_norm(self.second(y)))


def main() -> None:
    """Run the network in plaintext and under three protocols, and compare."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), Residual(8), nn.Flatten(), nn.Linear(8 * 4 * 4, 10)
    ).eval()
    images = torch.rand(4, 1, 8, 8)
    with torch.no_grad():
        wanted = network(images)
        for protocol in ("trio", "quad", "dealer"):
            with patch(network, PrivateConfig.from_dict({"protocol": protocol}), images=images) as private:
                error = (private(images) - wanted).abs().max()
                print(f"{protocol}: largest error {error:.1e}, {private.cost()!r}")


if __name__ == "__main__":
    main()
