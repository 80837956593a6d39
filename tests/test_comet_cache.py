"""Comet's cache is a study: all its tests are in `tests/system`, and one of each part is in the gate."""

from __future__ import annotations

from comet_cache.refill import Strategy

from tests.system import test_refill, test_refilling_cache


def test_what_active_heads_read_is_a_dense_cache() -> None:
    test_refilling_cache.test_what_active_heads_read_is_a_dense_cache("trio", Strategy.PREFETCH)


def test_eviction_and_shortening_keep_the_count() -> None:
    test_refill.test_eviction_and_shortening_keep_the_count()
