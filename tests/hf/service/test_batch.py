"""Passes that serve several sessions: each gets what it would get alone, and nothing of the others."""

from __future__ import annotations

from pathlib import Path

import private_llm_hf
import pytest
import torch
from private_llm_hf.party.model import build_party_model, empty_model, meta_parameters
from private_llm_hf.party.session_state import SessionState
from torch import Tensor
from transformers import OPTForCausalLM

from private_llm.config import PrivateConfig
from private_llm.net.ledger import Ledger, merge
from private_llm.protocols.session import meta_session
from private_llm.tensor.range_check import verdict
from private_llm.tensor.secret import SecretIndex
from tests.harness import PLAIN, TRIO
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR
from tests.hf.party.parties import description, ids
from tests.hf.service.sessions import Ask, copied, run_service

SAME = 2e-3
"""What a session gets in company and alone differ by roundings only."""
QUAD, DEALER = PrivateConfig(protocol="quad"), PrivateConfig(protocol="dealer")
LENGTHS = {"a": 5, "b": 9, "c": 12}


def prompts(mark: str = "") -> list[Ask]:
    return [Ask(owner + mark, ids(1, n, seed=n)) for owner, n in LENGTHS.items()]


def steps(seed: int, mark: str = "", owners: str = "abc") -> list[Ask]:
    return [Ask(owner + mark, ids(1, 1, seed=seed + ord(owner))) for owner in owners]


