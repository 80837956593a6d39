"""Inputs far out of range, beside a request of another user: a verdict of their own, and nothing for anybody else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from private_llm_hf.wire.commands import Call, Values
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from tests.harness import TRIO
from tests.hf import tiny
from tests.hf.kv_cache.test_kv_eviction import POLICIES, PROTOCOLS
from tests.hf.party.parties import ids
from tests.hf.service.conftest import Start
from tests.hf.service.sessions import Ask, Done, run_service
from tests.hf.service.test_batch import SAME, worst

LENGTH = 24
CLEAN, WRONG = {0.0}, {1.0}


def words(kind: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Ring elements that no honest client sends."""
    if kind == "random":
        return torch.randint(-(1 << 63), (1 << 63) - 1, shape, generator=torch.Generator().manual_seed(seed))
    return torch.full(shape, {"least": -(1 << 63), "most": (1 << 63) - 1, "large": 1 << 50, "one": 1 << 18}[kind])


def flags(done: Done, place: int) -> set[float]:
    return {float(flag) for flag in done.opened[place].get("range check", torch.zeros(1))}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_company_in_a_pass_is_not_harmed(protocol: str) -> None:
    """Prompts and decode steps of both together. Words are random, as the check of ranges may miss balanced ones."""
    model = tiny.build("llama")
    width, embed = model.config.hidden_size, model.get_input_embeddings()
    bobs = [Ask("bob", embed(ids(1, n, seed=n)).detach().double()) for n in (LENGTH, 1)]
    eves = [Ask("eve", words("random", (1, n, width), seed=n)) for n in (LENGTH, 1)]
    apart = [replace(ask, owner="bob alone") for ask in bobs]
    found = run_service(
        PROTOCOLS[protocol],
        model,
        [*([bob, eve] for bob, eve in zip(bobs, eves, strict=True)), *([ask] for ask in apart)],
    )
    for together, alone in zip(found[:2], found[2:], strict=True):
        assert together.alike
        assert (flags(together, 0), flags(together, 1)) == (CLEAN, WRONG)
        assert worst(together.logits[:1], alone.logits) <= SAME


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_constant_words_harm_nobody_either(protocol: str) -> None:
    """Whether the sender's own flag rises is not said: entries of a row may balance each other."""
    model = tiny.build("llama")
    width, kinds = model.config.hidden_size, ("least", "most", "large", "one")
    given = model.get_input_embeddings()(ids(1, LENGTH, seed=1)).detach().double()
    passes = [[Ask(f"bob {kind}", given), Ask(f"eve {kind}", words(kind, (1, LENGTH, width)))] for kind in kinds]
    *found, alone = run_service(PROTOCOLS[protocol], model, [*passes, [Ask("bob alone", given)]])
    for together in found:
        assert together.alike
        assert flags(together, 0) == CLEAN
        assert worst(together.logits[:1], alone.logits) <= SAME


@pytest.mark.sampled(6)
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_rank_what_cannot_be_ranked(policy: str) -> None:
    company(replace(TRIO, kv_cache=POLICIES[policy]), "random")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("protocol", ["quad", "dealer"])
def test_other_protocols_rank_it_too(protocol: str) -> None:
    company(replace(PROTOCOLS[protocol], kv_cache=POLICIES["shuffled"]), "random")


def company(config: PrivateConfig, kind: str) -> None:
    """Eve's passes between Bob's, and a second of hers with the cache that her first one spoilt."""
    model = tiny.build("llama")
    width = model.config.hidden_size
    bob, eve = Ask("bob", ids(1, 40, seed=1)), Ask("eve", words(kind, (1, 40, width)))
    step, token = replace(bob, given=ids(1, 1, seed=2)), replace(eve, given=words(kind, (1, 1, width), 1))
    again = [replace(ask, owner="bob again") for ask in (bob, step)]
    found = run_service(config, model, [[bob], [eve], [step], [token], [token], [again[0]], [again[1]]])
    assert worst([found[place].logits[0] for place in (0, 2)], [done.logits[0] for done in found[5:]]) <= SAME
    assert [flags(found[place], 0) for place in (0, 2, 5, 6)] == [CLEAN] * 4
    assert flags(found[1], 0) == WRONG


def test_a_users_own_request_fails_and_nothing_else(start: Start) -> None:
    """In a service whose cache policy ranks: Eve's session goes on, Bob's too, and nobody is quarantined."""
    running = start(users=("bob", "eve"), kv_cache=POLICIES["tova"])
    with running.model("bob") as bob, running.model("eve") as eve:
        right = bob(ids(1, 40, seed=1), use_cache=True).logits
        width = bob.config.hidden_size
        with pytest.raises(DomainError, match="left its range"):
            eve(inputs_embeds=torch.full((1, 40, width), 2.0**30), use_cache=True)
        for length in (40, 1, 1):
            item = Values("inputs_embeds", (1, length, width))
            call = Call({"use_cache": True}, (item,), 1, None, None, ("logits",))
            _, found = eve.parties.forward(call, [words("random", item.shape, int(length == 1))])
            assert found["range check"].tolist() == [1]
        for bad in (torch.nan, torch.inf, 2.0**63):
            with pytest.raises(DomainError):
                eve(inputs_embeds=torch.full((1, 40, width), bad))
        for token in (-1, 128, 1 << 40):
            with pytest.raises(DomainError):
                eve(torch.tensor([[5, token]]))
        with pytest.raises(DomainError):
            eve(torch.zeros(1, 0, dtype=torch.int64))
        for user in (eve, bob):
            assert worst([user(ids(1, 40, seed=1), use_cache=True).logits], [right]) <= SAME
    assert not any(watch.downs for watch in running.watches)
    assert not any(service._quarantine.runs_alone(user) for service in running.services for user in ("bob", "eve"))
