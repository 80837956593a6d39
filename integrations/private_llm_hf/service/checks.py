"""What a call of one client must fulfil before it may enter a batch that others share, and which may share one.

All of it is public: names, shapes, masks, positions, handles; all parties find the same. What passes runs to its end.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, TransportError, UnsupportedOp
from private_llm.kv_cache.policies.policy import KEEP_ALL, NoCache
from private_llm_hf.checkpoint.miniature import miniature
from private_llm_hf.kv_cache.model_checks import BOUNDED, depends_on_longest, layer_kinds
from private_llm_hf.models import inputs as check
from private_llm_hf.models.architectures import Architecture, architecture, table
from private_llm_hf.models.experts import LEAST_PLACES
from private_llm_hf.models.inputs import image_shape
from private_llm_hf.party.calls import refuse_unknown, table_of
from private_llm_hf.party.model_description import validate_input_shape
from private_llm_hf.party.session_state import SessionState
from private_llm_hf.transformers_versions import CACHE
from private_llm_hf.wire.commands import CacheEdit, Call, CopyCache, CropCache, Encoded, ResetCache, Tokens, Values

_MASKS = ("attention_mask", "decoder_attention_mask")
_MOST_KEPT = 1 << 31


def check_call(state: SessionState, owner: str, call: Call) -> None:
    """Refuse a call that could not run to its end, before anything runs. Local; depends on public facts alone.

    Raises UnsupportedOp for inputs, outputs and arguments that the model or parties do not take, TransportError for
    shapes that no input has, another vocabulary and handles of nothing, DomainError for rows or positions that do not.
    """
    model, config = state.model, state.session.config
    refuse_unknown(call)
    which = architecture(model.config)
    item = _check_input(model, which, call)
    rows, length = item.shape[0], 0 if item.name == "pixel_values" else item.shape[1]
    past = _check_cache(which, config, call, state, owner)
    read = 0 if call.encoded is None else _check_encoded(call.encoded, rows, state, owner)
    if length:
        check.check_positions(model.config, past + length)
    target = model.get_encoder() if call.encode_to is not None else model
    _check_names(target, call.public)
    if call.encode_to is not None and call.public.get("use_cache"):
        raise DomainError("use_cache: got True for an encoder; want it for decoders alone")
    for name in _MASKS:
        own = name == _MASKS[0] and call.encoded is not None
        width = read if own else past + length
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
        any_size = (None,) * max(len(shape), 2)  # where sizes are the layers' business, as many as it has
        wanted = any_size if which.images == "any" else (None, *image_shape(model.config))
    else:
        wanted = (None, None, model.get_input_embeddings().embedding_dim)
    fits = len(shape) == len(wanted)
    if not fits or any(want not in (None, size) for size, want in zip(shape, wanted, strict=True)):
        raise TransportError(f"{item.name}: got shape {list(shape)}; want {[want or 'any' for want in wanted]}")
    return item


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


# -- Which requests may share a batch: those of equal key -------------------------------------------------------------
WASTE = 4  # padding takes at most one of so many positions of a batch that reads prompts

_NARROW = 1024  # positions up to which caches share columns; beyond, each holds at least half of them

_DECODER = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep"})

_tolerates: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def batch_key(model: PreTrainedModel, config: PrivateConfig, call: Call, past: int) -> Hashable | None:
    """Requests of equal key may share a batch; None: alone. past: positions that the call's cache holds.

    Decoders share decode steps whatever their caches hold (up to a factor of two beyond 1024 positions), and prompts
    whose lengths differ by less than a third; encoders share texts of one length. Alone: cache policies other than
    KeepAll, sparsity, prompts under a capacity of experts, encoder-decoders, images, and models that take positions
    from columns. The first call of a model tries a small one, a tenth of a second; others take microseconds.
    """
    alone = config.kv_cache != KEEP_ALL or config.sparsity is not None
    if alone or len(call.secret) != 1 or call.encoded is not None or call.encode_to is not None:
        return None
    item = call.secret[0]
    given = {*call.public}
    usual = len(item.shape) == (2 if isinstance(item, Tokens) else 3)
    if not usual or not isinstance(call.public.get("use_cache", False), bool):
        return None  # it will be refused
    if config.expert_capacity is not None and item.shape[1] > LEAST_PLACES:
        return None
    wanted = (item.name, call.outputs, call.public.get("use_cache"), "logits_to_keep" in given)
    which = architecture(model.config)
    if which.kind == "encoder":
        whole = model.config.model_type in table("batch_first") and call.cache is None
        return ("rows", *wanted, item.shape[1:], tuple(sorted(given - {"attention_mask"}))) if whole else None
    if which.kind != "decoder" or not given <= _DECODER or not _tolerates_padding(model):
        return None
    if call.cache is None and "position_ids" in given:  # may say that several texts are in one row
        return None
    length = item.shape[1]
    held = (call.cache is not None, *wanted, *item.shape[2:], kept_positions(call))
    if past:
        return ("on", *held, length, 0 if past < _NARROW else past.bit_length())
    return ("prompt", *held, bucket(length))


def past_of(held: Callable[[int], int], call: Call, edits: Iterable[CacheEdit], free: Iterable[int]) -> int:
    """Positions that a call's cache will hold after these changes, of what each cache holds now (by handle)."""
    if call.cache is None or call.cache in free:
        return 0
    found: dict[int, int] = {}
    for edit in edits:
        past = found.get(edit.handle, held(edit.handle))
        if isinstance(edit, CropCache):
            found[edit.handle] = max(0, past - edit.count)
        elif isinstance(edit, ResetCache):
            found[edit.handle] = 0
        elif isinstance(edit, CopyCache):
            found[edit.to] = past
    return found.get(call.cache, held(call.cache))


