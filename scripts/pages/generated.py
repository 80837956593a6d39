"""What scripts that make pages share: a command line (write, compare, or show an outline), and where rows are from."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def run(doc: str | None, script: str, target: Path, make: Callable[[], str], outline: Callable[[], str]) -> int:
    """Parse --check and --tiny, do what they say, and return the exit status: 1 if the file is not the one made now."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        print(outline())
    elif options.check:
        current = target.exists() and target.read_text(encoding="utf-8") == make()
        print(f"{target.name} is {'current' if current else f'not that of the tree: run scripts/pages/{script}'}")
        return 0 if current else 1
    else:
        target.write_text(make(), encoding="utf-8")
        print(f"wrote {target}")
    return 0


_TIMED = {
    "seconds",
    "gbit_per_s",
    "error_max",
    "machine",
    "torch",
    "version",
    "commit",
    "load",
    "vanilla_seconds",
    "ratio",
}


def counted(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """A row whose seconds and errors are those of `before`, and whose bytes and rounds are those of `now`.

    Its `commit` and machine are those of the seconds; `counted` names the commit of the rest, where that differs.
    """

    def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        both = {name: merged(old[name], each) if isinstance(each, dict) else each for name, each in new.items()
                if name in old and name not in _TIMED}  # fmt: skip
        return {**old, **both}

    made = merged(before, now)
    return made if made == before else {**made, "counted": now["commit"]}


def taken(rows: Sequence[dict[str, Any]]) -> str:
    """Machine, versions and commits of rows, for the line below their table."""
    first, commits = rows[0], sorted({row["commit"] for row in rows})
    again = ", ".join(sorted({row["counted"] for row in rows if "counted" in row}))
    return (
        f"{first['machine']}; torch {first['torch']}; private-llm {first['version']}, "
        f"commit{'s' if commits[1:] else ''} {', '.join(commits)}"
        f"{f' (bytes and rounds: {again})' if again else ''}"
    )
