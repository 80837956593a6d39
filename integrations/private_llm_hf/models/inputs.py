"""Checks of what users pass in, before anything is sent. Every check raises DomainError: what came, what is wanted."""

import copy
import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.loss import loss_utils

from private_llm.errors import ConfigError, DomainError, UnsupportedOp
from private_llm_hf.models.architectures import architecture

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_values(name: str, value: object) -> None:
    """Refuse a tensor whose values are not simply there: on the meta device, or sparse."""
    if isinstance(value, Tensor) and (value.is_meta or value.layout is not torch.strided):
        raise DomainError(
            f"{name}: got a tensor on device {value.device}, {value.layout}; want a dense one with values"
        )


def _tensor(name: str, value: object, wanted: str, dtypes: Sequence[torch.dtype], *shape: int | None) -> Tensor:
    """A tensor of one of these dtypes (none: any) and this shape, where None is any size from 1 on; no shape: any."""
    if not isinstance(value, Tensor):
        raise DomainError(f"{name}: got {type(value).__name__}; want {wanted}")
    have = tuple(value.shape)
    fits = not shape or (len(have) == len(shape) and all(n == m or m is None for n, m in zip(have, shape, strict=True)))
    if (dtypes and value.dtype not in dtypes) or not fits or 0 in have:
        raise DomainError(f"{name}: got {value.dtype}, shape {have}; want {wanted}")
    return value


def check_tokens(name: str, ids: object, vocabulary: int) -> Tensor:
    """Token ids [B, S] below `vocabulary`, B and S at least 1, as int64 on the CPU."""
    wanted = "integer token ids [batch, length], at least one a row (tokenizer: return_tensors='pt')"
    ids = _tensor(name, ids, wanted, _INTEGERS, None, None)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise DomainError(
            f"{name}: got a token id outside the vocabulary; want 0 to {vocabulary - 1} (use the model's tokenizer)"
        )
    return ids.to(device="cpu", dtype=torch.int64)


def check_mask_tokens(name: str, ids: Tensor, config: PretrainedConfig) -> None:
    """Refuse mask tokens where a model scales a text by how many it has (ESM), which would be a secret division."""
    mask = getattr(config, "mask_token_id", None)
    if getattr(config, "token_dropout", False) and mask is not None and bool((ids == mask).any()):
        raise DomainError(
            f"{name}: got the mask token ({mask}), by whose number this model scales the whole text "
            "(config.token_dropout), for which there is no private rule; want a text without it"
        )


def check_mask(name: str, mask: object, rows: int, length: int, may_be_empty: bool) -> Tensor:
    """A padding mask [rows, length] of 0 and 1 as int64; a row may mask everything only if `may_be_empty`."""
    mask = _tensor(name, mask, f"shape ({rows}, {length}): one 0 or 1 per row and position", (), rows, length)
    values = mask.to(device="cpu", dtype=torch.int64)
    if not bool(((values == 0) | (values == 1)).all()) or not torch.equal(values.to(mask.dtype), mask.cpu()):
        raise DomainError(f"{name}: got values other than 0 and 1; want 1 where a token counts and 0 for padding")
    empty = [row for row in range(rows) if not bool(values[row].any())]
    if empty and not may_be_empty:
        raise DomainError(f"{name}: row(s) {empty} mask every position; want at least one token per row")
    return values


def check_index(name: str, value: object, rows: int, length: int) -> Tensor:
    """Public integers (positions, segment numbers) of shape [rows or 1, length], as int64 on the CPU."""
    wanted = f"an integer tensor ({rows}, {length})"
    one = isinstance(value, Tensor) and value.shape[:1] == (1,)
    return _tensor(name, value, wanted, _INTEGERS, 1 if one else rows, length).to(device="cpu", dtype=torch.int64)


GENERATED = "generate: prompt and new tokens take"  # refused before the first token; the last one needs no position


def check_positions(config: PretrainedConfig, length: int, said: str = "sequence length: got") -> None:
    """Refuse sequences beyond the model's positions. said: what has such a length (`GENERATED`)."""
    limit = max_positions(config)
    if limit is not None and length > limit:
        raise DomainError(f"{said} {length} positions; the model has {limit} (shorten the prompt or max_new_tokens)")


def max_positions(config: PretrainedConfig) -> int | None:
    """How many positions a model has, or None if it is not limited."""
    positions = architecture(config).positions
    limit = getattr(config, "max_position_embeddings", getattr(config, "max_seq_len", None))
    if positions == "unlimited" or not isinstance(limit, int):
        return None
    return limit - config.pad_token_id - 1 if positions == "after padding" else limit


def image_shape(config: PretrainedConfig) -> tuple[int, ...]:
    """Channels, height and width of a model's images. Raises ConfigError where the configuration does not say."""
    if config.model_type == "network":
        if config.image_shape is None:
            raise ConfigError("this network does not say what images it takes; give channels x height x width")
        return tuple(config.image_shape)
    size = getattr(config, "image_size", 224)
    return (config.num_channels, *(size if isinstance(size, list | tuple) else (size, size)))


def check_position_values(config: PretrainedConfig, positions: Tensor) -> None:
    """Refuse positions outside the table."""
    limit = getattr(config, "max_position_embeddings", None)
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or (limit is not None and high >= limit):
        raise DomainError(f"position_ids: got {low} to {high}; want 0 to {limit - 1 if limit else 'any'}")


