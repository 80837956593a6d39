"""What a party counts: positions that sessions keep, bytes of a position, a session's part of a batch."""

from __future__ import annotations

import pytest
from private_llm_hf.service.limits import (
    ClientQuarantine,
    KVCacheQuota,
    Limits,
    elements_of,
    position_bytes,
)
from private_llm_hf.wire.commands import Call, Tokens

from private_llm.config import PrivateConfig
from private_llm.errors import DomainError
from private_llm.net.ledger import Ledger
from tests.hf import tiny


def test_an_ended_session_gives_back_all_that_it_kept() -> None:
    quota = KVCacheQuota(Limits(positions=10, of_user=10, in_all=10, elements=1))
    quota.reserve("a", "eve", "m", 6)
    quota.reserve("a", "eve", "n", 4)
    with pytest.raises(DomainError, match="would hold 20"):
        quota.reserve("b", "eve", "m", 10)
    quota.release("a")
    quota.reserve("b", "eve", "m", 10)


@pytest.mark.parametrize(
    ("protocol", "ring", "parts"), [("trio", 64, 2), ("trio", 32, 2), ("quad", 64, 3), ("dealer", 64, 2)]
)
def test_a_position_takes_keys_and_values_of_each_layer(protocol: str, ring: int, parts: int) -> None:
    config = tiny.build("llama").config
    each = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    private = PrivateConfig(protocol=protocol, ring=ring, frac_bits=13)
    assert position_bytes(config, private) == config.num_hidden_layers * 2 * each * parts * ring // 8


def test_sessions_share_the_costs_of_a_batch_by_rows() -> None:
    batch, one, two = Ledger(0), Ledger(0), Ledger(0)
    batch.add_sent(1, "opened", 3000)
    one.book(batch, rows=1, total=3)
    two.book(batch, rows=2, total=3)
    assert (one.cost().total, two.cost().total) == (1000, 2000)


def test_what_clients_hold_is_bounded_for_each_and_for_all() -> None:
    quota = KVCacheQuota(Limits(positions=10, of_user=15, in_all=20, elements=1))
    quota.reserve("a", "eve", "m", 8)
    quota.reserve("a", "eve", "m", 9)
    with pytest.raises(DomainError, match="got 11 positions; this service keeps 10 for a session"):
        quota.reserve("a", "eve", "n", 2)
    with pytest.raises(DomainError, match="user 'eve' would hold 16 positions; this service keeps 15"):
        quota.reserve("b", "eve", "m", 7)
    quota.reserve("b", "eve", "m", 6)
    with pytest.raises(DomainError, match="all clients would hold 21 positions; this service keeps 20"):
        quota.reserve("c", "bob", "m", 6)
    quota.release("a")
    quota.reserve("c", "bob", "m", 6)


def test_sizes_of_calls() -> None:
    config = tiny.build("llama").config
    heads, vocabulary = config.num_attention_heads, config.vocab_size

    def of(rows: int, length: int, past: int = 0, keep: int = 0) -> int:
        item = Tokens("input_ids", (rows, length), vocabulary)
        return elements_of(config, Call({"logits_to_keep": keep}, (item,), 1, None, None, ("logits",)), past)

    assert of(2, 50) == 2 * 50 * max(vocabulary, heads * 50, config.intermediate_size)
    assert of(2, 50, 1000, 1) == 2 * 50 * heads * 1050
    assert of(1, 1, 0, 1) == max(vocabulary, heads, config.intermediate_size)


def test_whose_inputs_end_the_sessions_of_all_runs_alone_and_stays_out() -> None:
    now = [0.0]
    quarantine = ClientQuarantine(lambda: now[0])
    quarantine.record_abort(["eve", "bob", ""])
    assert [quarantine.runs_alone(user) for user in ("eve", "bob", "", "carol")] == [True, True, False, False]
    assert not any(quarantine.seconds_barred(user) for user in ("eve", "bob", ""))
    quarantine.record_abort(["eve", "eve"])
    assert not quarantine.seconds_barred("eve")
    quarantine.record_abort(["eve"])
    assert quarantine.seconds_barred("eve") == 600.0
    now[0] = 601.0
    assert not quarantine.seconds_barred("eve")
    assert [quarantine.runs_alone(user) for user in ("eve", "bob")] == [True, False]
    quarantine.record_abort(["eve"])
    assert quarantine.seconds_barred("eve") == 2400.0
