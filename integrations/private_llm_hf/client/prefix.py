"""A beginning that several texts share, such as a system message: read once, and gone on from by each of them."""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from private_llm.errors import DomainError, UnsupportedOp
from private_llm_hf.transformers_versions import CACHE


class Prefix:
    """Tokens that were read, and the cache after them: parties keep it, under "assisted" the client.

        system = model.prefix(tokenizer("You are a poet.", return_tensors="pt").input_ids)
        model.generate(text, past_key_values=system.before(text))

    Reading costs what a prompt of as many tokens costs, and `before` nothing but control messages. Parties see which
    calls go on from the same prefix. It belongs to the session that read it, and is gone with it.
    """

    def __init__(self, model: Any, input_ids: Tensor) -> None:  # noqa: ANN401 - any private model that generates
        """input_ids: int64 [1, n]. Raises DomainError for another shape, UnsupportedOp for a model without a cache of
        what it reads (encoders, two stacks, the policy `none`), and as a call of the model.
        """
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or len(input_ids) != 1 or not input_ids.numel():
            shape = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
            raise DomainError(f"prefix: got {shape}; want the token ids of one text, [1, length]")
        self.ids = input_ids
        keeps = model.can_generate() and not model.config.is_encoder_decoder
        cache = model(input_ids=input_ids, use_cache=True).get(CACHE) if keeps else None
        if cache is None:
            raise UnsupportedOp(
                f"prefix: {type(model).__name__} keeps nothing of what it has read; want a decoder with a KV cache"
            )
        self._cache: Cache = cache

    def before(self, text: Tensor) -> Cache:
        """A cache for a call or a generation with `text`, int64 [batch, length], whose rows begin with this prefix and
        are longer. Give generate() the whole text, a call what follows the prefix. Raises DomainError for other texts.
        """
        known = self.ids.shape[1]
        if text.ndim != 2 or text.shape[1] <= known or not torch.equal(text[:, :known], self.ids.expand(len(text), -1)):
            raise DomainError(
                f"prefix: got a text of shape {tuple(text.shape)} that does not go on after the prefix's {known} "
                "tokens; want rows that begin with them, without padding before"
            )
        cache = copy.deepcopy(self._cache)
        if len(text) > 1:
            cache.batch_repeat_interleave(len(text))
        return cache
