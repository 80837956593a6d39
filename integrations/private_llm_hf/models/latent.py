"""Attention whose cache holds latents (DeepSeek's MLA): keys and values are made of them anew in every call."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def expands_latents(module: nn.Module) -> bool:
    """Whether a module is such an attention: it writes keys into an empty tensor, which secrets cannot."""
    return (
        callable(getattr(type(module), "expand_kv", None))
        and "kv_b_proj" in dict(module.named_children())
        and all(type(getattr(module, size, None)) is int for size in _SIZES)
    )


def expanded(module: nn.Module, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Latents [B, 1, S, L] and rotated parts [B, 1, S, R] to keys [B, H, S, N + R] and values [B, H, S, V]: joined."""
    nope, value = int(module.qk_nope_head_dim), int(module.v_head_dim)  # type: ignore[arg-type]
    batch, _, length, _ = latent.shape
    both = module.get_submodule("kv_b_proj")(latent).view(batch, length, -1, nope + value).transpose(1, 2)
    key, values = both.split([nope, value], dim=-1)
    return torch.cat((key, turned.expand(-1, key.shape[1], -1, -1)), dim=-1), values
