"""Endpoints that disagree name the settings that differ, one or several."""

from dataclasses import replace
from typing import Any

import pytest

from private_llm.config import PrivateConfig
from private_llm.protocols import settings_table as module
from private_llm.protocols.settings_table import TABLE_BYTES, other_settings, settings_table

MINE = PrivateConfig()


def told(theirs: PrivateConfig) -> str:
    return str(other_settings(MINE, "party 1", settings_table(theirs)))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"reveal": "token"}, "reveal: party 1 has 'token', this endpoint 'logits'"),
        ({"frac_bits": 16}, "frac_bits: party 1 has 16, this endpoint 18"),
        ({"protocol": "quad"}, "protocol: party 1 has 'quad', this endpoint 'trio'"),
        ({"guard": False}, "guard: party 1 has False, this endpoint True"),
        ({"expert_capacity": 1.5}, "expert_capacity: party 1 has another than this endpoint (None)"),
    ],
)
def test_one_setting_is_named_with_both_values_if_few_are_likely(other: dict[str, Any], difference: str) -> None:
    assert told(replace(MINE, **other)) == f"{difference}; want the same at all endpoints"


def test_a_default_at_the_other_endpoint_is_named() -> None:
    mine = replace(MINE, bandwidth_mbit=100.0)
    assert "bandwidth_mbit: party 1 has None, this endpoint 100.0; want" in str(
        other_settings(mine, "party 1", settings_table(MINE))
    )


def test_each_setting_that_differs_is_named() -> None:
    far = replace(MINE, adder="auto", bandwidth_mbit=100.0, latency_ms=20.0, weights="public")
    assert told(far) == (
        "weights: party 1 has 'public', this endpoint 'secret'; "
        "bandwidth_mbit: party 1 has another than this endpoint (None); "
        "latency_ms: party 1 has another than this endpoint (0.05); want the same at all endpoints"
    )


def test_what_is_not_agreed_upon_is_not_in_the_table() -> None:
    assert settings_table(replace(MINE, timeout_s=7.0, hosts=("a:1", "b:1", "c:1"))) == settings_table(MINE)
    assert len(settings_table(MINE)) == TABLE_BYTES


def test_another_version_has_no_settings_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    own = told(MINE)
    assert own.startswith("party 1 runs other settings or another version; protocol, ring, ")
    with monkeypatch.context() as patched:
        patched.setattr(module, "VERSION", "0.0.1")
        theirs = settings_table(replace(MINE, reveal="token"))
    assert str(other_settings(MINE, "party 1", theirs)) == own
    assert str(other_settings(MINE, "party 1", bytes(TABLE_BYTES))) == own
