"""Puts one wrong line after the other into a copy of the repository, and says which of them no test notices.

    python tests/system/run_mutants.py --only replay 17                        a kind, and number 17 (default: all)
    python tests/system/run_mutants.py --tiny                                  only look whether every entry applies
    python tests/system/run_mutants.py -- --gate                               each one's own tests, if in the gate
    python tests/system/run_mutants.py --tests gate -- -n 2 --dist loadfile    by the whole gate

`mutants.toml` lists the mutants, numbered from 1 in its order. Each verdict is a line of JSON on standard output.
Progress and the summary go to standard error. Tests that do not end in time count as failed. The exit code is 1 if a
mutant survives and its entry does not say why (`survives`), 2 if an entry does not fit or tests fail without a mutant.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = (
    "mask", "truncation", "wrap", "guard", "range", "authentication", "framing", "replay", "refusal", "price", "cache",
    "sparsity", "sampling", "threat", "wire", "files",
)  # fmt: skip
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_SETTINGS = dict.fromkeys(("HF_HUB_OFFLINE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # as scripts/test.sh has it
_SETTINGS |= {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "4"}


class Unfit(Exception):
    """An entry that does not fit, or tests that fail without a mutant."""


@dataclass(frozen=True)
class Mutant:
    """`new` in the place of `old` in a file. what: what a user then suffers. survives: why no test has to notice."""

    number: int
    kind: str
    file: str
    old: str
    new: str
    what: str
    tests: tuple[str, ...]
    survives: str | None = None

    def applied(self, text: str) -> str:
        """The text of the file with this mutant. Raises Unfit unless `old` is there exactly once."""
        found = text.count(self.old)
        if found != 1:
            where = f"mutant {self.number}, {self.file}: `old` is there {found} times"
            raise Unfit(f"{where}; want once, so bring its entry in mutants.toml up to date, or drop it: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Verdict:
    """by: the first test that failed, or why the run ended without one; None for a survivor."""

    number: int
    killed: bool
    by: str | None
    seconds: float


def load() -> list[Mutant]:
    """All mutants. Raises TypeError for an entry with missing or unknown keys."""
    entries = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text("utf-8"))["mutant"]
    return [Mutant(number, **{**entry, "tests": tuple(entry["tests"])}) for number, entry in enumerate(entries, 1)]


class Copy:
    """A copy of what git tracks, with its history, where one mutant at a time stands."""

    def __init__(self, folder: Path) -> None:
        self._tree, self._cache, self._stamp = folder / "tree", folder / "cache", int(time.time())
        subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", ROOT, self._tree], check=True)
        subprocess.run(["git", "-C", self._tree, "reset", "-q"], check=True)
        tracked = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], check=True, capture_output=True).stdout
        for name in tracked.decode().split("\0"):
            if (ROOT / name).is_file():
                (self._tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self._tree / name)

    def _write(self, file: str, text: str) -> None:
        """With a time of its own: Python compiles a file of equal length anew by the second it was written in."""
        self._stamp += 2
        (self._tree / file).write_text(text, "utf-8")
        os.utime(self._tree / file, (self._stamp, self._stamp))

    def tried(self, mutant: Mutant, arguments: Sequence[str], seconds: float) -> Verdict:
        """Run pytest with a mutant in place. Raises Unfit if there was no test."""
        before, began = (self._tree / mutant.file).read_text("utf-8"), time.monotonic()
        self._write(mutant.file, mutant.applied(before))
        try:
            # compiled kernels are kept by a digest of their sources: those of a mutant go with this copy
            code, said = self.run(["-x", *arguments], seconds, apart=mutant.file.startswith("private_llm/kernels/"))
        finally:
            self._write(mutant.file, before)
        if code in (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR):
            raise Unfit(f"mutant {mutant.number}: no test was run by {' '.join(arguments)}")
        failed = _FAILED.search(said)
        by = None if code == 0 else "timeout" if code is None else failed[1] if failed else f"exit code {code}"
        return Verdict(mutant.number, code != 0, by, round(time.monotonic() - began, 1))

    def run(self, arguments: Iterable[str], seconds: float, apart: bool = False) -> tuple[int | None, str]:
        """Exit code, None after a timeout, and what was said. apart: with a cache folder of its own."""
        own = {"PYTHONPATH": f"{self._tree}{os.pathsep}{self._tree / 'integrations'}"}
        own |= {"XDG_CACHE_HOME": str(self._cache)} if apart else {}
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments], cwd=self._tree,
            env=os.environ | _SETTINGS | own, text=True, errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=seconds)
        except BaseException as error:  # whatever ends this run ends the parties that its tests started, too
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return None, process.communicate()[0]
            raise
        return process.returncode, said


def chosen(mutants: list[Mutant], only: Sequence[str]) -> list[Mutant]:
    """Those of these kinds and numbers, all if none is named. Raises Unfit for another name."""
    if unknown := {*only} - {*KINDS, *(str(mutant.number) for mutant in mutants)}:
        raise Unfit(f"--only: got {', '.join(unknown)}; want numbers up to {len(mutants)}, or {', '.join(KINDS)}")
    return [mutant for mutant in mutants if not only or {mutant.kind, str(mutant.number)} & {*only}]


def run(mutants: list[Mutant], options: argparse.Namespace) -> Iterator[Verdict]:
    """Try the mutants. Raises Unfit before the first one for an entry that does not fit, and for tests that fail."""
    for mutant in mutants:
        mutant.applied((ROOT / mutant.file).read_text("utf-8"))
    more = ["-ra", *options.arguments]  # the summary is read
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(options.jobs):
            copies.put(first := Copy(Path(folder) / str(number)))
        if not options.skip_baseline:
            every = sorted({test for mutant in mutants for test in mutant.tests}) if options.tests == "listed" else []
            code, said = first.run([*every, *more], options.timeout * len(mutants))
            if code != 0:
                raise Unfit(f"tests fail without any mutant (exit code {code}):\n{said[-4000:]}")

        def tried(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                own = mutant.tests if options.tests == "listed" else ()
                return copy.tried(mutant, [*own, *more], options.timeout)
            finally:
                copies.put(copy)

        try:
            yield from pool.map(tried, mutants)
        finally:
            pool.shutdown(cancel_futures=True)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="KIND|NUMBER", help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="copies side by side, about 2 GB each (default: 1)")
    parser.add_argument("--tests", choices=("listed", "gate"), default="listed", help="which tests (default: listed)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one mutant (default: 900)")
    parser.add_argument("--skip-baseline", action="store_true", help="do not run the tests without a mutant first")
    parser.add_argument("--tiny", action="store_true", help="run no tests: apply every entry once, in memory")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="of pytest")
    options = parser.parse_args()
    alive = []
    try:
        mutants = chosen(load(), options.only)
        if options.tiny:
            changed = [mutant.applied((ROOT / mutant.file).read_text("utf-8")) for mutant in mutants]
            print(f"{len(changed)} mutants apply")
            return 0
        for at, (mutant, verdict) in enumerate(zip(mutants, run(mutants, options), strict=True), 1):
            print(json.dumps(asdict(verdict)), flush=True)
            alive += [] if verdict.killed else [mutant]
            end = f"{f'killed by {verdict.by}' if verdict.killed else 'SURVIVES'} ({verdict.seconds} s)"
            print(f"{at}/{len(mutants)}  {mutant.number} {mutant.kind} {mutant.file}: {end}", file=sys.stderr)
    except Unfit as error:
        parser.exit(2, f"{error}\n")
    print(f"{len(mutants) - len(alive)} of {len(mutants)} mutants killed", file=sys.stderr)
    for mutant in (unsaid := [mutant for mutant in alive if mutant.survives is None]):
        print(f"wants a test, or `survives`: {mutant.number} {mutant.file}: {mutant.what}", file=sys.stderr)
    return 1 if unsaid else 0


if __name__ == "__main__":
    sys.exit(main())
