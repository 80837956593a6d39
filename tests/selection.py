"""Which tests run: the gate, everything, or one slice of what the gate leaves out.

    pytest                       the gate
    pytest --all                 everything
    pytest --slice 3/12          of what the gate leaves out, the third of twelve parts
    pytest tests/nn/test_x.py    named files: everything in them (with --gate: what the gate runs of them)

The gate leaves out tests of tests/system, tests marked `full`, and of a test marked `sampled(n)` all but one case in n.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable

import pytest


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("selection")
    group.addoption("--all", action="store_true", help="run the tests that the gate leaves out, too")
    group.addoption("--gate", action="store_true", help="of named files, run what the gate runs")
    group.addoption(
        "--slice", metavar="K/N", help="run part K of N of the tests that the gate leaves out, and no others"
    )


def configure(config: pytest.Config) -> None:
    """Whoever names files or tests wants all in them; processes of xdist read the same arguments."""
    if config.args_source is config.ArgsSource.ARGS and not config.getoption("--gate"):
        config.option.all = True


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what this run leaves out. Raises UsageError for an impossible slice."""
    part = config.getoption("--slice")
    if part is None and config.getoption("--all"):
        return
    left_out = outside_the_gate(items)
    if part is None:
        kept = [item for item in items if item.nodeid not in left_out]
    else:
        at, parts = _slice(part)
        kept = [item for item in items if item.nodeid in left_out and _hash(item.nodeid) % parts == at % parts]
    chosen = {item.nodeid for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = kept


def outside_the_gate(items: Iterable[pytest.Item]) -> set[str]:
    """Names of the tests that the gate leaves out."""
    found, sampled = set(), defaultdict[tuple[str, int], list[str]](list)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if "system" in item.path.parts or item.get_closest_marker("full"):
            found.add(item.nodeid)
        elif marker is not None:
            sampled[_function(item), int(marker.args[0])].append(item.nodeid)
    for (_, one_in), names in sampled.items():
        names.sort(key=_hash)  # every process of a run, and every machine, has to choose the same ones
        found.update(names[-(-len(names) // one_in) :])
    return found


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _hash(name: str) -> int:
    return zlib.crc32(name.encode())


def _slice(text: str) -> tuple[int, int]:
    at, _, parts = text.partition("/")
    if not (at.isdigit() and parts.isdigit() and int(parts) > 0):
        raise pytest.UsageError(f"--slice: got {text!r}; want K/N, for example 3/12")
    return int(at), int(parts)
