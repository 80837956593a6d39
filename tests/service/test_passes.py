"""Passes that serve several sessions: each gets what it would get alone, and nothing of the others."""

from __future__ import annotations

import pytest
import torch
from private_llm_hf.party.kept import Kept
from torch import Tensor

from private_llm.config import PrivateConfig
from tests.harness import PLAIN, TRIO
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR
from tests.hf_party.parties import ids
from tests.service.sessions import Ask, run_service

SAME = 2e-3
"""What a session gets in company and alone differ by roundings only."""
QUAD = PrivateConfig(protocol="quad")
LENGTHS = {"a": 5, "b": 9, "c": 12}


def prompts(mark: str = "") -> list[Ask]:
    return [Ask(owner + mark, ids(1, n, seed=n)) for owner, n in LENGTHS.items()]


def steps(seed: int, mark: str = "", owners: str = "abc") -> list[Ask]:
    return [Ask(owner + mark, ids(1, 1, seed=seed + ord(owner))) for owner in owners]


def worst(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def alone(asks: list[Ask]) -> list[list[Ask]]:
    return [[ask] for ask in asks]


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma3_text", "qwen2", "qwen3"])
def test_decode_steps_of_sessions_with_different_pasts(name: str) -> None:
    """Two steps together, then alone again, as sessions that were alone all the time (and as the plaintext model)."""
    model = tiny.build(name)
    together = [*alone(prompts()), steps(1), steps(2), *alone(steps(3))]
    apart = [*alone(prompts("'")), *alone(steps(1, "'")), *alone(steps(2, "'")), *alone(steps(3, "'"))]
    found = run_service(PLAIN, model, [*together, *apart])
    assert found[3].alike
    assert found[4].alike
    got = [*found[3].logits, *found[4].logits, *(done.logits[0] for done in found[5:8])]
    assert worst(got, [done.logits[0] for done in found[11:]]) <= SAME
    assert worst([done.logits[0] for done in found[:3]], [done.logits[0] for done in found[8:11]]) == 0
    text = torch.cat([ids(1, 12, seed=12), *(ids(1, 1, seed=n + ord("c")) for n in (1, 2, 3))], 1)
    plain = model(text).logits[0, 12:].detach()
    assert max(float((got[n][0, 0] - plain[i]).abs().max()) for i, n in enumerate((2, 5, 8))) <= LOGIT_ERROR


@pytest.mark.parametrize("config", [TRIO, QUAD], ids=["trio", "quad"])
def test_on_shares(config: PrivateConfig) -> None:
    model = tiny.build("llama")
    both = [*alone(prompts()), steps(1), *alone(prompts("'")), *alone(steps(1, "'"))]
    found = run_service(config, model, both)
    assert worst(found[3].logits, [done.logits[0] for done in found[7:]]) <= SAME
    assert {float(flag) for each in found[3].opened for flag in each["range check"]} == {0.0}


def test_sessions_join_and_leave() -> None:
    """Whoever is there: each session goes on where it was. Columns that only a longer one needed go with it."""

    def widths(kept: Kept) -> list[int]:
        return sorted(cache.get_seq_length() for cache in kept.caches())

    model = tiny.build("llama")
    script = ["ab", "abc", "ac", "b", "ba", "cb", "abc"]
    passes = [steps(n, owners=owners) for n, owners in enumerate(script)]
    looks = [step for each in passes for step in (each, widths)]
    apart = [[Ask(ask.owner + "'", ask.given)] for each in passes for ask in each]
    found = run_service(PLAIN, model, [*alone(prompts()), *looks, lambda kept: kept.forget("c"), widths,
                                       *alone(prompts("'")), *apart])  # fmt: skip
    got = [logits for n in range(7) for logits in found[3 + 2 * n].logits]
    assert worst(got, [done.logits[0] for done in found[-len(apart) :]]) <= SAME
    # a: 5, 9 and 12 positions at first; one cache for each company, none wider than its longest member
    assert [found[4 + 2 * n] for n in range(7)] == [[10, 12], [13], [11, 14], [12, 14], [13, 14], [9, 15], [16]]
    assert found[18] == [15]


def test_nothing_is_copied_while_the_company_stays() -> None:
    def place(kept: Kept) -> list[int]:
        return [cache.layers[0].buffer._rows[0].parts[0].data_ptr() for cache in kept.caches()]

    passes = [step for n in range(6) for step in (steps(n), place)]
    found = run_service(PLAIN, tiny.build("llama"), [*alone(prompts()), *passes])
    places = [found[4 + 2 * n] for n in range(6)]
    assert {len(each) for each in places} == {1}
    assert places == places[:1] * 6


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "opt"])
def test_prompts_of_different_lengths(name: str) -> None:
    """10, 12 and 13 tokens, two rows in one of them; all logits are asked for. They go on together at once."""
    texts = {"a": ids(1, 10, seed=4), "b": ids(2, 13, seed=5), "c": ids(1, 12, seed=6)}
    prompt = [Ask(owner, text) for owner, text in texts.items()]
    step = [Ask(owner, ids(len(text), 1, seed=9)) for owner, text in texts.items()]
    other = [[Ask(ask.owner + "'", ask.given)] for ask in (*prompt, *step)]
    together, next_one, *apart = run_service(PLAIN, tiny.build(name), [prompt, step, *other])
    assert together.alike
    assert next_one.alike
    assert [each.shape for each in together.logits] == [(1, 10, 128), (2, 13, 128), (1, 12, 128)]
    assert worst([*together.logits, *next_one.logits], [done.logits[0] for done in apart]) <= SAME


