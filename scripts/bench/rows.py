"""A benchmark row: what was run, how long it took, what it sent, how wrong it was, and on which machine."""

import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from private_llm_cli.commands.doctor import machine as machine

from bench.link import LinkSpeed
from private_llm.config import VERSION, PrivateConfig
from private_llm.kernels.parallel import threads_per_party


@dataclass(frozen=True)
class Row:
    """One result; `to_dict` is the JSON object.

    seconds: min, median and max over the repetitions, which come once steps are not recorded any more.
    seconds_first: of the first run, which compiles kernels and begins to record steps.
    bytes_total: over all links, in one run. bytes_preprocessing: those of them that depend on shapes alone (what the
    helping party sends). seconds_preprocessing: if these were sent apart, before: then `seconds` are the online phase.
    bytes_per_party: what each endpoint sent, "client" included. bytes_received: what each party received.
    rounds: exchanges that follow each other. error_max: largest absolute error against float64 on the same input.
    adder, relu_bits, relu_low (of comparisons), approximations: as in `PrivateConfig`.
    by_kind: of a whole model, by class of its modules: bytes over all links, bytes of the party that sent most, rounds,
    median seconds of the slowest party, and Gbit/s, which are those bytes in those seconds.
    after: of a language model, where it is measured apart: seconds, bytes and rounds of one further token.
    """

    name: str
    protocol: str
    ring: int
    shape: tuple[int, ...]
    parties: int
    seconds: dict[str, float]
    bytes_total: int
    bytes_per_party: dict[str, int]
    rounds: int
    error_max: float
    threads: int
    party_mode: str
    repeat: int
    bandwidth_mbit: float | None = None
    latency_ms: float | None = None
    bytes_preprocessing: int = 0
    seconds_preprocessing: dict[str, float] | None = None
    bytes_received: dict[str, int] = field(default_factory=dict)
    parallel_sessions: int = 1
    rotate_roles: bool = False
    adder: str = "auto"
    relu_bits: int | None = None
    relu_low: int = 0
    approximations: str = "ours"
    by_kind: dict[str, dict[str, float]] | None = None
    after: dict[str, Any] | None = None
    seconds_first: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The row with the machine and the versions it was taken with."""
        return {**asdict(self), **provenance()}


def provenance() -> dict[str, Any]:
    """Columns of every row: the machine, the versions, and the commit of the checkout (None outside of one)."""
    return {"machine": machine(), "torch": torch.__version__, "version": VERSION, "commit": commit()}


@lru_cache(maxsize=1)
def commit() -> str | None:
    """The commit this code runs at, with a "+" if files differ from it; None where no checkout or no git is."""
    here = Path(__file__).resolve().parent
    tracked = ("ls-files", "--error-unmatch", __file__)  # not so where this is installed inside another checkout
    asked = (tracked, ("describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"))
    try:
        answers = [
            subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=20, check=True)
            for words in asked
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return answers[-1].stdout.strip()


def settings(config: PrivateConfig, speed: LinkSpeed | None) -> dict[str, Any]:
    """The columns of a row that say how it was run, on emulated links of a speed or on those of this machine."""
    return {
        "protocol": config.protocol, "ring": config.ring, "parties": config.parties,
        "parallel_sessions": config.parallel_sessions, "rotate_roles": config.rotate_roles, "adder": config.adder,
        "relu_bits": config.relu_bits, "relu_low": config.relu_low,
        "approximations": config.approximations,
        "threads": threads_per_party(config.parties),
        "party_mode": "threads" if config.party_mode == "auto" else config.party_mode,
        "bandwidth_mbit": speed.bandwidth_mbit if speed else None, "latency_ms": speed.latency_ms if speed else None,
    }  # fmt: skip


def spread(times: Sequence[float]) -> dict[str, float]:
    """Smallest, median and largest of the measured seconds."""
    return {"min": min(times), "median": statistics.median(times), "max": max(times)}
