"""A tiny model and its private twin in a cleartext session, for tests of the party side."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.nn.functional as F
from private_llm_hf.party.model import build_party_model
from torch import Tensor
from transformers import PreTrainedModel

from private_llm.protocols.session import Session
from private_llm.protocols.share import Index
from private_llm.tensor.secret import SecretIndex, SecretTensor
from tests.tensor.secrets import fixed, opened, secret

VOCABULARY = 128

# Weights and activations carry 18 fractional bits. A product of numbers up to 4 is off by 2 * 4 * 2^-19, a row of 64 by
# 1e-3 at worst and 1.2e-4 if roundings are independent; about ten rows follow each other, plus functions with errors
# around 1e-4. All roundings to the same side would give 1e-2, independent ones 1e-3; the bound lies between.
LOGIT_ERROR = 4e-3


def description(model: PreTrainedModel) -> tuple[dict[str, Any], str]:
    """What a party is told about a model: configuration and class name."""
    return json.loads(model.config.to_json_string(use_diff=False)), type(model).__name__


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Floating-point weights by name, tied ones once."""
    tied = dict(model.get_expanded_tied_weights_keys(all_submodels=True))
    return {n: w for n, w in model.state_dict().items() if w.is_floating_point() and n not in tied}


def private_twin(model: PreTrainedModel, session: Session) -> PreTrainedModel:
    """The party's model with the same weights: shares, or plain where the session says weights are public."""
    config, name = description(model)
    weights: dict[str, Any] = dict(weights_of(model))
    if session.config.weights == "secret":
        weights = {n: fixed(session, w) for n, w in weights.items()}
    return build_party_model(config, name, weights, session)


def tokens(session: Session, ids: Tensor) -> SecretIndex:
    """Token ids as a cleartext session holds them."""
    return SecretIndex(session, Index((ids.reshape(-1),), ids.numel(), VOCABULARY), ids.shape)


def one_hot(session: Session, ids: Tensor) -> SecretTensor:
    """Token ids as secret rows."""
    return secret(session, F.one_hot(ids, VOCABULARY).double(), frac=0)


def error(private: Tensor, plain: Tensor, mask: Tensor | None = None) -> float:
    """Largest difference, at unmasked positions."""
    if not isinstance(private, SecretTensor):
        raise TypeError("the party's output is not secret")
    difference = (opened(private.to_fixed()) - plain).abs()
    return float((difference if mask is None else difference[mask.bool()]).max())


def ids(*shape: int, seed: int = 1) -> Tensor:
    """Token ids that are no special tokens."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
