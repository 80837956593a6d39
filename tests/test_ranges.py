"""What is publicly known of the sizes of values: checks, lookups, head room."""

from __future__ import annotations

import pytest

from private_llm.errors import ConfigError, DomainError
from private_llm.ranges import HEAD_ROOM, UNKNOWN, Ranges, exponent

KNOWN = Ranges({"a.q": {"output": 7, "frac": 12}, "a.k": {"output": 9}, "n": {"square": 20}})


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"a": {"output": 1.5}}, "want an integer from"),
        ({"a": {"output": True}}, "want an integer from"),
        ({"a": {"output": 200}}, "want an integer from"),
        ({"a": {"frac": 40}}, "from 8 to 20"),
        ({"a": {"ouput": 3}}, "want one of output"),
        ({"a": 3}, "mapping"),
        ([1], "mapping from modules"),
    ],
)
def test_nonsense_is_refused(modules: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ranges(modules)  # type: ignore[arg-type]


def test_a_group_of_layers_has_the_widest_range_and_none_if_one_is_unknown() -> None:
    assert KNOWN.of("a.q", "output") == 7
    assert KNOWN.of("a.q+k", "output") == 9
    assert KNOWN.of("a.q+k+v", "output") is None
    assert KNOWN.of("b", "output") is None
    assert UNKNOWN.of("a.q", "output") is None


def test_a_bias_has_the_bits_of_its_product() -> None:
    assert KNOWN.frac_of_weight("a.q.bias", 18) == 12
    assert KNOWN.frac_of_weight("a.q.weight", 18) == 18
    assert KNOWN.frac_of_weight("n.bias", 18) == 18


def test_json_and_digest() -> None:
    assert Ranges.from_json('{"modules": {"n": {"square": 20}}}').to_dict() == {"n": {"square": 20}}
    assert Ranges(KNOWN.to_dict()).digest() == KNOWN.digest() != UNKNOWN.digest()
    with pytest.raises(ConfigError, match="private-llm calibrate"):
        Ranges.from_json("nonsense")


def test_exponents_leave_head_room() -> None:
    assert exponent(1.0) == HEAD_ROOM
    assert exponent(24926.0) == 15 + HEAD_ROOM
    assert exponent(0.0) == -40 + HEAD_ROOM
    with pytest.raises(DomainError, match="leaves float32"):
        exponent(float("inf"))
