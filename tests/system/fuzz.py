"""Malformed input in great number: nothing but the library's own errors, no hang, no memory that grows.

python tests/system/fuzz.py --target frames --cases 1000000 --seed 1
python tests/system/fuzz.py --target messages --again failures/messages-17.json     a failure once more
python tests/system/fuzz.py --tiny                                                  a sample of everything, in seconds

Targets: frames, handshake, messages (see fuzz_wire.py), shares (fuzz_files.py), party (parties that serve one client at
a time, fuzz_party.py), service (party services, fuzz_service.py), http (the gateway and a model, fuzz_http.py), bodies
(the gateway alone, fuzz_bodies.py). A case is made from seed, target and its number, and is plain JSON: what failed is
written to --out and runs again from there. A case that takes longer than --limit seconds is a hang: all
stacks are printed and the run ends. Memory is flat if, by its slope without the first quarter, the run added less than
5 % and 8 MB. SIGTERM ends a run early, with its report. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Protocol

from process_memory import growth, process_mb
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ALLOWED, ALLOWED_MB = 0.05, 8.0
"""What a run may add to a process's memory: this part of it, and at least so much."""
MOST_KEPT = 20
"""Failures of one target that are written down."""
_SAMPLES = 200
"""How often memory is looked at."""


class Target(Protocol):
    """Something to feed: makes cases, runs them, raises for what must not happen.

    It may have `processes`, whose memory is watched too, and `close`, which may find failures of its own.
    """

    def make(self, random: Random) -> dict[str, Any]:
        """A case, as JSON."""

    def run(self, case: dict[str, Any]) -> None:
        """Raise whatever the code under test must not raise, or Failure."""


TARGETS = {
    "frames": "fuzz_wire.Frames", "handshake": "fuzz_wire.Handshake", "messages": "fuzz_wire.Messages",
    "shares": "fuzz_files.Shares", "party": "fuzz_party.Party", "service": "fuzz_service.Service",
    "http": "fuzz_http.Http", "bodies": "fuzz_bodies.Bodies",
}  # fmt: skip
"""Where each is; one is imported when it is fuzzed."""
TINY = {"frames": 1000, "handshake": 500, "messages": 1000, "shares": 100, "party": 8, "service": 8, "http": 50,
        "bodies": 300}  # fmt: skip
"""Cases of a sample."""


def made(name: str) -> Target:
    """A target by its name."""
    module, _, kind = TARGETS[name].partition(".")
    target: Target = getattr(importlib.import_module(module), kind)()
    return target


class Watchdog:
    """Ends the process when a case hangs, with the case written down and all stacks shown."""

    def __init__(self, limit_s: float, write: Callable[[dict[str, Any], str], Path]) -> None:
        self._limit, self._write = limit_s, write
        self._since, self.case = time.monotonic(), {}  # type: tuple[float, dict[str, Any]]
        self._stop = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def begin(self, case: dict[str, Any]) -> None:
        """A case begins."""
        self.case, self._since = case, time.monotonic()

    def close(self) -> None:
        """Nothing runs any more."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(0.25):
            if time.monotonic() - self._since > self._limit:
                path = self._write(self.case, f"hang: longer than {self._limit:g} s")
                print(f"a case hangs; it is in {path}", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=sys.stderr)
                os._exit(3)


def fuzz(name: str, cases: int, seed: int, first: int, out: Path, limit_s: float) -> bool:
    """Run cases of one target; prints its result. Returns whether all passed and memory stayed flat."""
    target = made(name)
    watched = {"self": [], **{each: [] for each in getattr(target, "processes", ())}}  # type: dict[int | str, list[float]]
    failed, every = 0, max(1, cases // _SAMPLES)

    def write(case: dict[str, Any], error: str) -> Path:
        path = out / f"{name}-{seed}-{number}.json"
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"target": name, "seed": seed, "number": number, "error": error, "case": case}))
        return path

    number, start = first, time.monotonic()
    interrupted = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: interrupted.set())
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    watchdog = Watchdog(limit_s, write)
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task(name, total=cases, note="")
        for number in range(first, first + cases):
            if interrupted.is_set():
                cases = number - first
                break
            case = case_of(target, f"{seed}/{name}/{number}")
            watchdog.begin(case)
            try:
                target.run(case)
            except Exception as error:
                failed += 1
                if failed <= MOST_KEPT:
                    path = write(case, "".join(traceback.format_exception(error)))
                    progress.console.print(f"{path}: {type(error).__name__}: {error}"[:400], markup=False)
            done = number - first + 1
            if done % every == 0:
                for process, series in watched.items():
                    series.append(process_mb(process, "RssAnon"))
                progress.update(task, completed=done, note=f"{done / (time.monotonic() - start):.0f}/s {failed} failed")
    watchdog.close()
    seconds = time.monotonic() - start
    if hasattr(target, "close"):
        target.close()
    print(f"{name}: {cases - failed} passed, {failed} failed; {cases / seconds:.0f} cases/s, {seconds:.0f} s", end="")
    steady = [flat(process, series) for process, series in watched.items()]
    print(flush=True)
    return all(steady) and not failed


def case_of(target: Target, which: str) -> dict[str, Any]:
    """The case of this seed, name and number; another one where it has nests in nests, deeper than JSON is written."""
    while True:
        try:
            return target.make(Random(which))
        except RecursionError:
            which += "/again"


def flat(process: int | str, series: list[float]) -> bool:
    """Print what a process's memory did; whether it stayed within its bound."""
    added, bound = growth(series) * len(series), max(ALLOWED_MB, ALLOWED * series[-1])
    who = "memory" if process == "self" else f"of process {process}"
    print(f"; {who} {added:+.1f} MB of {series[-1]:.0f} MB (bound {bound:.0f} MB)", end="")
    print("" if added <= bound else " NOT FLAT", end="")
    return added <= bound


def again(path: Path) -> None:
    """Run a case that was written down; what it raises is shown."""
    saved = json.loads(path.read_text())
    target = made(saved["target"])
    target.run(saved["case"])
    if hasattr(target, "close"):
        target.close()
    print(f"{path}: 1 passed, 0 failed")


def main() -> None:
    """Print a line for each target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, help="one of them (default: all)")
    parser.add_argument("--cases", type=int, default=10_000, help="cases of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds after which a case counts as a hang")
    parser.add_argument("--out", type=Path, help="folder for failures (default: a new temporary one)")
    parser.add_argument("--again", type=Path, help="run the case in this file")
    parser.add_argument("--tiny", action="store_true", help="a sample")
    given = parser.parse_args()
    logging.disable()  # refusals by the thousand
    given.limit = max(given.limit, 60.0) if given.tiny else given.limit  # the machines that run samples are busy
    if given.again:
        again(given.again)
        return
    out = given.out or Path(tempfile.mkdtemp(prefix="fuzz-"))
    fine = True
    for name in [given.target] if given.target else TARGETS:
        fine &= fuzz(name, TINY[name] if given.tiny else given.cases, given.seed, given.first, out, given.limit)
    sys.exit(not fine)


if __name__ == "__main__":
    main()
