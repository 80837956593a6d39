"""Decoder layers as units whose middle is attention: the rest of a layer is the same at every step.

A layer is one of a `ModuleList` that is called with hidden states and a cache. Its program stops where the cache is
updated and attention is called, one straight behind the other; whatever does more than that runs as smaller regions do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from private_llm.kv_policies.fixed import KEEP_ALL
from private_llm.protocols.session import Session
from private_llm.replay.graph_break import this_call
from private_llm.replay.modules import repeated_around
from private_llm_hf.party.cache import Attention, AttentionBreak, SecretCache
from private_llm_hf.transformers_versions import CACHE

_MASK = "attention_mask"


class RepeatedLayer:
    """A decoder layer, and what its last call in Python said of its attention."""

    attend: Attention

    def __init__(
        self, forward: Callable[..., Any], name: str, session: Session, kind: Hashable,
        weights: Sequence[tuple[str, object]], number: int,
    ) -> None:  # fmt: skip
        """number: its place among the layers, and usually in the cache."""
        self._forward, self.number = forward, number
        self._around = repeated_around(forward, name, session, kind, weights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a module's own signature
        """As the layer's own forward."""
        cache = kwargs.get(CACHE)
        if (
            self._around is None
            or len(args) != 1
            or type(cache) is not SecretCache
            or this_call.graph_break is not None
        ):
            return self._forward(*args, **kwargs)
        # no program begins an empty cache, also where a call looks like that of a step: a prompt of one token does
        found = _facts(kwargs) if cache.policy == KEEP_ALL and cache.holds(self.number) else None
        if found is None:
            return self._forward(*args, **kwargs)
        facts, publics, mask = found
        return self._around(args[0], kwargs, facts, AttentionBreak(self, cache, publics, mask))


def _facts(kwargs: Mapping[str, Any]) -> tuple[Hashable, list[Tensor], Tensor | None] | None:
    """What is the same at every call, tensors that are not, and the mask of attention, which no program reads; None for
    arguments that are nothing of these, and for a mask under which nobody sees anything.
    """
    facts: list[Hashable] = []
    publics: list[Tensor] = []
    mask: Tensor | None = None
    for name, each in kwargs.items():
        if name == CACHE:
            continue
        if name == _MASK and type(each) is Tensor:
            if each.dtype != torch.bool or not _shows_some(each):
                return None
            mask = each
            facts.append((name, True))
            continue
        for one in each if isinstance(each, tuple) else (each,):
            if one is None or isinstance(one, bool):
                facts.append((name, one))
            elif type(one) is Tensor and one.numel() and name != _MASK:
                known = next((n for n, x in enumerate(publics) if x is one), None)  # recorded as one, it stays one
                facts.append((name, tuple(one.shape), None if one.is_contiguous() else one.stride(), one.dtype, known))
                publics.append(one)
            else:
                return None
    return tuple(facts), publics, mask


def _shows_some(mask: Tensor) -> bool:
    """Whether any query may see any key; remembered, because every layer meets the same mask."""
    if not hasattr(mask, "_private_shows_some"):
        mask._private_shows_some = bool(mask.any())  # type: ignore[attr-defined]
    return bool(mask._private_shows_some)  # type: ignore[attr-defined]


def are_layers(modules: nn.ModuleList) -> bool:
    """Whether these may be decoder layers: modules of one kind that contain others, several of them or one."""
    return len({type(each) for each in modules}) == 1 and all(len(list(each.children())) > 1 for each in modules)