def worst(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def alone(asks: list[Ask]) -> list[list[Ask]]:
    return [[ask] for ask in asks]


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", [TRIO, QUAD, DEALER], ids=["trio", "quad", "dealer"])
def test_on_shares(config: PrivateConfig) -> None:
    model = tiny.build("llama")
    both = [*alone(prompts()), steps(1), *alone(prompts("'")), *alone(steps(1, "'"))]
    found = run_service(config, model, both)
    assert worst(found[3].logits, [done.logits[0] for done in found[7:]]) <= SAME
    assert {float(flag) for each in found[3].opened for flag in each["range check"]} == {0.0}


def test_sessions_join_and_leave() -> None:
    """Whoever is there: each session goes on where it was. Columns that only a longer one needed go with it."""

    def widths(state: SessionState) -> list[int]:
        return sorted(cache.get_seq_length() for cache in state.caches())

    model = tiny.build("llama")
    script = ["ab", "abc", "ac", "b", "ba", "cb", "abc"]
    batches = [steps(n, owners=owners) for n, owners in enumerate(script)]
    looks = [step for each in batches for step in (each, widths)]
    apart = [[Ask(ask.owner + "'", ask.given)] for each in batches for ask in each]
    found = run_service(PLAIN, model, [*alone(prompts()), *looks, lambda state: state.forget("c"), widths,
                                       *alone(prompts("'")), *apart])  # fmt: skip
    got = [logits for n in range(7) for logits in found[3 + 2 * n].logits]
    assert worst(got, [done.logits[0] for done in found[-len(apart) :]]) <= SAME
    # a: 5, 9 and 12 positions at first; one cache for each company, none wider than its longest member
    assert [found[4 + 2 * n] for n in range(7)] == [[10, 12], [13], [11, 14], [12, 14], [13, 14], [9, 15], [16]]
    assert found[18] == [15]


def test_nothing_is_copied_while_the_company_stays() -> None:
    def place(state: SessionState) -> list[int]:
        return [cache.layers[0].buffer._rows[0].parts[0].data_ptr() for cache in state.caches()]

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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("config", [PLAIN, TRIO, QUAD], ids=["plain", "trio", "quad"])
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
    """Eight sessions in one batch: the rounds of one session, but for the count of violations that has more bits."""
    model = tiny.build("llama")
    owners = "abcdefgh"
    first = [Ask(owner, ids(1, 5 + n % 2, seed=n)) for n, owner in enumerate(owners)]
    *_, one, every = run_service(
        TRIO, model, [*alone([Ask("z", ids(1, 6))]), *alone(first), steps(1, owners="z"), steps(1, owners=owners)]
    )
    assert 0 <= every.cost.rounds - one.cost.rounds <= 4
    assert every.cost.total < 8 * one.cost.total  # comparisons are made of whole words


def test_one_session_pays_what_a_party_always_paid() -> None:
    """The bytes and rounds of the model's own forward, a lookup and one verdict, as counted without data."""
    model = tiny.build("llama")
    details = description(model)
    prompt, step = run_service(TRIO, model, [[Ask("a", ids(2, 6))], [Ask("a", ids(2, 1))]])
    ledgers: list[list[Ledger]] = [[], []]
    for number in range(3):
        session = meta_session(TRIO, number)
        party = build_party_model(*details, meta_parameters(empty_model(*details), session), session)
        cache = party.new_cache()
        for place, length in enumerate((6, 1)):
            session.protocol.ledger.reset()
            index = session.protocol.receive_index(2 * length, 128)
            embeds = party.get_input_embeddings()(SecretIndex(session, index, (2, length)))
            made = party(inputs_embeds=embeds, past_key_values=cache, return_dict=True)
            verdict(session)
            made.logits.to_fixed()
            ledgers[place].append(copied(session.protocol.ledger))
    for done, counted in zip((prompt, step), ledgers, strict=True):
        wanted = merge(counted)
        assert (done.cost.sent, done.cost.rounds) == (wanted.sent, wanted.rounds)
        assert done.opened[0]["range check"].shape == (1,)


def test_the_most_likely_token_of_each() -> None:
    """One arg max over all rows; only the last logits are made, of prompts of different lengths."""
    config = PrivateConfig(reveal="token")
    model = tiny.build("llama")
    asks = [Ask(owner, ids(1, n, seed=n), public={"logits_to_keep": 1}) for owner, n in (("b", 10), ("a", 13))]
    (done,) = run_service(config, model, [asks])
    assert [sorted(each) for each in done.opened] == [["range check", "token"]] * 2
    wanted = [model(ask.given).logits[:, -1:].argmax(-1) for ask in asks]
    assert [each["token"].tolist() for each in done.opened] == [each.tolist() for each in wanted]


@pytest.mark.parametrize("name", tiny.ENCODERS)
def test_encoders_share_a_batch(name: str) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    facts = {"position_ids": torch.arange(2, 8).view(1, -1)} if name == "roberta" else {}
    given = {"a": facts, "b": {**facts, "attention_mask": mask}, "c": facts}
    asks = [Ask(owner, ids(1 + (owner == "c"), 6, seed=ord(owner)), None, public) for owner, public in given.items()]
    done, *apart = run_service(PLAIN, tiny.build(name), [asks, *alone(asks)])
    assert done.alike
    for got, single in zip(done.opened, apart, strict=True):
        assert sorted(got) == sorted(single.opened[0])
        for output in ("last_hidden_state", "pooler_output"):
            if output in got:
                assert worst([got[output]], [single.opened[0][output]]) <= SAME
        assert got["range check"].tolist() == [0.0] * len(got["last_hidden_state"])


@pytest.mark.full
def test_the_bundled_model() -> None:
    folder = Path(private_llm_hf.__file__).parent / "demo_model"
    model = OPTForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = [torch.arange(n).view(1, -1) * 13 % 4000 + 5 for n in (4, 6, 9)]

    def asks(given: list[Tensor]) -> list[Ask]:
        return [Ask(owner, ids_, vocabulary=4096) for owner, ids_ in zip("abc", given, strict=True)]

    last = [text[:, :1] for text in texts]
    *_, done = run_service(TRIO, model, [*alone(asks(texts)), asks(last)])
    plain = [model(torch.cat(pair, 1)).logits[:, -1:].detach() for pair in zip(texts, last, strict=True)]
    assert worst(done.logits, plain) <= 10 * LOGIT_ERROR  # logits of size 20, six layers
    assert [int(each.argmax()) for each in done.logits] == [int(each.argmax()) for each in plain]
