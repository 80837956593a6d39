"""What a gateway tells of the parties that it asks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from private_llm_gateway import engine
from private_llm_gateway.completion import Completion, SamplingParams
from private_llm_gateway.pool import Abandoned
from private_llm_gateway.served import Served
from private_llm_gateway.settings import GatewaySettings
from private_llm_gateway.usage import UsageMeter, UsageTotal

from private_llm.config import PrivateConfig
from tests.gateway.small_gateway import PLAIN, greedy, prompt_ids, small


@pytest.mark.parametrize(
    ("hosts", "one"),
    [
        (("127.0.0.1:7000", "localhost:7001", "[::1]:7002"), True),
        (("127.0.1.10:7000", "127.0.1.11:7000", "127.0.1.12:7000"), True),
        (("10.77.0.10:7000", "10.77.0.11:7000", "10.77.0.12:7000"), False),
        (("127.0.0.1:7000", "127.0.0.1:7001", "party2.example.org:7000"), False),
    ],
)
def test_parties_at_loopback_addresses_are_one_machine(hosts: tuple[str, ...], one: bool) -> None:
    config = PrivateConfig(party_mode="remote", hosts=hosts, allow_plain_loopback=True)
    asked = SimpleNamespace(config=config, _groups=(hosts,))
    assert Served.one_machine.fget(asked) is one  # type: ignore[attr-defined]


def test_a_long_prompt_is_read_no_further_when_its_client_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    served = small(dataclasses.replace(PLAIN, prompt_chunk=2))
    prompt, calls = prompt_ids()[0].tolist(), list[object]()
    with served.pool.session(1.0) as model:
        forward = model.parties.forward
    monkeypatch.setattr(model.parties, "forward", lambda *given: (calls.append(given), forward(*given))[1])
    groups = [[Completion(0, prompt, SamplingParams(2, temperature=0), served.texts, ())]]
    settings = GatewaySettings(wait_s=1.0, rows=1)
    with pytest.raises(Abandoned):
        engine.write(served, groups, lambda *_: None, lambda: len(calls) == 2, settings, UsageTotal())
    assert len(calls) == 2 < -(-len(prompt) // 2)
    engine.write(served, groups, lambda *_: None, lambda: False, settings, UsageTotal())
    assert groups[0][0].tokens == greedy(2)
    served.pool.close()


def test_a_request_counts_what_was_sent_once_however_often_it_is_looked_at() -> None:
    costs = SimpleNamespace(bytes_total=0, rounds=0)
    total = UsageTotal()
    model = SimpleNamespace(cost=lambda reset: costs)
    meter = UsageMeter(model, total)
    for costs.bytes_total, costs.rounds in ((100, 2), (100, 2), (250, 5)):
        found = meter.look(now=True)
        assert (found.bytes, found.rounds) == (costs.bytes_total, costs.rounds)
    meter.renewed(model)
    costs.bytes_total, costs.rounds = 30, 1
    assert meter.look(now=True).bytes == 280
