"""What a gateway tells of the parties that it asks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from private_llm_gateway.served import Served

from private_llm.config import PrivateConfig


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
    asked = SimpleNamespace(config=config)
    assert Served.one_machine.fget(asked) is one  # type: ignore[attr-defined]
