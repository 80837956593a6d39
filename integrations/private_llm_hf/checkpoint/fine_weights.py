"""Fractional bits of small weights: as many as it takes that rounding does not show in them.

What counts are the weights as the parties get them: those of layers that take up a norm with the norm's weight in them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from private_llm.config import PrivateConfig
from private_llm.errors import LowPrecision
from private_llm.ranges import REACH, Ranges
from private_llm.ring.ring import Ring
from private_llm_hf.checkpoint.model_spec import folds_norms
from private_llm_hf.checkpoint.norm_readers import norm_readers
from private_llm_hf.checkpoint.weights import skeleton
from private_llm_hf.models.folds import fold_norms

WEIGHT_BITS = 11
"""A layer's weights have a root mean square of 2^WEIGHT_BITS units: rounding is then 1e-4 of them."""

FOLDED_WEIGHT_BITS = 14
"""The same of layers that take up a norm: they would have had more units without it, and they are most layers."""

_MOST_WEIGHT_BITS = 40

_FEW_UNITS = 128.0
"""Weights of a root mean square of fewer units are warned of: logits are then off by 0.01."""


def with_fine_weights(
    model: nn.Module, ranges: Ranges, config: PrivateConfig, folded: Collection[str] = ()
) -> Ranges:  # fmt: skip
    """`ranges`, with more fractional bits for layers whose weights are so small that rounding would show in them.

    Their root mean square is then 2^`WEIGHT_BITS` units or more, as far as the layer's results leave room in a product.
    Layers that read the same input run as one product and get the same bits. folded: convolutions whose weights will be
    others. Weights of layers that take up a norm count with the norm's in them. Warns (LowPrecision) of small weights
    that cannot have more bits: tables, public ones.
    """
    gains = _gains(model, config)
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    groups: dict[tuple[str, int], list[tuple[str, float]]] = {}
    wanted_of = dict.fromkeys(gains, FOLDED_WEIGHT_BITS)
    coarse: dict[str, float] = {}
    for name, part in model.named_modules():
        if not isinstance(part, nn.Linear | nn.Conv2d | Conv1D) or name not in ranges.modules or name in folded:
            continue
        if id(part.weight) in tables or config.weights == "public":
            coarse[name] = _root_mean_square(part.weight)
            continue
        inputs = part.weight.shape[0 if isinstance(part, Conv1D) else 1]
        size = _root_mean_square(
            part.weight if name not in gains else _columns(part) * gains[name], part.weight.numel()
        )
        groups.setdefault((name.rpartition(".")[0], inputs), []).append((name, size))
    modules = ranges.to_dict()
    for members in groups.values():
        sizes = [size for _, size in members]
        wanted = max(
            (wanted_of.get(name, WEIGHT_BITS) - math.floor(math.log2(size)) for name, size in members if size),
            default=0,
        )
        outputs = max(modules[name].get("output", REACH) for name, _ in members)
        bits = min(wanted, Ring(config.ring).value_bits - 1 - config.frac_bits - outputs, _MOST_WEIGHT_BITS)
        if bits > config.frac_bits:
            for name, _ in members:
                modules[name]["weight"] = bits
        if bits < wanted:
            coarse |= {
                name: size * 2.0 ** (max(bits, config.frac_bits) - config.frac_bits)
                for (name, _), size in zip(members, sizes, strict=True)
            }
    few = {name: size * 2.0**config.frac_bits for name, size in coarse.items() if size > 0}
    worst = min(few, key=lambda name: few[name], default=None)
    if config.ring == 64 and worst is not None and few[worst] < _FEW_UNITS:  # 32 bits never have many
        warnings.warn(
            f"the weights of '{worst}' have a root mean square of {few[worst]:.2g} units of the last place, and cannot "
            "have more of them here: answers may differ from the plaintext model's. Scale them up and what they are "
            "multiplied with down",
            LowPrecision,
            stacklevel=5,
        )
    return Ranges(modules)


def _root_mean_square(weight: Tensor, count: int | None = None) -> float:
    """Of `count` entries (default: those of `weight`), which may be norms of several."""
    largest = float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float64))
    return largest / math.sqrt(max(weight.numel() if count is None else count, 1))


def _columns(layer: nn.Linear | nn.Conv2d | Conv1D) -> Tensor:
    """For each input of a linear layer, the norm of its weights."""
    outputs = 1 if isinstance(layer, Conv1D) else 0
    made: Tensor = torch.linalg.vector_norm(layer.weight.detach(), dim=outputs, dtype=torch.float64)
    return made


def _gains(model: nn.Module, config: PrivateConfig) -> dict[str, Tensor]:
    """What layers take up of the norms that they read, if they will."""
    if not isinstance(model, PreTrainedModel) or not folds_norms(config):
        return {}
    bare, found = skeleton(type(model), model.config), dict[str, Tensor]()
    for fold in fold_norms(bare, norm_readers(type(model), model.config)):
        weight = model.get_submodule(fold.norm).get_parameter("weight")
        found[fold.layer] = weight.detach().double() + fold.offset
    return found
