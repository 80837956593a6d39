"""Many sessions one after the other: the memory of the processes must not grow with their number.

python tests/system/soak.py                      200 sessions of threads in this process, 200 of parties with processes
python tests/system/soak.py --sessions 50 --protocol quad
python tests/system/soak.py --tiny               eight sessions of a small model

Each session shares a checkpoint, generates a few tokens from a prompt of another length, and is closed. After it the
own resident memory of every process (no pages of files, which come and go) is noted, and here the bytes of tensors
that are alive. One JSON object per process;
the exit status is 1 if a line is not flat: if by its slope, the first quarter left out, the run added more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from measure_memory import free_hosts
from private_llm_hf import AutoPrivateModelForCausalLM
from process_memory import growth, live_bytes, process_mb
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from private_llm.config import PrivateConfig

SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_key_value_heads": 2}
TINY = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_key_value_heads": 2}
ALLOWED = 0.05
"""Part of a process's memory that a run may add."""
LENGTHS = 24
"""Prompts have 4 to 27 tokens, so that plans of many shapes are made; fewer shapes where a quarter of the run, which is
left out, has fewer sessions: each shape keeps some constants."""


@dataclass
class Line:
    """One process's memory after each session."""

    name: str
    mb: list[float] = field(default_factory=list)
    tensors_mb: list[float] = field(default_factory=list)

    def flat(self) -> bool:
        """Whether neither the process nor its tensors grow with the number of sessions."""
        added = growth(self.mb) * len(self.mb) <= ALLOWED * self.mb[-1]
        return added and growth(self.tensors_mb) * len(self.tensors_mb) <= ALLOWED * max([1.0, *self.tensors_mb])

    def row(self, protocol: str) -> dict[str, object]:
        """For JSON."""
        row = {
            "name": "soak", "process": self.name, "protocol": protocol, "sessions": len(self.mb),
            "mb_first": round(self.mb[0]), "mb_most": round(max(self.mb)), "mb_last": round(self.mb[-1]),
            "mb_per_session": round(growth(self.mb), 3), "flat": self.flat(),
        }  # fmt: skip
        return row | ({"tensors_mb_per_session": round(growth(self.tensors_mb), 3)} if self.tensors_mb else {})


def session(checkpoint: Path, config: PrivateConfig, number: int, sessions: int) -> None:
    """Number `number` of so many, from loading to closing."""
    with AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), config) as model:
        ids = torch.arange(5, 9 + number % min(LENGTHS, max(1, sessions // 4)))[None]
        model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0)


def threads(checkpoint: Path, protocol: str, sessions: int, tell: Callable[[list[Line]], None]) -> list[Line]:
    """Parties as threads of this process."""
    line = Line("all in one")
    for number in range(sessions):
        session(checkpoint, PrivateConfig(protocol=protocol, party_mode="threads"), number, sessions)
        line.mb.append(process_mb(entry="RssAnon"))
        line.tensors_mb.append(live_bytes() / 1e6)
        tell([line])
    return [line]


def remote(checkpoint: Path, protocol: str, sessions: int, tell: Callable[[list[Line]], None]) -> list[Line]:
    """Parties as processes that serve one client after the other."""
    count = PrivateConfig(protocol=protocol).endpoints
    hosts = free_hosts(count)
    config = PrivateConfig(protocol=protocol, party_mode="remote", hosts=tuple(hosts), allow_plain_loopback=True)
    lines = [Line(f"party {party}") for party in range(count)]
    with serving(config, sessions) as processes:
        for number in range(sessions):
            session(checkpoint, config, number, sessions)
            for line, process in zip(lines, processes, strict=True):
                await_notice(process, f"session {number + 1} ended")
                line.mb.append(process_mb(process.pid, "RssAnon"))
            tell(lines)
    return lines


@contextmanager
def serving(config: PrivateConfig, sessions: int) -> Iterator[list[subprocess.Popen[str]]]:
    """One process of `private-llm party` for each party, for one session more than asked for."""
    command = [sys.executable, "-c", "from private_llm_cli.app import main; main()", "party", "--allow-plain-loopback"]
    command += ["--protocol", config.protocol, "--hosts", ",".join(config.hosts), "--sessions", str(sessions + 1)]
    running = [
        subprocess.Popen([*command, "--index", str(party)], stderr=subprocess.PIPE, text=True)
        for party in range(config.endpoints)
    ]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def await_notice(process: subprocess.Popen[str], wanted: str) -> None:
    """Read a party's notices up to this one. Raises RuntimeError if it ends before."""
    seen = []
    for line in process.stderr or ():
        seen.append(line)
        if wanted in line:
            return
    raise RuntimeError(f"a party ended before {wanted!r}; it said: {''.join(seen)[-2000:]}")


def main() -> None:
    """Print one JSON object per process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, help="sessions of each kind (default: 200, tiny 8)")
    parser.add_argument("--protocol", default="trio", help="trio, quad or dealer")
    parser.add_argument("--only", choices=["threads", "remote"], help="one of both kinds")
    parser.add_argument("--every", type=int, default=10, help="sessions for each line of progress (standard error)")
    parser.add_argument("--tiny", action="store_true", help="a few sessions of a small model")
    given = parser.parse_args()
    sessions, every = given.sessions or (8 if given.tiny else 200), 4 if given.tiny else given.every
    logging.disable_progress_bar()
    rows = []

    def tell(lines: list[Line]) -> None:
        done = len(lines[0].mb)
        if done % every == 0 or done == sessions:
            memory = ", ".join(f"{line.name} {line.mb[-1]:.0f} MB" for line in lines)
            print(f"{done} of {sessions} sessions: {memory}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        settings = LlamaConfig(
            **(TINY if given.tiny else SMALL), num_attention_heads=4, vocab_size=512, tie_word_embeddings=True
        )
        LlamaForCausalLM(settings).save_pretrained(folder)
        for kind in (threads, remote):
            if given.only in (None, kind.__name__):
                rows += kind(Path(folder), given.protocol, sessions, tell)
    for line in rows:
        print(json.dumps(line.row(given.protocol)), flush=True)
    sys.exit(not all(line.flat() for line in rows))


if __name__ == "__main__":
    main()
