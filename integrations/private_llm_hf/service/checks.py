"""What a call of one client must fulfil before it may enter a batch that others share.

All of it is public: names, shapes, masks, positions, handles. What passes here runs to its end.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, TransportError, UnsupportedOp
from private_llm.kv_policies.fixed import NoCache
from private_llm_hf.client import inputs as check
from private_llm_hf.models.architectures import Architecture, architecture
from private_llm_hf.party.calls import refuse_unknown, table_of
from private_llm_hf.party.model_description import validate_input_shape
from private_llm_hf.party.session_state import SessionState
from private_llm_hf.wire.commands import Call, Encoded, Tokens, Values

_MASKS = ("attention_mask", "decoder_attention_mask")
_MOST_KEPT = 1 << 31


def check_call(model: PreTrainedModel, config: PrivateConfig, call: Call, state: SessionState, owner: str) -> None:
    """Refuse a call that could not run to its end, before anything runs. Local; depends on public facts alone.

    Raises UnsupportedOp for inputs, outputs and arguments that the model or parties do not take, TransportError for
    shapes that no input has, another vocabulary and handles of nothing, DomainError for rows and positions that do not
    fit.
    """
    refuse_unknown(call)
    which = architecture(model.config)
    item = _check_input(model, which, call)
    rows, length = item.shape[0], 0 if item.name == "pixel_values" else item.shape[1]
    past = _check_cache(which, config, call, state, owner)
    behind = 0 if call.encoded is None else _check_encoded(call.encoded, rows, state, owner)
    if length:
        check.check_positions(model.config, past + length)
    target = model.get_encoder() if call.encode_to is not None else model
    _check_names(target, call.public)
    if call.encode_to is not None and call.public.get("use_cache"):
        raise DomainError("use_cache: got True for an encoder; want it for decoders alone")
    for name in _MASKS:
        own = name == _MASKS[0] and call.encoded is not None
        width = behind if own else past + length
        if name in call.public:
            check.check_mask(name, _tensor(name, call.public), rows, width, which.kind == "decoder")
    _check_numbers(model.config, call.public, rows, length)
    _check_head(model, which, rows)


def _check_input(model: PreTrainedModel, which: Architecture, call: Call) -> Tokens | Values:
    if len(call.secret) != 1:
        raise TransportError(f"secret inputs: got {len(call.secret)}; want one")
    item = call.secret[0]
    two = which.kind == "encoder-decoder"
    if two and (call.encoded is None) == (call.encode_to is None):
        raise TransportError("an encoder-decoder runs its encoder (encode_to) or its decoder (encoded); want one")
    if not two and (call.encoded is not None or call.encode_to is not None):
        raise TransportError(f"{type(model).__name__} has one stack; want no encoder output")
    prefix = "decoder_" if call.encoded is not None else ""
    names = ("pixel_values",) if which.kind == "vision" else (f"{prefix}input_ids", f"{prefix}inputs_embeds")
    if item.name not in names:
        raise TransportError(f"secret input: got {item.name}; want {' or '.join(names)}")
    shape = validate_input_shape(item.shape)
    if isinstance(item, Tokens):
        table_of(model, item)
        wanted: tuple[int | None, ...] = (None, None)
    elif which.kind == "vision":
        wanted = _image(model.config, which, len(shape))
    else:
        wanted = (None, None, model.get_input_embeddings().embedding_dim)
    fits = len(shape) == len(wanted)
    if not fits or any(want not in (None, size) for size, want in zip(shape, wanted, strict=True)):
        raise TransportError(f"{item.name}: got shape {list(shape)}; want {[want or 'any' for want in wanted]}")
    return item


def _image(config: PretrainedConfig, which: Architecture, dimensions: int) -> tuple[int | None, ...]:
    """Sizes that an image must have; where they are the layers' business, as many as it has."""
    if which.images == "any":
        return (None,) * max(dimensions, 2)
    size = config.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return (None, config.num_channels, height, width)


def _check_cache(which: Architecture, config: PrivateConfig, call: Call, state: SessionState, owner: str) -> int:
    """Positions that the call's cache holds."""
    handle, rows = call.cache, call.rows
    if handle is None:
        return 0
    if not which.caches or call.encode_to is not None or isinstance(config.kv_cache, NoCache):
        raise TransportError(f"cache {handle}: this model, or the configuration, keeps none")
    if state.encoded_shape(owner, handle) is not None:
        raise TransportError(f"cache {handle}: this is the number of an encoder's output")
    past = state.past(owner, handle)
    if past and state.rows(owner, handle) != rows:
        raise DomainError(f"cache {handle}: got {rows} rows; it holds {state.rows(owner, handle)}")
    return past


def _check_encoded(encoded: Encoded, rows: int, state: SessionState, owner: str) -> int:
    """Positions of the encoder's output that a decoder reads."""
    shape = state.encoded_shape(owner, encoded.handle)
    if shape is None:
        raise TransportError(f"no encoder output {encoded.handle} is kept here")
    index = encoded.rows
    if index is not None and (not index.numel() or int(index.min()) < 0 or int(index.max()) >= shape[0]):
        raise DomainError(f"encoder output {encoded.handle}: want rows 0 to {shape[0] - 1}")
    count = shape[0] if index is None else len(index)
    if count != rows:
        raise DomainError(f"encoder output {encoded.handle}: got {count} rows; want {rows}, as many as the inputs")
    return shape[1]


def _check_names(target: PreTrainedModel, public: Mapping[str, object]) -> None:
    parameters = inspect.signature(target.forward).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    unknown = sorted({*public} - {*parameters})
    if unknown:
        raise UnsupportedOp(f"{type(target).__name__} takes no {', '.join(unknown)}")


def _check_numbers(config: PretrainedConfig, public: Mapping[str, Any], rows: int, length: int) -> None:
    for name in ("position_ids", "token_type_ids"):
        if name in public:
            value = check.check_index(name, _tensor(name, public), rows, length)
            if name == "position_ids":
                check.check_position_values(config, value)
                continue
            most = getattr(config, "type_vocab_size", None) or config.get_text_config().vocab_size
            if int(value.min()) < 0 or int(value.max()) >= most:
                raise DomainError(f"{name}: got {int(value.min())} to {int(value.max())}; want 0 to {most - 1}")
    keep = public.get("logits_to_keep", 0)
    if type(keep) is not int or not 0 <= keep < _MOST_KEPT:
        raise DomainError(f"logits_to_keep: got {str(keep)[:80]}; want a number of last positions, or 0 for all")
    if not isinstance(public.get("use_cache", False), bool):
        raise DomainError("use_cache: want True or False")


def _tensor(name: str, public: Mapping[str, object]) -> Tensor:
    value = public[name]
    if not isinstance(value, Tensor):
        raise DomainError(f"{name}: got {type(value).__name__}; want a tensor of integers")
    return value


def _check_head(model: PreTrainedModel, which: Architecture, rows: int) -> None:
    """A decoder that classifies several rows looks for their padding token."""
    classifies = type(model).__name__.endswith("ForSequenceClassification")
    if which.kind == "decoder" and classifies and rows > 1 and model.config.get_text_config().pad_token_id is None:
        raise DomainError("classifying a batch needs a padding token; set config.pad_token_id")
