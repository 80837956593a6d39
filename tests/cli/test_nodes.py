"""The commands of hosts that run nodes of token sharding, on loopback with mutual TLS."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.test_cli import Run, checkpoint, rows, start
from tests.hf.test_remote import free_ports

__all__ = ["checkpoint"]  # a fixture

PLAN = ("--protocol", "cascade", "--plan", "1,3,1")


def test_certs_party_generate(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """A CompNode with a checkpoint of its own, an AttnNode, and a user with configuration and tokenizer alone."""
    printed = run("certs", "--out", str(tmp_path / "certs"), *PLAN).replace("\n", "")
    assert "for CompNode 0 (party 0) alone: " in printed
    assert "for AttnNode (0, 0) (party 1) alone: " in printed
    assert {path.name for path in (tmp_path / "certs").glob("*.pem")} == {
        "ca.pem", "party0.pem", "party1.pem", "client.pem",
    }  # fmt: skip
    client = tmp_path / "client"
    shutil.copytree(checkpoint, client, ignore=shutil.ignore_patterns("*.safetensors"))
    common = (*PLAN, "--hosts", ",".join(free_ports(2)), "--tls", str(tmp_path / "certs"))
    once = ("--sessions", "1", "--timeout", "60")
    nodes = [
        start("party", "--index", "0", "--model", str(checkpoint), *once, *common),
        start("party", "--index", "1", *once, *common),
    ]
    prompt = ("--prompt", "a b c d e f", "--max-new-tokens", "3", "--accept-weak-plan")
    try:
        (made,) = rows(run, "generate", str(client), *prompt, *common)
        for node in nodes:
            _, err = node.communicate(timeout=60)
            assert node.returncode == 0, err
            assert "session 1 ended" in err.replace("\n", " ")
    finally:
        for node in nodes:
            node.kill()
    (local,) = rows(run, "generate", str(checkpoint), *prompt, *PLAN)
    assert made["new_tokens"] == 3
    assert made["private_text"] == local["private_text"]


def test_certs_count_the_endpoints_of_a_split(run: Run, tmp_path: Path) -> None:
    run("certs", "--out", str(tmp_path), "--protocol", "quad", "--plan", "2,3,1", "--split", "1")
    assert len(list(tmp_path.glob("party*.pem"))) == 4 + 2 + 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--index", "1", "--model", "a"), "AttnNode (0, 0) (party 1) reads no checkpoint"),
        (
            ("--index", "0", "--model", "a folder that is not there"),
            "'a folder that is not there': there is no such folder here",
        ),
        (("--index", "2"), "party: got 2; want 0 to 1"),
    ],
)
def test_what_a_node_refuses_before_it_listens(run: Run, options: tuple[str, ...], message: str) -> None:
    hosts = ("--hosts", "127.0.0.1:7000,127.0.0.1:7001", "--allow-plain-loopback")
    assert message in " ".join(run("party", *options, *PLAN, *hosts, code=2).split())
