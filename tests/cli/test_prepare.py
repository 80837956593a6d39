"""`private-llm prepare`, and `generate` and `chat` with what it stored."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

from tests.cli.test_cli import start
from tests.hf.test_remote import free_ports

DEMO = str(files("private_llm_hf") / "demo_model")
ONE_SERVER = ("--protocol", "assisted", "--party-mode", "threads", "--corrections")


@pytest.mark.full
def test_text_with_one_server(run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path / "masks")
    made = json.loads(run("prepare", DEMO, "--corrections", folder, "--tokens", "20", "--json"))
    assert made == {"name": "prepare", "folder": folder, "tokens_left": 20}
    asked = ("generate", DEMO, *ONE_SERVER, folder, "--prompt", "The history of the city", "--max-new-tokens", "4")
    assert "The history of the city is the largest" in run(*asked)
    assert "holds none; make some with `private-llm prepare MODEL" in run(*asked, code=2)
    assert "20 tokens are left" in run("prepare", DEMO, "--corrections", folder, "--tokens", "20")
    monkeypatch.setattr(sys, "stdin", io.StringIO("The history of the city\n"))
    errors = run("chat", DEMO, *ONE_SERVER, folder, code=2)
    assert "corrections: 20 tokens are left; `private-llm prepare MODEL --corrections" in errors
    assert "self_attn.q_proj' wants 1 rows; this session used 20, and 0 are left" in errors


def test_what_does_not_fit_is_told(run: Callable[..., str], tmp_path: Path) -> None:
    words = ("prepare", DEMO, "--corrections", str(tmp_path / "masks"))
    assert "got neither; give --tokens N or --keep N" in run(*words, code=2)
    hosts = ("--hosts", "127.0.0.1:1,127.0.0.1:2", "--allow-plain-loopback")
    assert "hosts: got several" in run(*words, "--tokens", "3", *hosts, code=2)
    errors = run(*words, "--tokens", "3000000000", code=2)
    assert "MB a token" in errors or "kB a token" in errors
    assert "free" in errors


@pytest.mark.full
def test_a_host_prepares_and_another_one_is_online(run: Callable[..., str], tmp_path: Path) -> None:
    preparer, online = (("--hosts", host, "--allow-plain-loopback") for host in free_ports(2))
    serving = ("party", "--protocol", "assisted", "--index", "0", "--sessions", "1")
    servers = [start(*serving, *preparer), start(*serving, *online, "--offline-folder", str(tmp_path / "server"))]
    folder = str(tmp_path / "masks")
    assert "20 tokens are left" in run("prepare", DEMO, "--corrections", folder, "--tokens", "20", *preparer)
    asked = ("generate", DEMO, "--prompt", "The history of the city", "--max-new-tokens", "4")
    assert "city is the largest" in run(*asked, "--protocol", "assisted", "--corrections", folder, *online)
    for server in servers:
        assert "session 1 ended" in server.communicate(timeout=60)[1]
    assert len(list((tmp_path / "server" / "used-blocks").iterdir())) == 1
