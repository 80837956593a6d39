"""Where the parties run when nobody says so."""

from __future__ import annotations

import pytest
from private_llm_hf.client.launch import choose_mode, start_parties

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.local import LocalMesh


def test_auto_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert choose_mode(PrivateConfig()) == "threads"
    assert choose_mode(PrivateConfig(party_mode="processes")) == "processes"
    assert choose_mode(PrivateConfig(hosts=("a:1", "b:1", "c:1"))) == "remote"
    monkeypatch.setenv("RANK", "0")
    for world, mode in (("1", "threads"), ("2", "threads"), ("3", "distributed"), ("4", "distributed")):
        monkeypatch.setenv("WORLD_SIZE", world)
        assert choose_mode(PrivateConfig()) == mode


def test_a_hub_is_for_threads() -> None:
    with pytest.raises(ConfigError, match="mesh: got one for party_mode='processes'"):
        start_parties(PrivateConfig(party_mode="processes"), LocalMesh(3))
