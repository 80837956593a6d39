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
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.party.cache import Attention, CacheUpdateBreak, SecretCache
from private_llm_hf.transformers_versions import CACHE

_MASK = "attention_mask"


class AttentionBreak(CacheUpdateBreak):
    """Of one call of a layer: the cache takes a key and a value, and attention a query."""

    def __init__(
        self, layer: RepeatedLayer, cache: SecretCache, publics: Sequence[Tensor], mask: Tensor | None
    ) -> None:  # fmt: skip
        super().__init__(publics)
        self._layer, self._cache, self._mask = layer, cache, mask
        self._taken: tuple[Fixed, Fixed] | None = None
        self._held: tuple[Tensor, Tensor] | None = None

    def updated(
        self, cache: SecretCache, key: SecretTensor, value: SecretTensor, number: int,
        update: Callable[[], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The cache is updated."""
        self._layer.number = number
        if cache is not self._cache or self._taken is not None or not cache.holds(number):
            self.refuse("another update of a cache")
        if self.reason is not None:
            return update()
        self._taken = key.to_fixed(), value.to_fixed()
        with self.outside():
            self._held = update()
        return self._held

    def attended(
        self, query: SecretTensor, key: Tensor, value: Tensor, mask: Tensor | None, alone: bool, attend: Attention
    ) -> SecretTensor:  # fmt: skip
        """Attention is called. alone: with nothing else but what `attend` knows, which is the same at every call."""
        if self._taken is None or self._held is None or not alone or mask is not self._mask:
            self.refuse("attention that is not a cache's alone")
        elif key is not self._held[0] or value is not self._held[1]:
            self.refuse("attention to something else than what a cache holds")
        held, taken = self._held, self._taken
        self._held = self._taken = None
        if self.reason is not None or held is None or taken is None:
            return attend(query, key, value, mask)  # type: ignore[arg-type]
        self._layer.attend = attend
        given = SecretTensor(query.value(full=True))
        return SecretTensor(self.run((query.value(full=True), *taken), lambda: attend(given, *held, mask).value()))  # type: ignore[arg-type]

    def recompute(self, values: Sequence[Fixed]) -> Fixed:
        """The update and attention, of what the program has made for them."""
        query, key, value = map(SecretTensor, values)
        keys, held = self._cache.update(key, value, self._layer.number)
        return self._layer.attend(query, keys, held, self._mask).value()  # type: ignore[arg-type]


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
