"""Parties as processes of their own: same results and costs as threads, no plaintext in their memory, no survivors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from private_llm_hf import patch
from transformers import PreTrainedModel

from private_llm.errors import PartyFailed
from private_llm.net import children
from tests.hf import tiny
from tests.hf.compare import BATCH, PADDED
from tests.hf.conftest import TRIO

PROCESSES = replace(TRIO, party_mode="processes")
PUBLIC_MARK = "a public mark in the configuration"
CANARY = torch.linspace(0.731, 0.947, 64)
PROMPT = [101, 47, 113, 89, 71, 23, 59, 97]


def descendants(parent: int) -> list[int]:
    """Process ids below `parent`, oldest first: the starter of each session, then its parties in order."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, above = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            except OSError:
                continue
            if int(above) == parent and state != "Z":
                found.append(int(entry.name))
    return [pid for child in sorted(found) for pid in (child, *descendants(child))]


def parties() -> list[int]:
    """Process ids of all parties of this process, in order of their sessions and numbers."""
    named = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"private_llm.net.children" in command and not descendants(pid):
                named.append(pid)
    return named


@pytest.fixture(scope="module")
def plaintext() -> PreTrainedModel:
    model = tiny.build("opt", public_note=PUBLIC_MARK)
    with torch.no_grad():
        model.model.decoder.layers[0].fc1.bias[:64] = CANARY
        model.model.decoder.embed_tokens.weight[5] = CANARY
    return model


@pytest.fixture(scope="module")
def private(plaintext: PreTrainedModel) -> Iterator[PreTrainedModel]:
    with patch(plaintext, PROCESSES) as model:
        yield model


@pytest.mark.full
def test_same_tokens_and_costs_as_with_threads(plaintext: PreTrainedModel, private: PreTrainedModel) -> None:
    how = {"max_new_tokens": 4, "do_sample": False}
    assert len(parties()) == 3
    private.cost(reset=True)
    assert torch.equal(private.generate(**BATCH, **how), plaintext.generate(**BATCH, **how))
    costs = private.cost()
    with patch(plaintext, TRIO) as threads:
        threads.generate(**BATCH, **how)
        want = threads.cost()
    assert costs.cost == want.cost
    assert costs.by_module() == want.by_module()


def memory_holds(pid: int, patterns: dict[str, bytes]) -> set[str]:
    """Which patterns occur in the writable memory of a process."""
    found = set()
    spans = []
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, second = line.split()[:2]
        if "-" in first and not first.endswith(":"):
            span, writable = first, second.startswith("rw")
        elif first == "Rss:" and writable and int(second):  # what was never touched holds nothing
            spans.append(span)
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for span in spans:
            start, stop = (int(part, 16) for part in span.split("-"))
            overlap = b""
            for at in range(start, stop, 1 << 24):
                try:
                    memory.seek(at)
                    piece = overlap + memory.read(min(1 << 24, stop - at))
                except (OSError, OverflowError, ValueError):
                    break
                found |= {name for name, pattern in patterns.items() if pattern in piece}
                overlap = piece[-4096:]
    return found


def test_no_party_ever_holds_weights_or_tokens(private: PreTrainedModel) -> None:
    """Canaries in the weights, as stored, encoded, or in half precision, and the prompt as integers or text."""
    ids = torch.tensor([PROMPT])
    private.generate(ids, max_new_tokens=3, do_sample=False)
    encoded = torch.round(CANARY.double() * 2**18).to(torch.int64)
    patterns = {
        "control": PUBLIC_MARK.encode(),
        "float32": CANARY[:8].numpy().tobytes(),
        "float64": CANARY[:8].double().numpy().tobytes(),
        "float16": CANARY[:8].half().numpy().tobytes(),
        "ring": encoded[:8].numpy().tobytes(),
        "tokens int64": struct.pack("<8q", *PROMPT),
        "tokens int32": struct.pack("<8i", *PROMPT),
        "tokens text": json.dumps(PROMPT).encode(),
        "tokens compact": json.dumps(PROMPT, separators=(",", ":")).encode(),
    }
    pids = parties()
    assert len(pids) == 3
    for pid in pids:
        assert memory_holds(pid, patterns) == {"control"}, "only the public mark may be found"


@pytest.mark.full
def test_a_stopped_party_is_named_within_the_timeout(plaintext: PreTrainedModel) -> None:
    before = set(parties())
    model = patch(plaintext, replace(PROCESSES, timeout_s=8))
    victim = next(pid for pid in reversed(parties()) if pid not in before)
    os.kill(victim, signal.SIGSTOP)
    try:
        with pytest.raises(PartyFailed, match="party 2"):
            model(PADDED)
    finally:
        with contextlib.suppress(ProcessLookupError):  # killed when it did not end by itself
            os.kill(victim, signal.SIGCONT)
        model.close()


@pytest.mark.full
def test_parties_die_with_their_parent(tmp_path: Path) -> None:
    script = (
        "import os, sys; from tests.hf import tiny; from private_llm_hf import patch; "
        "from tests.hf.conftest import PLAIN; from dataclasses import replace; "
        "from tests.hf.test_processes import parties; "
        "m = patch(tiny.build('opt'), replace(PLAIN, party_mode='processes')); "
        "print(parties()[0], flush=True); os._exit(9)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 9, done.stderr
    pid = int(done.stdout.split()[-1])
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    """Not gone, and not merely waiting to be reaped by init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_party_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children.sys, "executable", "/bin/false")
    with pytest.raises(PartyFailed, match="did not start"):
        patch(tiny.build("opt"), PROCESSES)


def test_a_killed_party_is_named_and_the_others_end(private: PreTrainedModel) -> None:
    """The last test of this file: it ends the session of the others."""
    mine = parties()
    os.kill(mine[1], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PartyFailed, match="party 1"):
        private.generate(PADDED, max_new_tokens=3)
    assert time.monotonic() - start < 20
    private.close()
    assert not set(parties()) & set(mine)
