"""Names of endpoints in messages."""

from __future__ import annotations

import re

import pytest

from private_llm.config import PrivateConfig
from private_llm.errors import PartyFailed
from private_llm.net.roles import WHO, named, named_errors
from private_llm.token_sharding import ShardingPlan

PLAN = ShardingPlan(2, 3, 1)
CASCADE = PrivateConfig(protocol="cascade", plan=PLAN)
SPLIT = PrivateConfig(protocol="trio", plan=PLAN, split=1)


@pytest.mark.parametrize(
    ("config", "number", "name"),
    [
        (PrivateConfig(), 0, "party 0"),
        (PrivateConfig(protocol="dealer"), 0, "the dealer"),
        (PrivateConfig(protocol="dealer"), 1, "party 1"),
        (CASCADE, 1, "CompNode 1 (party 1)"),
        (CASCADE, 3, "AttnNode (0, 1) (party 3)"),
        (CASCADE, 5, "party 5"),
        (SPLIT, 2, "party 2"),
        (SPLIT, 3, "CompNode 0 (party 3)"),
        (SPLIT, 7, "AttnNode (1, 1) (party 7)"),
    ],
)
def test_names(config: PrivateConfig, number: int, name: str) -> None:
    text = named(config, f"from party {number}: got 3 parties; want party {number}")
    assert text == f"from {name}: got 3 parties; want {name}"
    assert named(config, text) == text, "a message passes several endpoints"
    found = re.search(WHO, f"{name}: OSError")
    assert found is not None
    assert found[0] == name


def test_errors_keep_their_class() -> None:
    with pytest.raises(PartyFailed, match=r"^AttnNode \(0, 0\) \(party 2\) stopped$"), named_errors(CASCADE):
        raise PartyFailed("party 2 stopped")
