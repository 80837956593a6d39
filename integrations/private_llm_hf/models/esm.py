"""ESM's modules that spell a GELU by hand, and its embeddings, which it leaves out for tokens that were looked up."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

UNMASKED = 1 - 0.15 * 0.8
"""The part of tokens that ESM's training left unmasked, by which a text without masks is scaled."""


class PrivateEsmIntermediate(nn.Module):
    """The first half of the feed-forward block."""

    def __init__(self, original: Any) -> None:  # noqa: ANN401 - transformers' module
        super().__init__()
        self.dense = original.dense

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[.., H] to [.., intermediate]."""
        return F.gelu(self.dense(hidden_states))


class PrivateEsmLMHead(nn.Module):
    """The head over the vocabulary."""

    def __init__(self, original: Any) -> None:  # noqa: ANN401 - transformers' module
        super().__init__()
        self.dense, self.layer_norm, self.decoder = original.dense, original.layer_norm, original.decoder
        self.bias = original.bias

    def forward(self, features: Tensor, **_: object) -> Tensor:
        """[.., H] to [.., vocabulary]."""
        made: Tensor = self.decoder(self.layer_norm(F.gelu(self.dense(features)))) + self.bias
        return made


def is_esm(module: nn.Module) -> bool:
    """Whether a module is ESM without a head."""
    return type(module).__name__ == "EsmModel"


def embedding_first(
    model: Any,  # noqa: ANN401 - transformers' module
    input_ids: None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    inputs_embeds: Tensor,
    **kwargs: Any,  # noqa: ANN401 - as the module
) -> Any:  # noqa: ANN401 - as the module
    """EsmModel.forward of embeddings that were looked up: transformers leaves out what follows the lookup for these.

    Tokens are scaled as in a text without masks, which would change the factor: the client refuses them
    (`check_mask_tokens`). Rotary positions are counted by place, others after padding.
    """
    _ = input_ids  # heads pass it on
    scaled = inputs_embeds * UNMASKED if model.embeddings.token_dropout else inputs_embeds
    embedded = model.embeddings(inputs_embeds=scaled, attention_mask=attention_mask, position_ids=position_ids)
    places = None if model.position_embedding_type == "rotary" else position_ids
    return type(model).forward(
        model, inputs_embeds=embedded, attention_mask=attention_mask, position_ids=places, **kwargs
    )
