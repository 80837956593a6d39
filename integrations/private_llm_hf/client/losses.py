"""`labels=`: the loss that the plaintext class would return, computed at the client from the logits that it opens.

Labels stay with the client; no party learns that there are any. Each kind of head has its own loss, as transformers
has (`transformers.loss.loss_utils`): next tokens, masked tokens, classes of tokens, classes of a text or an image.
"""

from __future__ import annotations

import copy
import inspect

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.loss import loss_utils

from private_llm.errors import DomainError, UnsupportedOp

_IGNORED = -100
_HEADS = {
    "ForSequenceClassification": "classes",
    "ForImageClassification": "classes",
    "ForTokenClassification": "classes of tokens",
    "ForMaskedLM": "tokens",
    "ForCausalLM": "next tokens",
    "LMHeadModel": "next tokens",
    "ForConditionalGeneration": "tokens",
}
_INTEGERS = (torch.int64, torch.int32)


def _shifts(original: type[PreTrainedModel]) -> bool:
    """Whether a decoder's loss compares each position with the next label: transformers' own loss does."""
    source = inspect.getsource(original.forward)
    return "loss_function(" in source or "[..., :-1, :]" in source or "[:, :-1, :]" in source


class Labels:
    """The labels of one call, checked before anything is sent.

    original: the plaintext class. reveal: PrivateConfig.reveal; the loss needs logits. Raises UnsupportedOp where there
    is no loss, DomainError for labels that do not fit.
    """

    def __init__(self, original: type[PreTrainedModel], config: PretrainedConfig, reveal: str, labels: object) -> None:
        name = original.__name__
        kind = next((kind for suffix, kind in _HEADS.items() if name.endswith(suffix)), None)
        if kind is None:
            raise UnsupportedOp(
                f"labels: {name} has no head whose loss is known; take its outputs and compute the loss"
            )
        if kind == "next tokens" and not _shifts(original):
            raise UnsupportedOp(
                f"labels: {name} does not compare them with the next tokens, as other decoders do; take its logits and "
                "compute the loss"
            )
        if reveal != "logits":
            raise UnsupportedOp(f"labels: the loss needs logits, and reveal={reveal!r} does not open them")
        if not isinstance(labels, Tensor):
            raise DomainError(f"labels: got {type(labels).__name__}; want a tensor")
        self._kind, self._config = kind, copy.copy(config)  # the loss may note a problem type in its configuration
        self._count = config.get_text_config().vocab_size if kind.endswith("tokens") else config.num_labels
        if kind == "classes of tokens":
            self._count = config.num_labels
        self._labels = labels.detach().cpu()
        if kind != "classes":
            self._check_integers()

    @property
    def labels(self) -> Tensor:
        """On the client's CPU."""
        return self._labels

    @property
    def of_tokens(self) -> bool:
        """Whether a decoder without inputs of its own reads them, shifted."""
        return self._kind == "tokens"

    def check(self, rows: int, length: int, kept: object) -> None:
        """Refuse labels that are not one per position of [rows, length], or not one set of classes per row.

        kept: the call's `logits_to_keep`; a loss wants the logits of all positions.
        """
        if self._kind == "classes":
            self._try(rows)
            return
        if tuple(self._labels.shape) != (rows, length):
            raise DomainError(f"labels: got shape {tuple(self._labels.shape)}; want ({rows}, {length}), as the inputs")
        if kept:
            raise DomainError(f"labels: got logits_to_keep={kept!r}; want the logits of all positions, so leave it out")

    def loss(self, logits: Tensor) -> Tensor:
        """The loss, a float32 scalar."""
        if self._kind == "classes":
            found = loss_utils.ForSequenceClassificationLoss(self._labels, logits, self._config)
        elif self._kind == "next tokens":
            found = loss_utils.ForCausalLMLoss(logits, self._labels, self._count)
        else:
            flat = logits.reshape(-1, self._count)
            found = functional.cross_entropy(flat, self._labels.reshape(-1).long(), ignore_index=_IGNORED)
        made: Tensor = found
        return made

    def _check_integers(self) -> None:
        labels = self._labels
        if labels.dtype not in _INTEGERS or labels.ndim != 2:
            raise DomainError(f"labels: got {labels.dtype} {tuple(labels.shape)}; want integers [batch, length]")
        counted = labels[labels != _IGNORED]
        if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= self._count):
            raise DomainError(
                f"labels: got one out of range; want 0 to {self._count - 1}, or {_IGNORED} to leave it out"
            )

    def _try(self, rows: int) -> None:
        """The loss of made-up logits: labels of a wrong kind, shape or range fail here."""
        try:
            self.loss(torch.zeros(rows, self._count))
        except (RuntimeError, ValueError, IndexError) as error:
            raise DomainError(
                f"labels: got {self._labels.dtype} {tuple(self._labels.shape)} for {rows} row(s) and {self._count} "
                f"class(es): {str(error).splitlines()[0]}"
            ) from None
