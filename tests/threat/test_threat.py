"""The threat model names every protocol, is complete, and its page is the generated one."""

from __future__ import annotations

from pathlib import Path

from private_llm.protocol_facts import ASSISTED, CASCADE, protocol_names
from private_llm.threat import entries, markdown

ROOT = Path(__file__).resolve().parents[2]


def test_the_threat_model_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "threat-model.md").read_text() == markdown() + "\n"


def test_threats_are_complete() -> None:
    for entry in entries():
        assert entry.kind in ("protocol", "shortcut")
        assert entry.corrupt
        assert entry.source
        assert entry.setting
        assert entry.learns
    assert len({entry.name for entry in entries()}) == len(entries())


def test_every_protocol_has_a_threat_entry() -> None:
    assert {*protocol_names(), CASCADE, ASSISTED} == {entry.name for entry in entries() if entry.kind == "protocol"}
