"""Keys and values that stay where the model runs after a request, so that the next one reads only what is new.

Chats send all that was said before with every message, and agents begin alike. What stays belongs to one session, and
serves the key alone that its request came with; a prefix that the gateway declares public serves all.
"""

import contextlib
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from private_llm.errors import DomainError
from private_llm.kv_cache.policies.policy import KeepAll

KEEP_TOKENS = 4096


class KeptPrompts:
    """What a model's sessions read last, and the caches. Thread-safe. most: tokens of all of them (0: nothing).
    public: a beginning that everybody may know, which each session keeps in any case, beside what it read last.
    """

    def __init__(self, most: int = KEEP_TOKENS) -> None:
        self._most = most
        self.public: list[int] = []
        self._lock = threading.Lock()
        self._kept: WeakKeyDictionary[Any, dict[bool, tuple[Any, str, list[int], Any]]] = WeakKeyDictionary()

    def begins(self, model: Any, owner: str, ids: Sequence[int]) -> int:  # noqa: ANN401 - a private model
        """How many of these tokens need not be read again on this model's session: all but the last at most."""
        with self._lock:
            parties, whose, tokens, _ = self._kept.get(model, {}).get(self._goes_on(ids), (None, "", [], None))
        if parties is not model.parties:  # the session was renewed since
            return 0
        alike = _alike(tokens, ids[:-1])
        return alike if whose == owner else min(alike, _alike(tokens, self.public))

    def take(self, model: Any, owner: str, ids: Sequence[int]) -> Any:  # noqa: ANN401
        """The cache of the first tokens of `ids` on this model's session, as long as it holds, or None; it leaves."""
        count = self.begins(model, owner, ids)
        with self._lock:
            *_, tokens, cache = self._kept.get(model, {}).pop(self._goes_on(ids), ([], None))
        return _cut(cache, len(tokens) - count) if count else None

    def keep(self, model: Any, owner: str, tokens: list[int], cache: Any) -> None:  # noqa: ANN401
        """A request ended with this cache, whose tokens are the first of these. As many stay as there is room for."""
        if not isinstance(model.parties.config.kv_cache, KeepAll):  # the past decides what stays
            return
        if any(getattr(layer, "record_past", False) for layer in cache.layers):  # cuts these back for drafts alone
            return
        held = int(cache.get_seq_length())
        with self._lock:
            kept = self._kept.pop(model, {}).items()
            self._kept[model] = own = {at: each for at, each in kept if each[0] is model.parties}
            own.pop(self._goes_on(tokens), None)
            every = [each for one in self._kept.values() for *_, each, _ in one.values()]
            others = sum(len(each) - _alike(each, self.public) for each in every)
        count = min(held, _alike(tokens, self.public) + max(0, self._most - others))
        if count > 0 and _cut(cache, held - count) is not None:
            with self._lock:
                self._kept[model][self._goes_on(tokens)] = model.parties, owner, tokens[:count], cache

    def _goes_on(self, ids: Sequence[int]) -> bool:
        """Whether a prompt begins with the public prefix."""
        return _alike(ids, self.public) == len(self.public)


def _alike(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(tokens, others, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(tokens), len(others)))


def _cut(cache: Any, count: int) -> Any:  # noqa: ANN401
    """A cache without its last tokens; None where it cannot forget them, as with a sliding window."""
    if count:
        with contextlib.suppress(DomainError, RuntimeError, ValueError):
            cache.crop(-count)
            return cache
        return None
    return cache
