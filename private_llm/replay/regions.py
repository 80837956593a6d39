"""A recorded part of a step: its program, the weights that a call binds to it, and how results become values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.kernels.seeded_tensor import StreamKey
from private_llm.protocols.session import PendingRangeCheck, Session
from private_llm.protocols.share import Share
from private_llm.replay.graph_break import GraphBreak, this_call
from private_llm.replay.graphs import GraphProgram
from private_llm.replay.program import Program
from private_llm.replay.recording import Encoding
from private_llm.replay.side_effects import BreakRecord, LedgerDelta, SideEffects
from private_llm.tensor.fixed import Fixed

MOST_BYTES = 64 << 20
"""Largest memory of a program that is compiled."""

Result = tuple[Sequence[Fixed], Hashable]
Compute = Callable[[Sequence[Fixed]], Result]
"""A function of shared values: what it makes, and public facts about that, equal in every call of a key; None as facts
if a program could not make that."""


@dataclass(frozen=True)
class CompiledRegion:
    """A program, and how its outputs become values: fractional bits, facts, and the sums owed to the range check."""

    program: Program | GraphProgram
    forms: tuple[tuple[int, int | None], ...]
    owed: tuple[int, ...]
    facts: Hashable
    delta: LedgerDelta
    graph_break: BreakRecord | None = None
    encodings: tuple[Encoding, ...] = ()


@dataclass
class RegionState:
    """Calls of one key so far. checked, refused: the owners for which the program is right, and is not.

    place: of graphs, whether they run within others: these are counted apart. gives_way: as for `ProgramCache.run`.
    """

    place: tuple[object, ...] = ()
    gives_way: bool = False
    calls: int = 0
    compiled: CompiledRegion | None = None
    refused_all: bool = False
    checked: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class WeightBinding:
    """Whose call it is: a name, and the memories that belong to it alone: weights, and keys of masks that are made."""

    name: str = ""
    weights: tuple[torch.UntypedStorage | StreamKey, ...] = ()

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Where these memories begin, and their bytes."""
        return tuple([
            each.place if isinstance(each, StreamKey) else (each.data_ptr(), each.nbytes()) for each in self.weights
        ])  # fmt: skip

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where these memories begin."""
        return tuple([start for start, _ in self.places])


NO_WEIGHTS = WeightBinding()


def layout_of(in_place: Sequence[Fixed], places: tuple[int, ...]) -> Hashable:
    """All that a program says of where values lie, but for the places; also which of them share one."""
    parts = [part for x in in_place for part in x.share.parts]
    views = [(tuple(part.shape), part.stride(), part.storage_offset(), part.dtype) for part in parts]
    return tuple([x.form for x in in_place]), tuple(views), tuple(map(places.index, places))


@contextmanager
def with_break(graph_break: GraphBreak | None) -> Iterator[None]:
    """Inside, what is called may meet this graph break."""
    before, this_call.graph_break = this_call.graph_break, graph_break
    try:
        yield
    finally:
        this_call.graph_break = before


def parts_of(made: Sequence[Fixed], owed: Sequence[PendingRangeCheck]) -> list[Tensor]:
    """Parts of what a call made, and of the sums that it owes to the range check."""
    return [part for x in made for part in x.share.parts] + [part for sums, _, _ in owed for part in sums.parts]


def with_parts(inputs: Sequence[Fixed], parts: Sequence[Tensor]) -> list[Fixed]:
    """The inputs with these parts."""
    left = iter(parts)
    return [x.with_share(Share(tuple(next(left) for _ in x.share.parts))) for x in inputs]


def compiled_region(
    recorder: Any, operands: Sequence[Any], effects: SideEffects, made: Sequence[Fixed], facts: Hashable,  # noqa: ANN401
    new: Sequence[PendingRangeCheck],
) -> CompiledRegion:  # fmt: skip
    """What was recorded of a step, which made values, facts and new checks. Raises UnsupportedOp for no program."""
    if any(rows is not None for _, _, rows in new):
        raise UnsupportedOp("a verdict for each row of a batch")
    encodings = recorder.encodings()
    program = recorder.program([*operands, *encodings.values()], parts_of(made, new))
    if isinstance(program, Program) and program.size > MOST_BYTES:
        raise UnsupportedOp(f"a program of more than {MOST_BYTES >> 20} MiB")
    return CompiledRegion(
        program, tuple([x.form for x in made]), tuple([bits for _, bits, _ in new]), facts, effects.delta,
        effects.break_record, tuple(encodings),
    )  # fmt: skip


def uses_cuda_graphs(session: Session) -> bool:
    """Whether programs of this session are graphs of a GPU."""
    return torch.device(session.device).type == "cuda"
