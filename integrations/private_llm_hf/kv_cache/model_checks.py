"""Whether a model's attention can follow a policy of the KV cache: asked before anything is sent."""

import inspect

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from private_llm.config import PROMPT_CHUNKS, PrivateConfig
from private_llm.errors import ConfigError
from private_llm.kv_cache.merged_heads import can_merge
from private_llm.kv_cache.policies.policy import KEEP_ALL
from private_llm_hf.models.architectures import architecture, attention_of, classes_of, compared
from private_llm_hf.transformers_versions import CACHE


def check_cache_policy(model: PreTrainedModel, config: PrivateConfig) -> None:
    """Raise ConfigError if the model cannot follow `config.kv_cache`."""
    policy, model_type = config.kv_cache, model.config.model_type
    if policy == KEEP_ALL:
        return
    if (
        architecture(model.config).kind != "decoder"
        or attention_of(model_type, type(model)) != "private_llm"
        or any(expands_latents(module) for module in model.modules())
    ):
        raise ConfigError(
            f"{type(model).__name__}: kv_cache {policy.name!r} needs a decoder whose attention goes "
            "through transformers' attention interface with the keys and values of its cache, which "
            f"{model_type!r} is not; use KeepAll()"
        )
    text = model.config.get_text_config(decoder=True)
    if policy.in_secret and len(windowed_layers(model.config)) >= text.num_hidden_layers:
        raise ConfigError(
            f"{type(model).__name__}: kv_cache {policy.name!r} chooses among entries whose positions are secret, which "
            "a window over positions cannot follow, and every layer of this model has one; use SlidingWindow(...) or "
            "KeepAll(), or set the window in its config to None if no text will be longer"
        )
    groups = getattr(text, "num_key_value_heads", None)
    groups = int(groups or (1 if getattr(text, "multi_query", False) else text.num_attention_heads))
    if policy.sharing.layers > 1 and groups > 1 and config.sparsity is not None and config.sparsity.heads:
        raise ConfigError(
            f"kv_cache: shared_layers: got {policy.sharing.layers} with heads that are predicted, whose order differs "
            "from layer to layer, so a layer cannot use another's choices; want shared_layers=1 or "
            "CometConfig(heads=False)"
        )
    merged, heads = policy.merged_heads, text.num_attention_heads
    if merged <= 1:
        return
    if not can_merge(heads, groups, merged):
        raise ConfigError(
            f"{type(model).__name__}: kv_cache: got {merged} merged heads for {heads} query heads and {groups} key "
            "heads; want a number that divides the query heads of a key head, or is a multiple of them and divides all"
        )
    if config.sparsity is not None and config.sparsity.heads:
        raise ConfigError("kv_cache: heads that are predicted cannot be merged; want CometConfig(heads=False)")
    if any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()):
        raise ConfigError(
            f"{type(model).__name__}: its heads have sinks of their own, so they cannot be merged; use another kv_cache"
        )


# -- windows of attention ---------------------------------------------------------------------------------------------
FULL, BOUNDED = "full_attention", ("sliding_attention", "chunked_attention")  # layers that a policy can serve


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """The kind of each layer, as transformers' own caches tell them."""
    return list(get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0])


def windowed_layers(config: PretrainedConfig) -> frozenset[int]:
    """Numbers of the layers with a window."""
    return frozenset(number for number, kind in enumerate(layer_kinds(config)) if kind in BOUNDED)


# -- latent attention -------------------------------------------------------------------------------------------------
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


# -- prompts in chunks on one KV cache: which models get the same result ---------------------------------------------
MOST_SCORES = 1 << 24
"""Scores of attention up to which a chunk is a long one. At its peak a party holds some 30 arrays as large as all
scores of a call (measured, trio), so these take 4 GB; twice as many on a GPU, where short chunks cost more than memory.
"""


def why_whole(model_class: type[PreTrainedModel], config: PretrainedConfig, settings: PrivateConfig) -> str | None:
    """Why a prompt must be read in one piece, or None: all that a token sees has then been read before it."""
    text = config.get_text_config(decoder=True)
    if architecture(config).kind != "decoder" or CACHE not in inspect.signature(model_class.forward).parameters:
        return f"chunks need a decoder with a KV cache, unlike {model_class.__name__}"
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
    """How many of a row's `length` tokens are read at a time, by public numbers. keys: tokens, cached ones too."""
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