def check_last_token(config: PretrainedConfig, rows: int, mask: Tensor | None, ids: Tensor | None) -> None:
    """A decoder with a classification head looks at each row's last token that is not the padding token. Parties look
    at the last one, so padding must be on the left, and no text may end with the padding token.
    """
    if rows > 1 and config.pad_token_id is None:
        raise DomainError("classifying a batch needs a padding token; set config.pad_token_id")
    if mask is not None and not bool(mask[:, -1].all()):
        raise DomainError("attention_mask: got padding on the right; want it on the left (padding_side='left')")
    pad = config.get_text_config().pad_token_id
    if ids is not None and pad is not None and bool((ids[:, -1] == pad).any()):
        raise DomainError(
            f"input_ids: a row ends with the padding token ({pad}), so that the plaintext model would classify an "
            "earlier one; put padding on the left (padding_side='left'), and no padding token at the end of a text"
        )


def check_embeds(name: str, embeds: object, width: int | None) -> Tensor:
    """Embeddings [B, S, width] as floats on the CPU, none of the three 0; width None: any."""
    wanted = f"a floating-point tensor [batch, length, {width or 'hidden'}]"
    return _tensor(name, embeds, wanted, _FLOATS, None, None, width).cpu()


def check_pixels(name: str, pixels: object, config: PretrainedConfig) -> Tensor:
    """Images [B, C, H, W] as floats; where sizes are the layers' business only the batch is checked here."""
    shape: tuple[int | None, ...] = ()
    if architecture(config).images == "sized":
        shape = (None, *image_shape(config))
    sizes = ", ".join(map(str, shape[1:])) or "channels, height, width"
    checked = _tensor(name, pixels, f"a floating-point tensor [batch, {sizes}]", _FLOATS, *shape)
    if checked.ndim < 2:
        raise DomainError(f"{name}: got shape {tuple(checked.shape)}; want [batch, {sizes}]")
    return checked.cpu()


# -- `labels=`: the loss that the plaintext class would return, computed at the client from the logits that it opens ---
# Labels stay with the client; no party learns that there are any. Each kind of head has its own loss, as transformers
# has (`transformers.loss.loss_utils`).
_IGNORED = -100
_HEADS = {
    "ForSequenceClassification": "classes", "ForImageClassification": "classes",
    "ForTokenClassification": "classes of tokens", "ForMaskedLM": "tokens", "ForCausalLM": "next tokens",
    "LMHeadModel": "next tokens", "ForConditionalGeneration": "tokens",
}  # fmt: skip


class Labels:
    """The labels of a call, checked before anything is sent. original: the plaintext class. reveal: the loss needs
    logits. Raises UnsupportedOp where there is no loss, DomainError for labels that do not fit.
    """

    def __init__(self, original: type[PreTrainedModel], config: PretrainedConfig, reveal: str, labels: object) -> None:
        name = original.__name__
        kind = next((kind for suffix, kind in _HEADS.items() if name.endswith(suffix)), None)
        if kind is None:
            raise UnsupportedOp(
                f"labels: {name} has no head whose loss is known; take its outputs and compute the loss"
            )
        shifting = ("loss_function(", "[..., :-1, :]", "[:, :-1, :]")  # transformers' own loss does
        if kind == "next tokens" and not any(map(inspect.getsource(original.forward).__contains__, shifting)):
            raise UnsupportedOp(
                f"labels: {name} does not compare them with the next tokens, as other decoders do; take its logits and "
                "compute the loss"
            )
        if reveal != "logits":
            raise UnsupportedOp(f"labels: the loss needs logits, and reveal={reveal!r} does not open them")
        self._kind, self._config = kind, copy.copy(config)  # the loss may note a problem type in its configuration
        self._count = config.num_labels if kind.startswith("classes") else config.get_text_config().vocab_size
        self.labels = _tensor("labels", labels, "a tensor", ()).detach().cpu()
        if kind != "classes":
            self.labels = _tensor("labels", self.labels, "integers [batch, length]", _INTEGERS[:2], None, None)
            self.labels = self.labels.long().contiguous()
            counted = self.labels[self.labels != _IGNORED]
            if counted.numel() and (int(counted.min()) < 0 or int(counted.max()) >= self._count):
                raise DomainError(
                    f"labels: got one out of range; want 0 to {self._count - 1}, or {_IGNORED} to leave it out"
                )

    @property
    def of_tokens(self) -> bool:
        """Whether a decoder without inputs of its own reads them, shifted."""
        return self._kind == "tokens"

    def check(self, rows: int, length: int, kept: object) -> None:
        """Refuse labels that are not one for each of [rows, length] positions, all of them kept, or a set a row."""
        if self._kind == "classes":
            try:
                self.loss(torch.zeros(rows, self._count))  # labels of a wrong kind, shape or range fail here
            except (RuntimeError, ValueError, IndexError) as error:
                raise DomainError(
                    f"labels: got {self.labels.dtype} {tuple(self.labels.shape)} for {rows} row(s) and {self._count} "
                    f"class(es): {str(error).splitlines()[0]}"
                ) from None
        elif tuple(self.labels.shape) != (rows, length):
            raise DomainError(f"labels: got shape {tuple(self.labels.shape)}; want ({rows}, {length}), as the inputs")
        elif kept:
            raise DomainError(f"labels: got logits_to_keep={kept!r}; want the logits of all positions, so leave it out")

    def loss(self, logits: Tensor) -> Tensor:
        """The loss, a float32 scalar."""
        found: Tensor
        if self._kind == "classes":
            found = loss_utils.ForSequenceClassificationLoss(self.labels, logits, self._config)
        else:
            known = loss_utils.ForCausalLMLoss if self._kind == "next tokens" else loss_utils.ForMaskedLMLoss
            found = known(logits.contiguous(), self.labels, self._count)
        return found
