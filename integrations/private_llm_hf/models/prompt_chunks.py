"""Which models may read a prompt in chunks, one call after the other behind one KV cache, and get the same result."""

from __future__ import annotations

import inspect

from transformers import PretrainedConfig, PreTrainedModel

from private_llm.config import PROMPT_CHUNKS, PrivateConfig
from private_llm.errors import ConfigError
from private_llm.kv_policies.fixed import KEEP_ALL
from private_llm_hf.models.architectures import architecture, classes_of, compared
from private_llm_hf.transformers_versions import CACHE

MOST_SCORES = 1 << 24
"""Scores of attention up to which a chunk is a long one. At its peak a party holds some 30 arrays as large as all
scores of a call (measured, trio), so these take 4 GB; twice as many on a GPU, where short chunks cost more than memory.
"""


def why_whole(model_class: type[PreTrainedModel], config: PretrainedConfig, settings: PrivateConfig) -> str | None:
    """Why a prompt must be read in one piece, or None: all that a token sees has then been read before it."""
    text = config.get_text_config(decoder=True)
    if architecture(config).kind != "decoder" or CACHE not in inspect.signature(model_class.forward).parameters:
        return f"{model_class.__name__} is no decoder with a KV cache"
    if not classes_of(config.model_type) & compared("shares"):
        return f"no test of this project compares {config.model_type!r} with its plaintext model"
    if getattr(text, "use_bidirectional_attention", False):
        return "its tokens see later ones (use_bidirectional_attention)"
    if depends_on_longest(config.to_dict()):
        return "its rotary frequencies depend on the length of the whole prompt"
    if settings.kv_cache != KEEP_ALL:
        return f"kv_cache {settings.kv_cache.name!r} chooses what stays when the whole prompt was read"
    if settings.sparsity is not None:
        return "sparsity chooses neurons for all tokens of a call"
    return None if settings.plan is None else "nodes of a sharding plan read a prompt whole"


def check_prompt_chunk(
    model_class: type[PreTrainedModel], config: PretrainedConfig, settings: PrivateConfig
) -> None:  # fmt: skip
    """Raise ConfigError for a size of chunks that was asked for, if prompts must be read in one piece."""
    if isinstance(settings.prompt_chunk, int):
        reason = why_whole(model_class, config, settings)
        if reason is not None:
            raise ConfigError(
                f"prompt_chunk: got {settings.prompt_chunk}, but prompts must be read in one piece: {reason}; want "
                "'auto' (chunks where they change nothing) or None"
            )


def chunk_of(
    model_class: type[PreTrainedModel], config: PretrainedConfig, settings: PrivateConfig, rows: int, length: int,
    keys: int,
) -> int:  # fmt: skip
    """How many of the `length` tokens of each row are read at a time, from public numbers alone.

    keys: the tokens with those that the cache holds already.
    """
    if settings.prompt_chunk != "auto":
        return settings.prompt_chunk or length
    longer, shorter = PROMPT_CHUNKS
    if length <= shorter or why_whole(model_class, config, settings) is not None:
        return length
    heads = config.get_text_config(decoder=True).num_attention_heads
    most = 2 * MOST_SCORES if settings.device.startswith("cuda") else MOST_SCORES
    return longer if rows * heads * min(length, longer) * keys <= most else shorter


def depends_on_longest(settings: object) -> bool:
    """Whether rotary frequencies change for all positions, and all rows of a batch, as soon as one is long."""
    if not isinstance(settings, dict):
        return False
    if settings.get("rope_type", settings.get("type")) in ("dynamic", "longrope"):
        return True
    return any(depends_on_longest(value) for value in settings.values())
