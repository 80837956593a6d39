"""What CompNodes answer to a forward, checked before the client allocates or believes anything, and put in order.

A node may lie about numbers, which nobody can see. About everything else (which outputs there are, of which shapes,
for how many rows) it can only be caught: TransportError, with its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from private_llm.errors import TransportError
from private_llm_hf.wire.answers import NodeOutputs
from private_llm_hf.wire.commands import OPENED

_BY_ROW = ("last_hidden_state", "start_logits", "end_logits")
"""Outputs with an entry for each position; logits have one if they are three-dimensional."""

_WIDEST = 1 << 20
"""Numbers that an entry of an output may have: larger than vocabularies and hidden sizes."""


@dataclass(frozen=True)
class Due:
    """What one node owes: `batch` texts, entries for its `rows` (positions), logits only for the `wanted` ones."""

    batch: int
    rows: tuple[int, ...]
    wanted: tuple[int, ...]

    def positions(self, name: str, dimensions: int) -> tuple[int, ...] | None:
        """The positions that an output has entries for; None if it has one for each text."""
        if name == "logits":
            return self.wanted if dimensions == 3 else None
        return self.rows if name in _BY_ROW else None


@dataclass(frozen=True)
class Answer:
    """One node's answer: the class of its model's output, the outputs' shapes, and what of them all nodes share."""

    kind: str
    shapes: Mapping[str, tuple[int, ...]]
    common: Mapping[str, tuple[int, ...]]


def read_answer(message: NodeOutputs, due: Due, who: str) -> Answer:
    """Check one node's announcement. Raises TransportError that names `who`."""
    if not message.outputs:
        raise TransportError(f"{who} answered without outputs; client and node run different versions, or it lies")
    shapes: dict[str, tuple[int, ...]] = {}
    common: dict[str, tuple[int, ...]] = {}
    for output in message.outputs:
        name, shape = output.name, output.shape
        if name not in OPENED or name in shapes:
            raise TransportError(f"{who} answered with output {name!r}; want each of {', '.join(OPENED)} at most once")
        if not all(0 <= size <= _WIDEST for size in shape):
            raise TransportError(f"{who}: '{name}' has shape {list(shape)}; want sizes from 0 to {_WIDEST}")
        positions = due.positions(name, len(shape))
        start = (due.batch,) if positions is None else (due.batch, len(positions))
        if shape[: len(start)] != start or len(shape) > 3:
            raise TransportError(f"{who}: '{name}' has shape {list(shape)}; want one that starts with {list(start)}")
        shapes[name] = shape
        common[name] = (len(shape), *shape[len(start) :])
    return Answer(message.class_, shapes, common)


def check_equal(answers: Mapping[str, Answer]) -> str:
    """The output class that all nodes (by name) gave. Raises TransportError if they do not run the same model."""
    first, *others = answers
    for other in others:
        if (answers[first].kind, answers[first].common) != (answers[other].kind, answers[other].common):
            raise TransportError(f"{first} and {other} gave different kinds of answers: they do not run the same model")
    return answers[first].kind


def in_order(found: Sequence[tuple[Due, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Rows of all nodes by position; what has no rows (a pooled state) comes from the first of them."""
    merged: dict[str, Tensor] = {}
    due, first = found[0]
    for name, own in first.items():
        if due.positions(name, own.dim()) is None:
            merged[name] = own
            continue
        rows: dict[int, Tensor] = {}
        for due, outputs in found:
            rows.update(zip(due.positions(name, own.dim()) or (), outputs[name].unbind(1), strict=True))
        merged[name] = torch.stack([rows[position] for position in sorted(rows)], 1)
    return merged
