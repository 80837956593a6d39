"""What sessions keep after a request, so that a prompt that begins alike is read from there on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from private_llm_gateway.completion import Completion, SamplingParams
from private_llm_gateway.engine import publish, write
from private_llm_gateway.errors import ApiError
from private_llm_gateway.kept_prompts import KeptPrompts
from private_llm_gateway.pool import Abandoned, SessionPool
from private_llm_gateway.prompts import of_instructions
from private_llm_gateway.settings import GatewaySettings
from private_llm_gateway.usage import UsageTotal
from private_llm_hf import patch
from private_llm_hf.client.speculation import SpeculationConfig

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.kv_cache.policies.policy import KeepAll, SlidingWindow
from tests.gateway.small_gateway import PLAIN, Gateway, greedy, plain_model, prompt_ids, serving, small, tokenizer


@pytest.fixture(scope="module", params=["plain", "trio", "assisted"])
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    config = PLAIN if request.param == "plain" else PrivateConfig(protocol=request.param, party_mode="threads")
    with serving(small(config)) as made:
        yield made


def ask(gateway: Gateway, prompt: list[int], count: int) -> tuple[str, int, int]:
    """The text, how many tokens were read before, and what was sent."""
    with gateway.client() as client:
        made: Any = client.completions.create(model="small", prompt=prompt, max_tokens=count, temperature=0)
    return made.choices[0].text, made.usage.prompt_tokens_details.cached_tokens, made.private_llm["bytes"]


def wanted(prompt: list[int], count: int) -> str:
    tokens = [*prompt_ids()[0].tolist(), *greedy(8)]
    before, whole = (tokenizer().decode(tokens[: len(prompt) + n], skip_special_tokens=True) for n in (0, count))
    return whole[len(before) :]


def test_a_prompt_that_goes_on_is_read_from_there_on(gateway: Gateway) -> None:
    start, tokens = prompt_ids()[0].tolist(), greedy(8)
    assert ask(gateway, [9, *start], 1)[1] == 0
    sent = {}
    for made, cached in ((0, 1), (2, len(start) + 1), (4, len(start) + 3), (0, len(start) - 1)):
        prompt = [*start, *tokens[:made]]
        text, found, sent[cached] = ask(gateway, prompt, 2)
        assert (text, found) == (wanted(prompt, 2), cached if cached > 1 else 0)
    less, whole = sent[len(start) + 3], sent[1]
    assert less < whole or gateway.models["small"].config.protocol == "plain"
    assert ask(gateway, [*start[:3], 9, *start], 1)[1] == 3
    assert ask(gateway, start, 3)[:2] == (wanted(start, 3), 3)


class Cache:
    """Holds so many tokens, and forgets up to `most` of them."""

    def __init__(self, length: int, most: int = 1000, records: bool = False) -> None:
        self.length, self.most = length, most
        self.layers = [SimpleNamespace(), SimpleNamespace(record_past=records)]

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, count: int) -> None:
        if -count > self.most:
            raise RuntimeError("the sliding window was reached")
        self.length += count


class Model:
    def __init__(self, policy: Any = None) -> None:
        self.parties = SimpleNamespace(config=SimpleNamespace(kv_cache=policy or KeepAll()))


def test_as_much_is_kept_as_begins_alike_and_there_is_room_for() -> None:
    kept, one, other = KeptPrompts(10), Model(), Model()
    cache = Cache(6)
    kept.keep(one, "key", [1, 2, 3, 4, 5, 6, 7], cache)
    found = [kept.begins(one, "key", ids) for ids in ([1], [1, 2], [1, 9, 3], [2, 1], [*range(1, 12)])]
    assert found == [0, 1, 1, 0, 6]
    assert kept.begins(other, "key", [1, 2, 3]) == 0
    second = Cache(6)
    kept.keep(other, "key", [1, 2, 3, 4, 5, 6, 7], second)
    assert second.length == kept.begins(other, "key", [*range(1, 12)]) == 4  # of ten, six are taken
    assert kept.take(one, "key", [1, 2, 3, 9, 9]) is cache
    assert cache.length == 3
    assert kept.take(one, "key", [1, 2, 3, 9, 9]) is None  # a request has it
    kept.keep(one, "key", [1, 2, 3, 9, 9, 8, 8, 8], cache := Cache(8))
    assert cache.length == 6
    assert kept.take(one, "key", [7, 7]) is None
    assert kept.begins(one, "key", [1, 2, 3]) == 0  # and it is given up


def test_nothing_is_kept_that_could_change_an_answer() -> None:
    for policy, most in ((SlidingWindow(4), 10), (KeepAll(), 0)):
        kept, model = KeptPrompts(most), Model(policy)
        kept.keep(model, "key", [1, 2, 3], Cache(3))
        assert kept.take(model, "key", [1, 2, 3]) is None
    kept, model = KeptPrompts(), Model()
    kept.keep(model, "key", [*range(9)], Cache(9, records=True))  # as drafts leave it: it would be cut too short
    assert kept.take(model, "key", [*range(12)]) is None
    kept.keep(model, "key", [*range(9)], Cache(9, most=2))
    assert kept.take(model, "key", [0, 1, 2, 7]) is None
    kept.keep(model, "key", [*range(9)], Cache(9, most=0))
    found = kept.take(model, "key", [*range(12)])
    assert found.length == 9
    kept.keep(model, "key", [*range(9)], found)
    assert kept.begins(model, "key", [*range(12)]) == 9
    assert kept.begins(model, "another", [*range(12)]) == 0
    model.parties = SimpleNamespace(config=model.parties.config)
    assert kept.take(model, "key", [*range(12)]) is None  # its session is another one


def test_a_request_gets_the_session_that_read_most_of_it() -> None:
    models = [patch(plain_model(), PLAIN) for _ in range(3)]
    pool, served = SessionPool(models[0], 1), small()
    pool._idle, pool._all, pool.size, pool._opened = list(models), list(models), 3, 3
    served = replace(served, pool=pool)
    ids = [*range(5, 15)]
    for model, count in zip(models, (2, 6, 4), strict=True):
        served.kept.keep(model, "key", ids[:count], Cache(count))
    with pool.session(1.0, fits=lambda model: served.kept.begins(model, "key", ids)) as best:
        assert best is models[1]
        with pool.session(1.0, fits=lambda model: served.kept.begins(model, "key", ids)) as second:
            assert second is models[2]
    pool.close()


def test_a_public_prefix_serves_every_key_and_nothing_after_it_does() -> None:
    kept, model = KeptPrompts(0), Model()
    kept.public = [1, 2, 3]
    kept.keep(model, "", [1, 2, 3, 4], Cache(3))
    kept.keep(model, "key", [1, 2, 3, 5, 6], cache := kept.take(model, "key", [1, 2, 3, 5]))
    assert cache.length == kept.begins(model, "key", [1, 2, 3, 5, 6]) == 3  # 0 tokens beside the public ones
    kept = KeptPrompts(100)
    kept.public = [1, 2, 3]
    kept.keep(model, "key", [1, 2, 3, 5, 6], Cache(5))
    assert kept.begins(model, "key", [1, 2, 3, 5, 6, 7]) == 5
    assert kept.begins(model, "another", [1, 2, 3, 5, 6, 7]) == 3
    assert kept.begins(model, "another", [1, 2, 9]) == 0
    kept.keep(model, "another", [1, 2, 9, 9], Cache(4))  # stays beside
    assert kept.begins(model, "another", [1, 2, 9, 9, 9]) == 4
    assert kept.take(model, "another", [1, 2, 3, 5, 6, 7]).length == 3
    kept, models = KeptPrompts(4), [Model() for _ in range(3)]
    kept.public = [1, 2, 3]  # of each session, and leaves room for others
    for each in models:
        kept.keep(each, "", [1, 2, 3], Cache(3))
    kept.keep(models[0], "key", [1, 2, 3, 4, 5, 6, 7, 8], Cache(8))
    assert kept.begins(models[0], "key", [*range(1, 20)]) == 7


@pytest.mark.parametrize("protocol", ["plain", "trio", "assisted"])
def test_sessions_begin_behind_a_public_prefix(protocol: str) -> None:
    config = PLAIN if protocol == "plain" else PrivateConfig(protocol=protocol, party_mode="threads")
    served = small(config)
    instructions = "The history of the city was written by the men who lived there."
    prefix = of_instructions(served, instructions)
    assert tokenizer().decode(prefix, skip_special_tokens=True).startswith(instructions[:-1])
    asked: list[Any] = [{"role": "system", "content": instructions}, {"role": "user", "content": "It begins"}]
    texts = []
    with serving(served) as made, made.client() as client:
        for cached in (0, len(prefix)):
            found = client.chat.completions.create(model="small", messages=asked, max_tokens=4, temperature=0)
            texts.append(found.choices[0].message.content)
            assert found.usage is not None
            assert found.usage.prompt_tokens_details.cached_tokens == cached
            served.kept.take(served.pool.first, "", [0])  # what it kept
            publish(served, prefix, GatewaySettings())
    assert texts[0] == texts[1]
    with pytest.raises(ApiError, match="Please reduce the length of the public prefix"):
        of_instructions(served, instructions * 20)


def test_who_leaves_while_a_prompt_is_read_takes_no_public_prefix_along(monkeypatch: pytest.MonkeyPatch) -> None:
    served, prompt, calls = small(replace(PLAIN, prompt_chunk=2)), prompt_ids()[0].tolist(), list[object]()
    publish(served, prompt[:3], GatewaySettings())
    model, forward = served.pool.first, served.pool.first.parties.forward
    monkeypatch.setattr(model.parties, "forward", lambda *given: (calls.append(given), forward(*given))[1])
    groups = [[Completion(0, prompt, SamplingParams(2, temperature=0), served.texts, ())]]
    how: Any = (GatewaySettings(wait_s=1.0, rows=1), UsageTotal(), False, "key")
    with pytest.raises(Abandoned):
        write(served, groups, lambda *_: None, lambda: len(calls) == 1, *how)
    assert len(calls) == 1
    assert served.kept.begins(model, "another", [*prompt, 9]) == 3
    assert 3 < served.kept.begins(model, "key", [*prompt, 9]) < len(prompt)
    write(served, groups, lambda *_: None, lambda: False, *how)
    assert groups[0][0].tokens == greedy(2)
    served.pool.close()


def test_answers_of_one_prompt_count_it_once() -> None:
    start = prompt_ids()[0].tolist()
    with serving(small(), rows=1) as gateway, gateway.client() as client:
        found: list[Any] = []
        for _ in range(2):
            made = client.completions.create(model="small", prompt=start, max_tokens=2, temperature=1, n=3)
            found.append(made.usage)
    cached = [usage.prompt_tokens_details.cached_tokens for usage in found]
    assert cached == [0, len(start) - 1]


def test_a_policy_that_evicts_keeps_no_public_prefix() -> None:
    served = small(replace(PLAIN, kv_cache=SlidingWindow(8)))
    with pytest.raises(ConfigError, match="start the gateway without it"):
        publish(served, [1, 2, 3], GatewaySettings())
    served.pool.close()


@pytest.mark.parametrize("protocol", ["plain", "assisted"])
def test_drafts_change_no_text_and_save_passes(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = PLAIN if protocol == "plain" else PrivateConfig(protocol=protocol, party_mode="threads")
    passes: list[int] = []
    served = replace(small(config), speculation=SpeculationConfig(plain_model()))  # it foresees all
    forward = type(served.pool.first).forward

    def counted(*args: Any, **given: Any) -> Any:
        passes.append(1)
        return forward(*args, **given)

    monkeypatch.setattr(type(served.pool.first), "forward", counted)
    start = prompt_ids()[0].tolist()
    with serving(served) as made:
        assert ask(made, start, 8)[0] == wanted(start, 8)
        drafted = len(passes)
        with made.client() as client:  # with a penalty, however small, there are none
            how: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "presence_penalty": 1e-9}
            plain = client.completions.create(model="small", prompt=start, **how)
        assert plain.choices[0].text == wanted(start, 8)
        assert drafted < len(passes) - drafted == 8
        text, cached, _ = ask(made, [*start, *greedy(6)], 2)
        assert text == wanted([*start, *greedy(6)], 2)
        assert cached == len(start) + 5


def test_a_prompt_that_is_echoed_with_its_likelihoods_is_read_whole() -> None:
    """Its likelihoods come from a pass without a cache, whatever the session keeps."""
    start = prompt_ids()[0].tolist()
    with serving(small()) as gateway, gateway.client() as client:
        how: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1}
        found: Any = [client.completions.create(model="small", prompt=start, **how) for _ in range(2)]
    assert [made.usage.prompt_tokens_details.cached_tokens for made in found] == [0, 0]
    assert found[0].choices[0].text == found[1].choices[0].text
