"""Keys and values that stay where the model runs after a request, so that the next one reads only what is new.

Chats send all that was said before with every message, and agents begin alike. What stays belongs to one session, and
serves the key alone that its request came with.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from private_llm.errors import DomainError
from private_llm.kv_cache.policies.policy import KeepAll

KEEP_TOKENS = 4096


class KeptPrompts:
    """What the sessions of a model have read last, and its cache. Thread-safe; a session's model has one user at a
    time. most: tokens of all sessions together (0: none stays).
    """

    def __init__(self, most: int = KEEP_TOKENS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: WeakKeyDictionary[Any, tuple[Any, str, list[int], Any]] = WeakKeyDictionary()

    def begins(self, model: Any, owner: str, ids: Sequence[int]) -> int:  # noqa: ANN401 - a private model
        """How many of these tokens need not be read again on this model's session: all but the last at most."""
        with self._lock:
            parties, whose, tokens, _ = self._kept.get(model, (None, "", [], None))
        if parties is not model.parties or whose != owner:  # the session was renewed since, or read for another
            return 0
        pairs = zip(tokens, ids[:-1], strict=False)
        return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(tokens), len(ids) - 1))

    def take(self, model: Any, owner: str, ids: Sequence[int]) -> Any:  # noqa: ANN401
        """The cache of the first tokens of `ids` on this model's session, which keeps it no more; None: there is none.

        Its length is how many tokens it holds.
        """
        count = self.begins(model, owner, ids)
        with self._lock:
            *_, tokens, cache = self._kept.pop(model, ([], None))
        return _cut(cache, len(tokens) - count) if count else None

    def keep(self, model: Any, owner: str, tokens: list[int], cache: Any) -> None:  # noqa: ANN401
        """A request ended with this cache, whose tokens are the first of these. As many stay as there is room for."""
        if not self._most or not isinstance(model.parties.config.kv_cache, KeepAll):  # else the past decides what stays
            return
        if any(getattr(layer, "record_past", False) for layer in cache.layers):  # cuts these back for drafts alone
            return
        held = int(cache.get_seq_length())
        with self._lock:
            others = sum(len(each) for other, (*_, each, _) in self._kept.items() if other is not model)
        count = min(held, self._most - others)
        if count > 0 and _cut(cache, held - count) is not None:
            with self._lock:
                self._kept[model] = model.parties, owner, tokens[:count], cache


def _cut(cache: Any, count: int) -> Any:  # noqa: ANN401
    """A cache without its last tokens; None where it cannot forget them, as with a sliding window."""
    if count:
        with contextlib.suppress(DomainError, RuntimeError, ValueError):
            cache.crop(-count)
            return cache
        return None
    return cache
