"""Parties as processes of this machine that serve a small model from share files, for scripts that attack them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from measure_memory import free_hosts
from private_llm_hf.api import share_checkpoint
from private_llm_hf.checkpoint.share_files import share_path
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from private_llm.config import PrivateConfig

VOCABULARY = 512
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": VOCABULARY, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Served:
    """Parties that run. source: the folder that a client loads. plain: the same model in plaintext."""

    config: PrivateConfig
    source: str
    plain: LlamaForCausalLM
    processes: tuple[int, ...]
    log: Path

    @property
    def ports(self) -> tuple[tuple[str, int], ...]:
        """Where the parties listen."""
        return tuple((host.rpartition(":")[0], int(host.rpartition(":")[2])) for host in self.config.hosts)


@contextlib.contextmanager
def served(folder: Path, protocol: str = "trio", timeout_s: float = 30.0) -> Iterator[Served]:
    """Share a small random model, and serve it until the block is left."""
    logging.disable_progress_bar()
    torch.manual_seed(7)
    plain = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    plain.generation_config.pad_token_id = 0
    plain.save_pretrained(folder / "checkpoint")
    share_checkpoint(str(folder / "checkpoint"), folder / "shares", PrivateConfig(protocol=protocol))
    hosts = tuple(free_hosts(PrivateConfig(protocol=protocol).parties))
    config = PrivateConfig(
        protocol=protocol, party_mode="remote", allow_plain_loopback=True, timeout_s=timeout_s, hosts=hosts,
        busy_wait_s=120.0,
    )  # fmt: skip
    log = folder / "parties.log"
    command = [sys.executable, "-c", "from private_llm_cli.app import main; main()", "party", "--allow-plain-loopback"]
    command += ["--protocol", protocol, "--hosts", ",".join(hosts), "--timeout", str(timeout_s)]
    with log.open("w") as out:
        running = [
            subprocess.Popen(
                [*command, "--index", str(party), "--shares", str(share_path(folder / "shares", party))],
                stdout=out, stderr=out,
            )
            for party in range(config.parties)
        ]  # fmt: skip
        try:
            _await(log, config.parties)
            yield Served(config, str(folder / "shares" / "client"), plain, tuple(p.pid for p in running), log)
            ended = [number for number, process in enumerate(running) if process.poll() is not None]
            if ended:
                raise RuntimeError(f"parties {ended} ended; they said: {log.read_text()[-2000:]}")
        finally:
            for process in running:
                process.kill()
                process.wait()


def _await(log: Path, parties: int, seconds: float = 60.0) -> None:
    """Wait until all parties listen."""
    deadline = time.monotonic() + seconds
    while log.read_text().count("waits for the others") < parties:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the parties do not listen; they said: {log.read_text()[-2000:]}")
        time.sleep(0.05)
