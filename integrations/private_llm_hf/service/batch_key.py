"""Which requests may share a batch: those of equal key. Public facts alone decide, and every party finds the same."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from private_llm.config import PrivateConfig
from private_llm.kv_policies.fixed import KEEP_ALL
from private_llm_hf.models.architectures import architecture, batch_first
from private_llm_hf.models.cache_policies import BOUNDED, layer_kinds
from private_llm_hf.models.miniature import miniature
from private_llm_hf.models.prompt_chunks import depends_on_longest
from private_llm_hf.transformers_versions import CACHE
from private_llm_hf.wire.commands import CacheEdit, Call, CopyCache, CropCache, ResetCache, Tokens

WASTE = 4
"""Padding takes at most one of so many positions of a batch that reads prompts."""

_NARROW = 1024
"""Positions up to which caches share their columns, whatever they hold; beyond, each holds at least half of them."""

_DECODER = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep"})

_tolerates: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def batch_key(model: PreTrainedModel, config: PrivateConfig, call: Call, past: int) -> Hashable | None:
    """Requests of equal key may share a batch; None: alone. past: positions that the call's cache holds.

    Decoders share decode steps whatever their caches hold (up to a factor of two beyond 1024 positions), and prompts
    whose lengths differ by less than a third; encoders share texts of one length. Alone: cache policies other than
    KeepAll, sparsity, encoder-decoders, images, and models that take positions from columns. The first call of a
    model tries a small one, a tenth of a second; others take microseconds.
    """
    alone = config.kv_cache != KEEP_ALL or config.sparsity is not None
    if alone or len(call.secret) != 1 or call.encoded is not None or call.encode_to is not None:
        return None
    item = call.secret[0]
    given = {*call.public}
    usual = len(item.shape) == (2 if isinstance(item, Tokens) else 3)
    if not usual or not isinstance(call.public.get("use_cache", False), bool):
        return None  # it will be refused
    wanted = (item.name, call.outputs, call.public.get("use_cache"), "logits_to_keep" in given)
    which = architecture(model.config)
    if which.kind == "encoder":
        whole = model.config.model_type in batch_first() and call.cache is None
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
    """Positions that a call's cache will hold behind these changes, of what each cache holds now (by handle)."""
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
_ERROR = 1e-4
"""Of the largest logit: rounding to single precision stays far below, another position far above."""


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
    """Whether a text says the same alone and behind padding, beside a longer one: its last tokens and the next one."""
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
    """Of a prompt and one step behind it, [rows, length + 1, vocabulary]."""
    length = prompt.shape[1]
    cut = {} if mask is None or positions is None else {"attention_mask": mask[:, :length],
                                                        "position_ids": positions[:, :length]}  # fmt: skip
    first = model(input_ids=prompt, use_cache=True, **cut)
    whole = {} if mask is None or positions is None else {"attention_mask": mask, "position_ids": positions[:, length:]}
    second = model(input_ids=following, **{CACHE: first[CACHE]}, use_cache=True, **whole)
    return torch.cat([first.logits, second.logits], 1)
