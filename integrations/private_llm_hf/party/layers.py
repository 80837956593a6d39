"""Decoder layers as units whose middle is attention: the rest of a layer is the same at every step.

A layer is one of a `ModuleList` that is called with hidden states and a cache. Its program stops where the cache is
updated and attention is called, one straight behind the other; whatever does more than that runs as smaller regions do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from private_llm.kv_policies.fixed import KEEP_ALL
from private_llm.protocols.session import Session
from private_llm.replay.graph_break import this_call
from private_llm.replay.modules import repeated_around
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.party.cache import CacheUpdateBreak, SecretCache
from private_llm_hf.transformers_versions import CACHE

Attention = Callable[[SecretTensor, SecretTensor, SecretTensor], SecretTensor]
"""Of a query, keys and values."""


class AttentionBreak(CacheUpdateBreak):
    """Of one call of a layer: the cache takes a key and a value, and attention a query."""

    def __init__(self, layer: RepeatedLayer, cache: SecretCache, publics: Sequence[Tensor]) -> None:
        super().__init__(publics)
        self._layer, self._cache = layer, cache
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

    def attended(self, query: SecretTensor, key: Tensor, value: Tensor, alone: bool, attend: Attention) -> SecretTensor:
        """Attention is called. alone: with nothing but what `attend` knows, which is the same at every call."""
        if self._taken is None or self._held is None or not alone:
            self.refuse("attention that is not a cache's alone")
        elif key is not self._held[0] or value is not self._held[1]:
            self.refuse("attention to something else than what a cache holds")
        held, taken = self._held, self._taken
        self._held = self._taken = None
        if self.reason is not None or held is None or taken is None:
            return attend(query, key, value)  # type: ignore[arg-type]
        self._layer.attend = attend
        given = SecretTensor(query.value(full=True))
        return SecretTensor(self.run((query.value(full=True), *taken), lambda: attend(given, *held).value()))  # type: ignore[arg-type]

    def recompute(self, values: Sequence[Fixed]) -> Fixed:
        """The update and attention, of what the program has made for them."""
        query, key, value = map(SecretTensor, values)
        keys, held = self._cache.update(key, value, self._layer.number)
        return self._layer.attend(query, keys, held).value()  # type: ignore[arg-type]


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
        found = _facts(kwargs) if cache.policy == KEEP_ALL else None
        if found is None:
            return self._forward(*args, **kwargs)
        facts, publics = found
        # no program of a step begins an empty cache, as a prompt or chunk of one token does
        facts = cache.holds(self.number), facts
        return self._around(args[0], kwargs, facts, AttentionBreak(self, cache, publics))


def _facts(kwargs: Mapping[str, Any]) -> tuple[Hashable, list[Tensor]] | None:
    """What is the same at every call, and tensors that are not; None for arguments that are neither."""
    facts: list[Hashable] = []
    publics: list[Tensor] = []
    for name, each in kwargs.items():
        if name == CACHE:
            continue
        for one in each if isinstance(each, tuple) else (each,):
            if one is None or isinstance(one, bool):
                facts.append((name, one))
            elif type(one) is Tensor and one.numel() and name != "attention_mask":
                facts.append((name, tuple(one.shape), None if one.is_contiguous() else one.stride(), one.dtype))
                publics.append(one)
            else:
                return None
    return tuple(facts), publics


def are_layers(modules: nn.ModuleList) -> bool:
    """Whether these may be decoder layers: modules of one kind that contain others, several of them or one."""
    return len({type(each) for each in modules}) == 1 and all(len(list(each.children())) > 1 for each in modules)