@pytest.mark.parametrize("name", ["llama", "opt", "gemma3_text"])
def test_padding_in_a_sessions_own_prompt(name: str) -> None:
    """A batch of two texts with padding beside a session without: masks and positions stay each one's own."""
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[0, :4] = 0
    longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.int64)], 1)
    stated = {} if name == "opt" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    later = {} if name == "opt" else {"position_ids": longer.cumsum(1)[:, -1:] - 1}

    def asks(mark: str) -> tuple[list[Ask], list[Ask]]:
        first = [Ask("a" + mark, ids(2, 10, seed=1), public={"attention_mask": mask, **stated}),
                 Ask("b" + mark, ids(1, 13, seed=2))]  # fmt: skip
        second = [Ask("a" + mark, ids(2, 1, seed=3), public={"attention_mask": longer, **later}),
                  Ask("b" + mark, ids(1, 1, seed=4))]  # fmt: skip
        return first, second

    first, second = asks("")
    apart = [[ask] for each in asks("'") for ask in each]
    prompt, step, *single = run_service(PLAIN, tiny.build(name), [first, second, *apart])
    got = [prompt.logits[0][mask.bool()], prompt.logits[1], *step.logits]
    wanted = [single[0].logits[0][mask.bool()], *(done.logits[0] for done in single[1:])]
    assert worst(got, wanted) <= SAME


@pytest.mark.parametrize("config", [PLAIN, TRIO], ids=["plain", "trio"])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_is_flagged_to_its_session_alone(config: PrivateConfig, bad: int) -> None:
    """Embeddings far out of range in one session's row: the other's answer stands, and is right."""
    given = [torch.randn(1, n, 64, generator=torch.Generator().manual_seed(n)) for n in (10, 12)]
    wild = [x * (2.0**21 if n == bad else 1) for n, x in enumerate(given)]
    asks = [Ask(owner, x) for owner, x in zip("ab", wild, strict=True)]
    found = run_service(config, tiny.build("gpt2"), [asks, [Ask("c", given[1 - bad])], [Ask("d", wild[bad])]])
    both, right, wrong = found
    flags = [each["range check"].tolist() for each in both.opened]
    assert flags == [[float(n == bad)] for n in range(2)]
    assert wrong.opened[0]["range check"].tolist() == [1.0]
    assert worst([both.logits[1 - bad]], right.logits) <= SAME


def test_the_price_of_company() -> None:
    """Eight sessions in one pass: the rounds of one session, but for the count of violations that has more bits."""
    model = tiny.build("llama")
    owners = "abcdefgh"
    first = [Ask(owner, ids(1, 5 + n % 2, seed=n)) for n, owner in enumerate(owners)]
    *_, one, every = run_service(
        TRIO, model, [*alone([Ask("z", ids(1, 6))]), *alone(first), steps(1, owners="z"), steps(1, owners=owners)]
    )
    assert 0 <= every.cost.rounds - one.cost.rounds <= 4
    assert every.cost.total < 4 * one.cost.total  # comparisons are made of whole words: few fill none
