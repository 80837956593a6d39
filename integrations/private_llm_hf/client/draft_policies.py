"""Which policies of the KV cache drafts may run under: those whose text stays that of single tokens.

A pass over drafts reads several tokens at once. Its queries choose no clusters, see what a window of single tokens
would have evicted by then, and give their attention to evictions, drafts that are rejected as well.
"""

from __future__ import annotations

from private_llm.errors import ConfigError
from private_llm.kv_policies.policy import CachePolicy
from private_llm_hf.client.speculation import FixedCounts


def check_drafts(policy: object, limit: int, counts: FixedCounts | None) -> None:
    """Raise ConfigError where drafts could change the text.

    limit: the most tokens that the cache will hold. counts: how passes read; None: as many drafts as they like, the
    first of them in the prompt's pass.
    """
    if not isinstance(policy, CachePolicy) or _all_seen(policy, limit) or _evicts_by_the_prompt(policy, counts):
        return
    raise ConfigError(
        f"drafts: kv_cache {policy.name!r} evicts or chooses entries of a text of up to {limit} tokens, and a pass "
        "over several drafted tokens does so otherwise than passes over single ones, so the text would change. Drafts "
        "work with KeepAll and HeadMerging, with every policy while nothing is left out of a text of that length, "
        "and with mpcache without levels and snapkv for speculation=SpeculationConfig() with fixed counts, reserve=0, "
        "every=None and recent of at least the tokens of a window; want one of these, or no drafts (leave speculation, "
        "assistant_model and prompt_lookup_num_tokens out)"
    )


def _all_seen(policy: CachePolicy, limit: int) -> bool:
    """Whether every query of a text of `limit` tokens sees all before it, however passes cut it."""
    chosen = policy.selection is not None and policy.selection.shape(limit) is not None
    return not chosen and policy.ranked(limit, limit, limit) == limit == policy.ranked(limit, limit, 1)


def _evicts_by_the_prompt(policy: CachePolicy, counts: FixedCounts | None) -> bool:
    """Whether the prompt alone evicts, in a pass of its own, and no pass over drafts does."""
    if counts is None or counts.reserve or policy.eviction is None or policy.selection is not None:
        return False
    return policy.newest is not None and policy.newest >= counts.window and policy.ranked(_LONG, _LONG, 1) == _LONG


_LONG = 1 << 20
"""Tokens of a text, longer than any."""
