"""What a protocol computes stands in one table: few classes, no primitive of another signature, prices beside them."""

from __future__ import annotations

import gc
import inspect
import re
import weakref
from pathlib import Path

import pytest

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.protocols.plain import CheckedPlain, Plain
from private_llm.protocols.protocol import Protocol
from private_llm.protocols.quad.records import QuadParty
from private_llm.protocols.registry import DEALER, QUAD, TRIO, Primitives
from private_llm.protocols.session import meta_session
from private_llm.protocols.share import BitWidths, Share

ROOT = Path(__file__).resolve().parents[2]
TABLES = {"trio": TRIO, "dealer": DEALER, "quad": QUAD}
each_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
NOT_EVERYWHERE = {"local_truncate", "piecewise", "exponential", "relu_minus_waves"}


@pytest.mark.parametrize("kind", [Plain, CheckedPlain, *(table.party for table in TABLES.values())])
def test_a_party_is_at_most_five_classes(kind: type) -> None:
    assert len(kind.__mro__) <= 5


@each_table
def test_a_family_is_at_most_four_classes(table: Primitives) -> None:
    assert all(len(family.__mro__) <= 4 for family in table.families)


@each_table
def test_families_take_what_the_interface_states(table: Primitives) -> None:
    found = 0
    for family in table.families:
        for name, stated in vars(Protocol).items():
            made = getattr(family, name, None)
            if inspect.isfunction(stated) and inspect.isfunction(made) and not name.startswith("__"):
                assert inspect.signature(made) == inspect.signature(stated), f"{family.__name__}.{name}"
                found += 1
    assert found > 15


@each_table
def test_what_is_priced_is_there(table: Primitives) -> None:
    there = {name for family in table.families for name in vars(Protocol) if hasattr(family, name)}
    for name in NOT_EVERYWHERE - {"local_truncate"}:
        assert hasattr(table.prices, name) == (name in there)


@pytest.mark.parametrize("truncation", ["unit", "exact"])
@pytest.mark.parametrize("protocol", ["plain", *TABLES])
def test_every_protocol_has_all_primitives_that_callers_do_not_ask_for(protocol: str, truncation: str) -> None:
    settings = {"protocol": protocol, "truncation": truncation, "insecure": protocol == "plain"}
    end = meta_session(PrivateConfig.from_dict(settings), 0).protocol
    source = {name: inspect.getsource(value) for name, value in vars(Protocol).items() if inspect.isfunction(value)}
    left_out = {name for name, text in source.items() if "self.lacks(" in text} - NOT_EVERYWHERE
    assert len(left_out) > 15
    assert left_out <= end.primitives


@pytest.mark.parametrize("truncation", ["unit", "exact"])
@pytest.mark.parametrize("protocol", ["plain", *TABLES])
def test_an_end_goes_with_its_session(protocol: str, truncation: str) -> None:
    """Its keys and links, too: at once, since gateways freeze what the collector would have to find."""
    settings = {"protocol": protocol, "truncation": truncation, "insecure": protocol == "plain"}
    session = meta_session(PrivateConfig.from_dict(settings), 0)
    end = weakref.ref(session.protocol)
    gc.disable()
    try:
        del session
        assert end() is None
    finally:
        gc.enable()


def test_a_party_and_a_family_with_the_same_primitive_are_no_table() -> None:
    class Audited(QuadParty):
        def mul(self, x: Share, y: Share, shift: int = 0, widths: BitWidths | None = None) -> Share:
            raise AssertionError

    with pytest.raises(ConfigError, match="QuadArithmetic: got mul; Audited has its own"):
        Primitives(Audited, *QUAD.families)


def test_what_callers_ask_for_is_a_primitive() -> None:
    """A name that nothing has would be a way that is never taken."""
    asked = {
        name
        for path in (ROOT / "private_llm").rglob("*.py")
        for name in re.findall(r'"(\w+)" (?:not )?in [\w.]*primitives', path.read_text())
    }
    assert asked == NOT_EVERYWHERE


def test_keys_are_there_where_settings_may_take_them() -> None:
    for adder in ("keys", "prefix"):
        end = meta_session(PrivateConfig(adder=adder), 0).protocol
        assert ("piecewise" in end.primitives) == (adder == "keys")
