"""What a party counts: positions that sessions keep, bytes of a position, a session's part of a batch."""

from __future__ import annotations

import pytest
from private_llm_hf.service.limits import KVCacheQuota, Limits, add_part, position_bytes

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
    add_part(one, batch, 1, 3)
    add_part(two, batch, 2, 3)
    assert (one.cost().total, two.cost().total) == (1000, 2000)
