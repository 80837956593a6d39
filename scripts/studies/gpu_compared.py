"""What changed between rows of bench_gpu.py, as lines of a table."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
_WHICH = (
    "name", "model", "ring", "shape", "elements", "prompt", "layers", "weights_at_rest", "turned",
    "parties_on",
    "parties_as", "prg", "file",
)  # fmt: skip
"""What a row is about; its other numbers were measured."""
PARTS = ("launching", "copying", "masks", "waiting for messages", "waiting for the GPU", "Python")
"""Of the time of a party's thread, in rows `token-parts` and `prompt-work`."""
_LEFT_OUT = ("at_s", "samples", "seconds_part")


def compared(before: Sequence[Row], now: Sequence[Row]) -> list[str]:
    """A line for each number that both have: before, now, and now by before."""
    old = {of_what(row): dict(_numbers(row)) for row in before}
    lines = []
    for row in now:
        known = old.get(of_what(row), {})
        for name, value in _numbers(row):
            if known.get(name):
                what = " ".join(str(row[key]) for key in _WHICH if row.get(key) is not None)
                ratio = value / known[name]
                lines.append(f"| {what} | {name} | {known[name]:.5g} | {value:.5g} | {ratio:.2f} |")
    return (
        ["| what | measured | before | now | ratio |", "|---|---|---|---|---|", *lines] if lines else ["no equal rows"]
    )


def of_what(row: Row) -> str:
    """What a row is about, by which rows of two runs are compared."""
    return str([row.get(key) for key in _WHICH])


def _numbers(row: Row, path: str = "") -> Iterator[tuple[str, float]]:
    """Measured numbers, those in objects with their path."""
    for key, value in row.items():
        if (not path and key in _WHICH) or key in _LEFT_OUT or isinstance(value, bool):
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}{key}.")
        elif isinstance(value, int | float):
            yield f"{path}{key}", float(value)
