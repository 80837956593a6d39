"""Layers whose attention a model bounds by itself: sliding windows and chunks."""

from __future__ import annotations

from transformers import PretrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs

FULL, BOUNDED = "full_attention", ("sliding_attention", "chunked_attention")
"""Kinds of layers that a cache policy can serve."""


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """The kind of each layer, as transformers' own caches tell them."""
    return list(get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0])


def windowed_layers(config: PretrainedConfig) -> frozenset[int]:
    """Numbers of the layers with a window."""
    return frozenset(number for number, kind in enumerate(layer_kinds(config)) if kind in BOUNDED)