def kept_positions(call: Call) -> int:
    """Of how many last positions logits are made; 0: all of them."""
    keep = call.public.get("logits_to_keep", 0)
    return keep if isinstance(keep, int) and keep < call.secret[0].shape[1] else 0


@functools.cache
def bucket(length: int) -> int:
    """The longest of the prompts that may be read together with one of this length: 1, 2, 4, 6, 9, 13, 18, 25 .."""
    longest = 1
    while longest < length:
        longest = (longest + 1) * WASTE // (WASTE - 1)
    return longest


def _tolerates_padding(model: PreTrainedModel) -> bool:
    if model not in _tolerates:
        _tolerates[model] = tolerates_left_padding(type(model), model.config)
    return _tolerates[model]


# -- which models let padding on the left, with stated positions, change nothing --------------------------------------
# Rows of a batch end at the same column, so that shorter ones begin later, and a model must take positions from the
# numbers that it is told, not from columns (ALiBi, relative biases). A small model of the class shows it in the clear,
# with a cache and without: takes a tenth of a second, knows nothing of the weights.
_LENGTH, _PADDING = 7, 3
_ERROR = 1e-4  # of the largest logit: rounding to single precision stays far below, another position far above


def generates(model_class: type[PreTrainedModel]) -> bool:
    """Whether a class predicts the next token of each position, and nothing else."""
    return model_class.__name__ in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def tolerates_left_padding(model_class: type[PreTrainedModel], config: PretrainedConfig) -> bool:
    """Whether rows of this model that start at different columns compute what each computes alone."""
    if architecture(config).kind != "decoder" or not generates(model_class):
        return False
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        return False
    if not {*layer_kinds(config)} <= {"full_attention", BOUNDED[0]}:  # chunks are of columns
        return False
    if getattr(config, "alibi", False) or depends_on_longest(config.to_dict()):
        return False
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return _agrees(miniature(model_class, config))
    except Exception:  # noqa: BLE001 - a foreign class may raise anything for arguments that it does not take
        return False


def _agrees(model: PreTrainedModel) -> bool:
    """Whether a text says the same alone and after padding, beside a longer one: its last tokens and the next one."""
    texts = torch.arange(2 * (_LENGTH + _PADDING + 1)).view(2, -1) * 37 % 97 + 3
    texts[1, : _PADDING + 1] = texts[1, _PADDING]
    rows, last = texts[:, :-1], texts[:, -1:]
    mask = torch.ones_like(texts)
    mask[1, :_PADDING] = 0
    positions = torch.arange(texts.shape[1]) - torch.tensor([[0], [_PADDING]])
    positions = positions.clamp(min=0)
    alone = _logits(model, rows[1:, _PADDING:], last[1:], None, None)
    beside = _logits(model, rows, last, mask, positions)
    far = (beside[1, -alone.shape[1] :] - alone[0]).abs().max()
    return bool(far <= _ERROR * alone.abs().max())


def _logits(
    model: PreTrainedModel, prompt: Tensor, following: Tensor, mask: Tensor | None, positions: Tensor | None
) -> Tensor:
    """Of a prompt and one step after it, [rows, length + 1, vocabulary]."""
    length = prompt.shape[1]
    cut = {} if mask is None or positions is None else {"attention_mask": mask[:, :length],
                                                        "position_ids": positions[:, :length]}  # fmt: skip
    first = model(input_ids=prompt, use_cache=True, **cut)
    whole = {} if mask is None or positions is None else {"attention_mask": mask, "position_ids": positions[:, length:]}
    second = model(input_ids=following, **{CACHE: first[CACHE]}, use_cache=True, **whole)
    return torch.cat([first.logits, second.logits], 1)
