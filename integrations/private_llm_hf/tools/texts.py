"""Plain text as rows of tokens, and how well a model of text predicts it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from private_llm.errors import ConfigError
from private_llm_hf.checkpoint.sample_inputs import evaluating

if TYPE_CHECKING:
    import datasets

_ROWS = 8  # in a call of the model


def load_texts(files: list[Path], dataset: list[str] | None) -> "datasets.Dataset":
    """Texts, a row each, in column "text": of files, or `datasets` name and configuration. Raises ConfigError."""
    try:
        import datasets
    except ImportError:
        raise ConfigError("texts to train on are read by `datasets`: pip install 'private-llm[train]'") from None
    if dataset:
        lines = datasets.load_dataset(*dataset, split="train")["text"]
        return datasets.Dataset.from_dict({"text": ["".join(lines)]})
    names = [str(path) for path in files]
    return datasets.load_dataset("text", data_files=names, sample_by="document", split="train")


def first_token(tokenizer: Any) -> int:  # noqa: ANN401 - transformers is not typed
    """What every row begins with. Raises ConfigError for a tokenizer without such a token."""
    for found in (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id):
        if found is not None:
            return int(found)
    raise ConfigError("the tokenizer has no start token (bos, cls or eos)")


def token_ids(tokenizer: Any, text: str) -> tuple[int, ...]:  # noqa: ANN401 - transformers is not typed
    """The tokens of a text of any length, without special tokens."""
    return tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def encode(tokenizer: Any, text: str) -> Tensor:  # noqa: ANN401 - transformers is not typed
    """The same as a tensor, int64 [S]."""
    return torch.tensor(token_ids(tokenizer, text), dtype=torch.int64)


def windows(ids: Tensor, length: int, bos: int) -> Tensor:
    """Cut a sequence into rows of ``length`` tokens that each begin with the start token."""
    rows = ids[: len(ids) // (length - 1) * (length - 1)].view(-1, length - 1)
    return F.pad(rows, (1, 0), value=bos)


def loss_of(model: torch.nn.Module, rows: Tensor, reduction: str = "mean") -> Tensor:
    """Next-token cross-entropy over the rows."""
    logits = model(input_ids=rows, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def total_nll(model: torch.nn.Module, ids: Tensor, length: int, bos: int) -> float:
    """Negative log-likelihood (nats) of the sequence in disjoint windows; the last one may be shorter."""
    device = next(model.parameters()).device
    full = windows(ids, length, bos)
    rest = F.pad(ids[full.shape[0] * (length - 1) :], (1, 0), value=bos)
    pieces = [*torch.split(full, _ROWS), *([rest[None]] if len(rest) > 1 else [])]
    with evaluating(model):
        return sum(float(loss_of(model, piece.to(device), "sum")) for piece in pieces)
