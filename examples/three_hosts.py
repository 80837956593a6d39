"""Parties as programs of their own, over mutual TLS: what runs on three hosts, here on three ports of this machine.

    python examples/three_hosts.py

The model owner shares the weights into files, each party starts with its own file and certificate, and the user, who
has configuration and tokenizer but no weights, asks. On real hosts each party runs its one line on its own machine, and
makes its own key (`private-llm certs` is for trying out).
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

MODEL = str(resources.files("private_llm_hf") / "demo_model")
PRIVATE_LLM = (sys.executable, "-m", "private_llm")  # the command `private-llm`


def free_addresses(count: int) -> str:
    """Addresses on this machine that nobody listens on, joined by commas."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return ",".join(addresses)


def call(*words: str) -> None:
    """Run `private-llm` with these words to its end."""
    print("private-llm", *words, flush=True)
    subprocess.run([*PRIVATE_LLM, *words], check=True)


def main(folder: Path) -> None:
    """Certificates, share files, three parties, one user."""
    shares, certs = folder / "shares", str(folder / "certs")
    where = ("--hosts", free_addresses(3), "--tls", certs)
    call("certs", "--out", certs)
    call("share", MODEL, "--out", str(shares))
    parties = []
    for index in range(3):
        file = str(shares / f"party{index}.safetensors")
        words = ("party", "--index", str(index), "--shares", file, "--sessions", "1", *where)
        print("private-llm", *words, flush=True)
        with open(folder / f"party{index}.log", "wb") as log:  # each has a screen of its own on real hosts
            parties.append(subprocess.Popen([*PRIVATE_LLM, *words], stdout=log, stderr=log))
    try:
        call("generate", str(shares / "client"), "--prompt", "The history of", "--max-new-tokens", "4", *where)
        for party in parties:
            party.wait(60)
    except BaseException:
        for index in range(3):
            print((folder / f"party{index}.log").read_text(), file=sys.stderr)
        raise
    finally:
        for party in parties:
            party.kill()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
