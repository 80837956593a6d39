"""Measure each ratio of tests/bars.toml beside its baseline in the same run, and fail where one is below its bar.

python scripts/studies/check_bars.py            all of them (two minutes on two quiet cores)
python scripts/studies/check_bars.py replay     some of them
python scripts/studies/check_bars.py --tiny     smallest shapes, no verdict: does everything run?

One JSON row a line. A ratio below its bar is measured again, three times in all, because other work on the machine
disturbs it; the best one counts.
"""

import argparse
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_service
import cache_step
import cascade_rows
import scripts_folder  # noqa: F401 - finds `bench`
import torch
from bench.catalogue import make
from bench.measure import measure_in_turns
from bench.rows import provenance
from bench_kernels import measure_kernels
from private_llm_cli.commands.models import quiet
from private_llm_cli.commands.output import emit_json

from private_llm.config import PrivateConfig
from private_llm.kernels.parallel import usable_cores

ROOT = Path(__file__).resolve().parents[2]


def replay(tiny: bool) -> float:
    """A decode step in Python by one that is a program; fastest runs, because the first runs are recorded."""
    work = make("opt-decode", tiny=tiny)
    rows = measure_in_turns(
        [(work, PrivateConfig(replay=False)), (work, PrivateConfig(replay=True))], 2 if tiny else 25
    )
    python, program = (row.seconds["min"] for row in rows)
    return python / program


def listed_rows(tiny: bool) -> float:
    """Of both feed-forward layers the lesser: the dense product by that of listed rows, medians of processor time."""
    rows = list(measure_kernels(1 if tiny else 5, tiny, wanted=lambda _, note: note == "90 % zero, scattered"))
    largest = max(row.shape for row in rows)
    return min(row.over_dense or 0.0 for row in rows if (row.shape, row.ring) == (largest, 64))


def undistributed(tiny: bool) -> float:
    """The plaintext forward by token sharding's, median of neighbouring pairs."""
    torch.set_num_threads(usable_cores())  # the plaintext forward has all of them, too
    case = next(case for case in cascade_rows.cases(tiny) if case.part == "alone")
    return 1.0 / float(case.run(1 if tiny else 5)["ratio"]["median"])


def sessions(tiny: bool) -> float:
    """Tokens a second of eight sessions by those of one."""
    args = argparse.Namespace(
        model="", protocol="trio", latency=1.0, sessions=[1, 2 if tiny else 8], new=3 if tiny else 16, repeat=1,
        planned=False,
    )  # fmt: skip
    quiet()
    return float(bench_service.measure(args)[-1]["ratio"])


def _cache_step(tiny: bool) -> dict[str, Any]:
    shape, policy, repeat = cache_step.TINY if tiny else cache_step.USUAL
    return cache_step.row(shape, policy, True, repeat)


def cache_products(tiny: bool) -> float:
    """The two products of attention over 2,048 entries by the recorded step that makes them, processor time."""
    return 1.0 / float(_cache_step(tiny)["ratio_product"])


def mpcache_step(tiny: bool) -> float:
    """A recorded step over a full cache by one that reads what MPCache keeps of it, processor time."""
    return float(_cache_step(tiny)["ratio_kept"])


MEASURED: dict[str, Callable[[bool], float]] = {
    "replay": replay, "listed-rows": listed_rows, "undistributed": undistributed, "sessions": sessions,
    "cache-products": cache_products, "mpcache-step": mpcache_step,
}  # fmt: skip
_TRIES = 3


def main() -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASURED)}")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(MEASURED))
    if unknown:
        parser.error(f"got {', '.join(unknown)}; want some of {', '.join(MEASURED)}")
    bars = tomllib.loads((ROOT / "tests" / "bars.toml").read_text("utf-8"))["ratio"]
    missed = []
    for bar in bars:
        if options.names and bar["name"] not in options.names:
            continue
        ratio = 0.0
        for _ in range(1 if options.tiny else _TRIES):
            ratio = max(ratio, MEASURED[bar["name"]](options.tiny))
            if ratio >= bar["at_least"]:
                break
        emit_json({**bar, "ratio": round(ratio, 3), **provenance()})
        if ratio < bar["at_least"] and not options.tiny:
            missed.append(f"{bar['name']}: {bar['what']}: {ratio:.2f} times, want at least {bar['at_least']}")
    print("\n".join(missed), file=sys.stderr, end="\n" if missed else "")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
