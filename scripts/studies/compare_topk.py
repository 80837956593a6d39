"""The k = n / 4 largest of secret rows by every method of `private_llm.oblivious.topk`: bytes, rounds, seconds.

    python scripts/studies/compare_topk.py  # the table of docs/studies/top-k.md: trio, 1 and 32 rows, n of 16 to 4096
    python scripts/studies/compare_topk.py --json  # rows
    python scripts/studies/compare_topk.py --tiny  # a few seconds

Zeros and ones as numbers are the result, checked against sorting. Parties are threads of this machine, seconds the best
of some runs; bytes are those over all links, by formula. A method whose bytes would be above 300 MB is not run. `auto`
is what the library runs; it supposes 1 Gbit/s, which is slower than memory.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import scripts_folder  # noqa: F401 - finds `bench`
import torch
from bench.measure import measure
from bench.rows import machine
from bench.work import Run, Work
from private_llm_cli.commands.output import emit_json, progress_bar
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.exact.comparisons import RANGE_BITS
from private_llm.oblivious.topk import Method, cost, largest, method_for
from private_llm.protocols.registry import Pricing
from private_llm.protocols.session import Session

METHODS: tuple[Method, ...] = ("pairs", "network", "search")
MOST_BYTES = 300e6


@dataclass(frozen=True)
class Result:
    """One method at one shape. seconds: None if it was not run. auto: whether it is the library's choice."""

    rows: int
    n: int
    method: str
    auto: bool
    bytes: int
    rounds: int
    seconds: float | None


def work_of(rows: int, n: int, method: Method) -> Work:
    """Zeros and ones of the n / 4 largest of rows of normal values."""

    def prepare(_: Session, __: Mapping[str, object]) -> Run:
        return lambda _, given: largest(given[0], n // 4, method)

    def truth(values: Sequence[Tensor], _: Mapping[str, Tensor]) -> Tensor:
        return torch.zeros_like(values[0]).scatter_(-1, values[0].topk(n // 4, dim=-1).indices, 1.0)

    return Work(f"top-k by {method}", (rows, n), ((rows, n),), prepare, truth)


def measured(config: PrivateConfig, rows: int, n: int, repeat: int) -> list[Result]:
    """All methods at one shape, in a session each."""
    pricing, bits = Pricing.of(config), RANGE_BITS + config.frac_bits + 1
    auto = method_for(pricing, rows, n, n // 4, bits)
    found = []
    for method in METHODS:
        price = cost(pricing, rows, n, n // 4, bits, method) + pricing.numbers(rows * n)
        seconds = None
        if price.total <= MOST_BYTES:
            row = measure(work_of(rows, n, method), config, repeat)
            if row.error_max:
                raise SystemExit(f"{method}, {rows} x {n}: the result is wrong")
            seconds = row.seconds["min"]
        found.append(Result(rows, n, method, method == auto, price.total, price.rounds, seconds))
    return found


def table(results: Sequence[Result]) -> str:
    """Markdown: a line for each shape, the library's choice in bold."""
    heads = ("rows x n", *(f"{method}: kB, rounds, ms" for method in METHODS))
    lines = [f"{machine()}; load {os.getloadavg()[0]:.1f}:", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for at in range(0, len(results), len(METHODS)):
        cells = []
        for each in results[at : at + len(METHODS)]:
            took = "-" if each.seconds is None else f"{each.seconds * 1e3:.1f}"
            text = f"{each.bytes / 1e3:.0f}, {each.rounds}, {took}"
            cells.append(f"**{text}**" if each.auto else text)
        lines.append(f"| {results[at].rows} x {results[at].n} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    parser.add_argument("--tiny", action="store_true", help="n = 16 and 64 alone, one row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    widths = (16, 64) if options.tiny else (16, 64, 256, 1024, 4096)
    shapes = [(rows, n) for rows in ((1,) if options.tiny else (1, 32)) for n in widths]
    results = []
    with progress_bar(len(shapes), quiet=options.json) as step:
        for rows, n in shapes:
            results += measured(PrivateConfig(), rows, n, 2 if options.tiny else 7)
            step(f"{rows} x {n}")
    if options.json:
        for each in results:
            emit_json({**asdict(each), "machine": machine()})
    else:
        print(table(results))


if __name__ == "__main__":
    main()
