"""What a GPU does here: a first check, models with the parts of their time, kernels, and the tests that matter.

python scripts/studies/bench_gpu.py --seconds 280 --out rows.jsonl      everything that fits, the most important first
python scripts/studies/bench_gpu.py --only token prompt --prg chacha20  some parts
python scripts/studies/bench_gpu.py --only whole --layers 32 --at-rest seeds
python scripts/studies/bench_gpu.py --compare old.jsonl                 what changed since rows of before
python scripts/studies/bench_gpu.py --compare old.jsonl new.jsonl       the same for rows that are there, without a run
python scripts/studies/bench_gpu.py --tiny  the same code on the smallest sizes, without a GPU in Triton's interpreter

One JSON object per line, as soon as it is known. A part that fails or takes too long prints a row that says so, and the
others follow, in a new process, because an error may leave the GPU unusable for this one. Exit status 1 if one failed.
"""

import argparse
import json
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import gpu_kernel_rows as kernels  # noqa: E402
import gpu_model_rows as models  # noqa: E402
import scripts_folder  # noqa: E402, F401 - finds `bench`
import triton  # noqa: E402
from bench.rows import commit  # noqa: E402
from gpu_compared import compared  # noqa: E402
from gpu_model_rows import Given  # noqa: E402
from gpu_test_rows import tests  # noqa: E402
from gpu_timing import stacks  # noqa: E402

Row = dict[str, Any]
PARTS: dict[str, tuple[Callable[[Given], Iterator[Row]], float, float]] = {
    "check": (models.check, 10, 150),
    "token": (models.token, 30, 150),
    "prompt": (models.prompt, 20, 200),
    "gpt2": (models.small, 30, 200),
    "whole": (models.whole, 30, 400),
    "products": (lambda given: kernels.products(given.tiny), 15, 60),
    "seeded": (lambda given: kernels.seeded(given.tiny), 10, 60),
    "narrow": (lambda given: kernels.narrow(given.tiny), 5, 30),
    "convolutions": (lambda given: kernels.convolutions(given.tiny), 15, 60),
    "streams": (lambda given: kernels.streams(given.tiny), 5, 30),
    "tests": (tests, 30, 400),
    "images": (models.images, 30, 120),
    "processes": (models.processes, 60, 200),
}
"""By importance: what makes the rows, seconds below which it is not begun, and the most that it may take."""
KERNELS = ("products", "seeded", "narrow", "convolutions", "streams")


class Output:
    """Rows to standard output and to a file."""

    def __init__(self, path: Path | None, begun: bool) -> None:
        self._file = path.open("a" if begun else "w", encoding="utf-8") if path is not None else None
        self._lock = threading.Lock()
        self.rows: list[Row] = []
        if begun and path is not None:
            self.rows = read(path)

    def __call__(self, row: Row) -> None:
        """Print it."""
        with self._lock:
            self.rows.append(row)
            for file in (sys.stdout, self._file):
                if file is not None:
                    print(json.dumps(row, default=str), file=file, flush=True)


def read(path: Path) -> list[Row]:
    """Rows of a file; other lines, such as warnings of libraries, are passed over."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")]


def again(parts: Sequence[str], options: argparse.Namespace, ends: float) -> None:
    """Become a new process that runs the parts that are left: this one's GPU may be unusable, and threads may hang."""
    left = max(0.0, ends - time.monotonic())
    words = [sys.executable, *sys.argv, "--begun", "--seconds", f"{left:.0f}", "--only", *(parts or ["none"])]
    sys.stdout.flush()
    os.execv(sys.executable, words)


def main() -> None:
    """Print one JSON object per line."""
    options = _parser().parse_args()
    if options.compare and len(options.compare) == 2:
        print("\n".join(compared(*map(read, options.compare))))
        return
    if not GPU and not options.tiny:
        raise SystemExit("no GPU that PyTorch can use; --tiny runs the same code in Triton's interpreter")
    ends = time.monotonic() + options.seconds
    warnings.simplefilter("always")
    given = Given(options.tiny, ends, options.layers, options.at_rest, options.prg)
    out = Output(options.out, options.begun)
    warnings.showwarning = lambda text, kind, *_: out({"name": "warning", "kind": kind.__name__, "text": str(text)})
    if not options.begun:
        out(_machine(options.commit))
    chosen = [name for each in options.only or PARTS for name in (KERNELS if each == "kernels" else (each,))]
    failed = options.begun
    for number, name in enumerate(chosen):
        if name == "none" or (name == "tests" and options.no_tests):
            continue
        make, least, most = PARTS[name]
        if skip := given.skipped(least, name):
            out(skip)
            continue
        rest = chosen[number + 1 :]

        def late(name: str = name, rest: Sequence[str] = rest) -> None:
            out({"name": "late", "part": name, "threads": stacks()})
            again(rest, options, ends)

        watch = threading.Timer(min(most, given.left() + 20), late)
        watch.daemon = True
        if GPU:
            watch.start()
        began = time.monotonic()
        try:
            for row in make(given):
                failed |= row.get("tokens_equal_plaintext") is False or row.get("code", 0) != 0
                out({**row, "part": name, "at_s": round(options.seconds - given.left(), 1)})
        except Exception as error:  # noqa: BLE001 - the other parts follow
            watch.cancel()
            failed = True
            out(
                {
                    "name": "failed",
                    "part": name,
                    "error": repr(error)[:500],
                    "traceback": traceback.format_exc()[-3000:],
                }
            )
            if GPU:
                again(rest, options, ends)
        watch.cancel()
        models.let_go()
        out({"name": "part", "part": name, "seconds_part": round(time.monotonic() - began, 1)})
    if options.compare:
        print("\n".join(compared(read(options.compare[0]), out.rows)))
    raise SystemExit(int(failed))


def _machine(named: str | None) -> Row:
    machine = torch.cuda.get_device_name() if GPU else "no GPU: Triton's interpreter, nothing is timed"
    versions = {"torch": torch.__version__, "triton": triton.__version__, "commit": named or commit()}
    return {"name": "machine", "gpu": machine, "cores": os.cpu_count(), **versions}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="smallest sizes; runs without a GPU")
    parser.add_argument("--seconds", type=float, default=300.0, help="what no longer fits is left out (300)")
    parser.add_argument("--only", nargs="+", choices=[*PARTS, "kernels", "none"], help="some parts, in this order")
    parser.add_argument("--no-tests", action="store_true", help="without the tests")
    parser.add_argument("--prg", choices=("aes", "chacha20"), help="cipher of common streams (the library's default)")
    parser.add_argument("--layers", type=int, help="of the part 'whole' (as many as fit)")
    parser.add_argument(
        "--at-rest", choices=("auto", "resident", "seeds"), default="resident", help="of the part 'whole'"
    )
    parser.add_argument("--out", type=Path, help="also write the rows to this file")
    parser.add_argument("--compare", type=Path, nargs="+", help="rows of before (and of now, to run nothing)")
    parser.add_argument("--commit", help="what the rows say where git is not at hand")
    parser.add_argument("--begun", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
