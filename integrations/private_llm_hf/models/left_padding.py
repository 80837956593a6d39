"""Which models let padding on the left, with stated positions, change nothing: sessions of theirs may share a pass.

Rows of a batch end at the same column, so that shorter ones begin later, and a model must take positions from the
numbers that it is told, not from columns (ALiBi, relative biases). A small model of the class shows it in the clear,
with a cache and without: takes a tenth of a second, knows nothing of the weights.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from private_llm_hf.models.architectures import architecture
from private_llm_hf.models.miniature import miniature
from private_llm_hf.models.windows import BOUNDED, layer_kinds
from private_llm_hf.transformers_versions import CACHE

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
    if getattr(config, "alibi", False) or _depends_on_longest(config.to_dict()):
        return False
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return _agrees(miniature(model_class, config))
    except Exception:  # noqa: BLE001 - a foreign class may raise anything for arguments that it does not take
        return False


def _depends_on_longest(settings: object) -> bool:
    """Whether rotary frequencies change for all rows as soon as one is long."""
    if not isinstance(settings, dict):
        return False
    if settings.get("rope_type", settings.get("type")) in ("dynamic", "longrope"):
        return True
    return any(_depends_on_longest(value) for value in settings.values())


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
