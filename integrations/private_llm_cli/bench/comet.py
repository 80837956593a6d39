"""A decode step of one ReLU layer with foretold neurons against the dense one, in turns (Comet, kept orders).

Nine of ten neurons are left out, and predictors are right, so both compute the same. Bytes and rounds do not depend on
the values; how well a trained predictor foretells is another table (docs/sparsity.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from private_llm.config import PrivateConfig
from private_llm_cli.bench.layers import opt_decode, sparse_decode
from private_llm_cli.bench.measure import measure_in_turns
from private_llm_cli.bench.work import Shape

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
"""What is foretold and how many units are opened. Of blocks, nine of ten are left out, too: neurons that are active
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
        from private_llm_hf.sparsity.planned import PlannedSparsity

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
