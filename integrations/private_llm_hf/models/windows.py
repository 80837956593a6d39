"""Layers whose attention a model bounds by itself: sliding windows and chunks."""

from __future__ import annotations

from transformers import PretrainedConfig

_BOUNDED = ("sliding_attention", "chunked_attention")


def windowed_layers(config: PretrainedConfig) -> frozenset[int]:
    """Numbers of the layers with a window, as transformers' own caches tell them."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        return frozenset(number for number, kind in enumerate(kinds) if kind in _BOUNDED)
    bounded = any(getattr(text, name, None) is not None for name in ("sliding_window", "attention_chunk_size"))
    return frozenset(range(text.num_hidden_layers)) if bounded else frozenset()
