"""One more activation, kernel, cache policy, protocol and transport: in so many files, and it works."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FILES = {
    "activation": 1, "fitted activation": 2, "kernel": 3, "cache policy": 1, "protocol": 1, "built-in protocol": 3,
    "transport": 1,
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_one_more(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts" / "studies"))
    extensions = importlib.import_module("extensions")
    (found,) = [each for each in extensions.EXTENSIONS if each.kind == kind]
    assert found.files == FILES[kind]
    assert extensions.tried(found) == ""
