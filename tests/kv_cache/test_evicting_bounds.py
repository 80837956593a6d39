"""When caches that evict keep their budget, what can no longer be cropped, and what an eviction costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kv_cache.evicting import AttentionQuery, EvictingLayer
from private_llm.kv_cache.policies.papers import MPCacheConfig
from private_llm.net.ledger import Cost
from private_llm.nn.attention import attend
from private_llm.protocols.registry import Pricing
from private_llm.protocols.session import Session
from private_llm.tensor.fixed import Fixed
from tests.harness import run_meta, run_parties
from tests.kv_cache.selection_prices import eviction_cost
from tests.kv_cache.test_evicting import ONCE, config, table
from tests.tensor.secrets import fixed, noise, plain_session


def test_the_budget_is_kept_again_as_soon_as_so_many_more_are_held() -> None:
    session = plain_session()
    layer = EvictingLayer(MPCacheConfig.paper(gamma=0.6, least=6, most=8, recent=1, levels=(), every=3))
    held = []
    for new in (17, *[1] * 7):
        x = fixed(session, noise(1, 1, new, 4))
        layer.buffer.append(x, x)
        mask = table(torch.ones(1, 17, dtype=torch.bool), layer.buffer.position - new, new)
        mask = layer.buffer.columns(mask, 1)
        layer.attend(AttentionQuery(x, mask, mask, 0.5), new)
        held.append(layer.buffer.length)
    assert held == [8, 9, 10, 8, 9, 10, 8, 9]


@pytest.mark.parametrize("short", [0, 13])
@pytest.mark.parametrize("drop", [True, False])
def test_what_follows_an_eviction_cannot_be_cropped(drop: bool, short: int) -> None:
    """Beside a row of four tokens, too: the newest two of them are no first ones."""
    session = plain_session()
    layer = EvictingLayer(replace(ONCE, first=3, drop=drop))
    x, tokens = fixed(session, noise(2, 1, 17, 4)), torch.ones(2, 17, dtype=torch.bool)
    tokens[0, :short] = False
    layer.buffer.append(x, x)
    mask = table(tokens, 0, 17)
    layer.attend(AttentionQuery(x, mask, mask, 0.5), 17)
    with pytest.raises(DomainError, match="only the last 2 can be removed"):
        layer.crop(3)
    layer.crop(2)
    layer.crop(15)
    assert layer.buffer.length == 0


def test_a_leader_that_has_not_chosen_is_named() -> None:
    session = plain_session()
    layer = EvictingLayer(ONCE, EvictingLayer(ONCE))
    x = fixed(session, noise(1, 1, 17, 4))
    layer.buffer.append(x, x)
    mask = table(torch.ones(1, 17, dtype=torch.bool), 0, 17)
    with pytest.raises(UnsupportedOp, match="whose choices this one shares has made none"):
        layer.attend(AttentionQuery(x, mask, mask, 0.5), 17)


# -- costs ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("protocol", ["trio", "quad", "dealer"])
def test_an_eviction_costs_what_the_formula_says_and_a_follower_pays_a_shuffle(protocol: str) -> None:
    """Of a prompt of 21 tokens, 11 stay: 1 first, 2 newest, 8 of 18; masses are of 7 queries of 2 heads."""
    made = config(protocol)
    policy = MPCacheConfig.paper(gamma=0.5, least=7, recent=2, first=1, levels=(), observed=0.3)
    mask = table(torch.ones(2, 21, dtype=torch.bool), 0, 21)
    inputs = [noise(2, 4, 21, 4), noise(2, 2, 21, 4, seed=1), noise(2, 2, 21, 3, seed=2)]

    def whole(leader: bool) -> Cost:
        def program(session: Session, q: Fixed, k: Fixed, v: Fixed) -> Fixed:
            first, out = EvictingLayer(policy), q
            for layer in (first,) if leader else (first, EvictingLayer(policy, first)):
                session.protocol.ledger.reset()
                layer.buffer.append(k, v)
                out = layer.attend(AttentionQuery(q, mask, mask, 0.5), 21)
            return out

        cost = run_parties(made, program, inputs).cost
        if protocol != "quad":
            assert run_meta(made, program, [x.shape for x in inputs]) == cost
        return cost

    plain = run_parties(made, lambda s, q, k, v: attend(q, k, v, mask, 0.5), inputs).cost
    pricing = Pricing.of(made)
    bits = 18 + (7 * 2).bit_length() + 2
    assert whole(leader=True) == plain + eviction_cost(pricing, 4, 18, 8, bits, 7)
    assert whole(leader=False) == plain + pricing.prices.shuffle(pricing.ring, 4 * 18 * 7, left=4 * 8 * 7)
