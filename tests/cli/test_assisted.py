"""`private-llm party` and `generate` under protocol "assisted": two servers with sockets, and a user."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest
from private_llm_cli.app import app
from typer.testing import CliRunner

from tests.cli.test_cli import start
from tests.hf.test_remote import free_ports


@pytest.mark.full
def test_two_servers_and_a_user_as_commands() -> None:
    links = ("--hosts", ",".join(free_ports(2)), "--allow-plain-loopback", "--protocol", "assisted")
    servers = [start("party", "--index", str(number), *links, "--sessions", "1") for number in range(2)]
    asked = ("generate", str(files("private_llm_hf") / "demo_model"), "--prompt", "The history of the city")
    result = CliRunner().invoke(app, [*asked, "--max-new-tokens", "4", *links], catch_exceptions=False)
    assert result.exit_code == 0
    assert "The history of the city is the largest" in result.output
    assert re.search(r"4 tokens, .* 100 rounds", " ".join(result.output.split()))
    for server in servers:
        assert "session 1 ended\n" in server.communicate(timeout=60)[1]
        assert server.returncode == 0


@pytest.mark.full
def test_drafts_take_fewer_rounds() -> None:
    asked = ("generate", str(files("private_llm_hf") / "demo_model"), "--protocol", "assisted")
    said, rounds = [], []
    for more in ((), ("--draft", "lookup")):
        prompt = "1 2 3 4 5 6 7 8 1 2 3 4 5 6 7 8 1 2 3 4"
        result = CliRunner().invoke(
            app, [*asked, "--max-new-tokens", "12", "--prompt", prompt, "--json", *more], catch_exceptions=False
        )
        assert result.exit_code == 0
        found = json.loads(result.output.splitlines()[-1])
        said.append(found["private_text"])
        rounds.append(found["rounds"])
    assert said[0] == said[1]
    assert rounds[1] < rounds[0]
