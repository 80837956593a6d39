"""A decode step of one ReLU layer with predicted neurons against the dense one, in turns (Comet, kept orders).

python scripts/studies/bench_comet.py         a layer of OPT-1.3B's size, every protocol
python scripts/studies/bench_comet.py --json  the same, one JSON row for each protocol and way
python scripts/studies/bench_comet.py --tiny  smallest shapes: does everything run?

Nine of ten neurons are left out, and predictors are right, so both compute the same. Bytes and rounds do not depend on
the values; how well a trained predictor predicts is another table (docs/studies/predictors.md).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import scripts_folder  # noqa: F401 - finds `bench`
from bench.layers import opt_decode
from bench.measure import measure_in_turns
from bench.rows import machine
from bench.table_options import Repeat, Tiny, new_app, run_app
from bench.work import Shape
from layer_works import sparse_decode
from private_llm_cli.commands.output import duration, emit_json, emit_table, progress_bar, size
from private_llm_cli.options import Json

from private_llm.config import PrivateConfig

SHAPE: Shape = (1, 128, 2048, 32, 8192)
"""batch x cached tokens x hidden x heads x feed-forward: a layer of OPT-1.3B."""
_TINY: Shape = (1, 5, 16, 2, 40)
_AIM = 0.7
"""Of the ratio of seconds."""

SETTINGS: dict[str, dict[str, Any]] = {
    "trio": {"protocol": "trio"},
    "dealer masked": {"protocol": "dealer"},
    "dealer remask": {"protocol": "dealer", "matmul": "remask"},
    "quad": {"protocol": "quad"},
}
"""Protocols of the table."""

WAYS: dict[str, Mapping[str, Any]] = {
    "neurons, budget": {},
    "neurons, open levels": {"levels": "open"},
    "blocks of 16, budget": {"block": 16},
    "blocks of 16, open levels": {"block": 16, "levels": "open"},
}
"""What is predicted and how many units are opened. Of blocks, nine of ten are left out, too: neurons that are active
together have to be neighbours for that."""


@dataclass(frozen=True)
class Case:
    """One protocol and one of `WAYS`: a dense work and a sparse one, which take turns."""

    label: str
    way: str
    shape: Shape
    tiny: bool

    def run(self, repeat: int, progress: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """The row of the sparse step with figures of the dense one; `ratio`: of the medians, sparse by dense."""
        from private_llm_hf.sparsity.price import PlannedSparsity

        options = WAYS[self.way]
        dense = PrivateConfig(calibrate=False, party_mode="threads", **SETTINGS[self.label])
        block = min(4, options.get("block", 1)) if self.tiny else options.get("block", 1)
        planned = PlannedSparsity(0.9, rank=4 if self.tiny else 128, **{**options, "block": block})
        sparse = replace(dense, sparsity=planned.settings)
        works = [(opt_decode(self.shape), dense), (sparse_decode(self.shape, planned), sparse)]
        whole, row = measure_in_turns(works, repeat, progress)
        return {
            **row.to_dict(), "name": "comet-decode", "setting": self.label, "way": self.way,
            "dense_seconds": whole.seconds, "dense_seconds_first": whole.seconds_first,
            "ratio": row.seconds["median"] / whole.seconds["median"],
            "dense_bytes": whole.bytes_total, "ratio_bytes": row.bytes_total / whole.bytes_total,
            "dense_rounds": whole.rounds, "aim_ratio": _AIM,
        }  # fmt: skip


def cases(tiny: bool = False) -> Iterator[Case]:
    """Each protocol and each way."""
    for label in SETTINGS:
        for way in WAYS:
            yield Case(label, way, _TINY if tiny else SHAPE, tiny)


app = new_app()


@app.command()
def main(as_json: Json = False, repeat: Repeat = 5, tiny: Tiny = False) -> None:
    """Every protocol, each with its dense and sparse steps in turns."""
    todo = list(cases(tiny))
    rows = []
    with progress_bar(len(todo) * (repeat + 1), quiet=as_json) as step:
        for case in todo:
            rows.append(case.run(repeat, partial(step, f"{case.label}, {case.way}")))
            if as_json:
                emit_json(rows[-1])
    if as_json:
        return
    cells = [
        (
            row["setting"], row["way"], duration(row["dense_seconds"]["median"]), duration(row["seconds"]["median"]),
            f"{duration(row['dense_seconds_first'])}, {duration(row['seconds_first'])}",
            f"{row['ratio']:.2f}", f"{size(row['dense_bytes'])}, {size(row['bytes_total'])}",
            f"{row['dense_rounds']}, {row['rounds']}", f"{row['error_max']:.0e}",
        )
        for row in rows
    ]  # fmt: skip
    headings = ("protocol", "predicted", "dense", "sparse", "first runs", "ratio", "bytes", "rounds", "error")
    shape = "x".join(map(str, rows[0]["shape"]))
    title = f"a decode step of one ReLU layer, 90 % of the neurons left out, {shape}; aim: {rows[0]['aim_ratio']}"
    emit_table(title, headings, cells, caption=f"medians; bytes and rounds: dense, sparse; {machine()}")


if __name__ == "__main__":
    run_app(app)
