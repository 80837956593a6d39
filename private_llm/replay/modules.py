"""Modules of a model as regions: their inputs and results are secret tensors, and what they do besides is small.

Beside its results a call may leave an input with fewer fractional bits, and put off a check of ranges.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from private_llm.config import chunk_sizes
from private_llm.kernels import parallel, teams
from private_llm.kernels.matmul import BYTES
from private_llm.kernels.seeded_tensor import SeededTensor, StreamKey
from private_llm.protocols.session import Session
from private_llm.replay.graph_break import GraphBreak
from private_llm.replay.program_cache import ProgramCache, programs_of
from private_llm.replay.regions import WeightBinding, uses_cuda_graphs
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor

MOST_ROWS = 16
"""Rows of inputs that are repeated: tokens of a step. Prompts are longer, and Python is little of their time; but on a
GPU chunks of them are repeated as well (`PrivateConfig.prompt_chunk`): there it would be most of it. On CPUs a recorded
chunk of 128 rows takes as long as Python's (measured, LLaMA of width 512).
"""

PYTHON_S, AROUND_S = 1e-3, 3e-3
"""What Python costs a module, and a whole decoder layer, about. Where there are no teams, a program runs on one thread,
Python's products on all that they may use."""

_UNTOUCHED = -1


def repeated(
    forward: Callable[..., Any], name: str, session: Session, kind: Hashable, weights: Sequence[tuple[str, object]]
) -> Callable[..., Any]:  # fmt: skip
    """`forward`, repeated as a program where its arguments are secret tensors of few rows and nothing else.

    kind: what the module is, equal for modules that compute the same. weights: its own, by names relative to it; unless
    all of them are shares, `forward` stays as it is.
    """
    module = _module(name, session, kind, weights)
    if module is None:
        return forward

    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a module's own signature
        programs = module.programs(args, PYTHON_S) if args and not kwargs else None
        if programs is None:
            return forward(*args, **kwargs)
        pending = session.checks.deferred
        held = None if pending is None else next((n for n, x in enumerate(args) if x is pending[0]), _UNTOUCHED)
        if held == _UNTOUCHED:  # a check of something else was put off, which may happen inside
            return forward(*args)
        return _ModuleCall(forward, module, module.alike(), args).made(programs, held)

    return run


Around = Callable[[Any, Mapping[str, Any], Hashable, GraphBreak], Any]
"""Calls a module with one tensor, named arguments that are public (facts: all that decides of them, but for tensors
that change), and the graph break of this call."""


def repeated_around(
    forward: Callable[..., Any], name: str, session: Session, kind: Hashable, weights: Sequence[tuple[str, object]]
) -> Around | None:  # fmt: skip
    """As `repeated`, for a module with a graph break (`replay.graph_break`); None where it stays as it is."""
    module = _module(name, session, kind, weights)
    if module is None:
        return None

    def run(x: Any, named: Mapping[str, Any], facts: Hashable, graph_break: GraphBreak) -> Any:  # noqa: ANN401 - as above
        deferred = session.checks.deferred is not None
        programs = None if deferred else module.programs((x,), AROUND_S)
        if programs is None:
            return forward(x, **named)
        called = functools.partial(forward, **named)
        return _ModuleCall(called, module, (module.alike(), facts), (x,)).made(programs, None, graph_break)

    return run


@dataclass
class _Module:
    """A module that is repeated. kind: what it is. seconds: of reading its weights on one thread."""

    session: Session
    binding: WeightBinding
    kind: Hashable
    seconds: float
    ranges: tuple[object, Hashable] = (None, ())

    def alike(self) -> Hashable:
        """Equal for modules that compute the same but for their weights."""
        known = self.session.numerics.ranges
        if self.ranges[0] is not known:
            self.ranges = known, _ranges(self.session, self.binding.name)
        return self.kind, self.ranges[1]

    def programs(self, args: Sequence[object], python_s: float) -> ProgramCache | None:
        """Those of the session, where a call with these arguments is repeated: a program saves `python_s`, and
        threads, where there are no teams, may save Python more of the time in which weights are read.
        """
        session, seconds = self.session, self.seconds
        if not all(_small(session, x) for x in args):
            return None
        alone = session.device == "cpu" and not teams.HERE
        if alone and seconds * (1.0 - 1.0 / parallel.threads(seconds)) > python_s:
            return None
        return programs_of(session)


def _module(
    name: str, session: Session, kind: Hashable, weights: Sequence[tuple[str, object]]
) -> _Module | None:  # fmt: skip
    """None for a module that cannot be repeated."""
    if not session.config.replay:
        return None
    shares = [(own, each.value(masked=True)) for own, each in weights if isinstance(each, SecretTensor)]
    if len(shares) < len(weights):
        return None
    parts = [part for _, fixed in shares for part in fixed.share.parts]
    found = _layout(parts, uses_cuda_graphs(session))
    if found is None:
        return None
    memories, layout = found
    seconds = sum(part.numel() * part.itemsize for part in parts) / BYTES
    forms = tuple([(own, fixed.form) for own, fixed in shares])
    return _Module(session, WeightBinding(name, memories), (kind, forms, layout), seconds)


def _layout(
    parts: Sequence[Tensor], on_gpu: bool
) -> tuple[tuple[torch.UntypedStorage | StreamKey, ...], Hashable] | None:
    """The memories of these tensors, each once, and how the tensors lie in them; None where no kernel makes a mask (on
    GPUs the program is refused instead: other parties of this process may have one, and would wait for this one).
    """
    memories: dict[int, torch.UntypedStorage | StreamKey] = {}
    layout: list[tuple[list[tuple[int, int, int]], Hashable]] = []
    for part in parts:
        if isinstance(part, SeededTensor):
            if not on_gpu and any(piece.key.rounds is None for piece in part.slices):
                return None
            places = [id(piece.key) if on_gpu else piece.key.place[0] for piece in part.slices]
            memories |= {place: piece.key for place, piece in zip(places, part.slices, strict=True)}
            lines = [(place, piece.start, piece.lines) for place, piece in zip(places, part.slices, strict=True)]
            layout.append((lines, (part.turned, tuple(part.shape))))
        else:
            storage = part.untyped_storage()
            memories[storage.data_ptr()] = storage
            lines = [(storage.data_ptr(), int(part.storage_offset()), 1)]
            layout.append((lines, (part.stride(), tuple(part.shape))))
    numbers = {place: number for number, place in enumerate(memories)}
    return tuple(memories.values()), tuple([
        (tuple([(numbers[place], start, count) for place, start, count in lines]), shape) for lines, shape in layout
    ])  # fmt: skip


def _ranges(session: Session, name: str) -> Hashable:
    """What is known of a module and those within it, by names relative to it."""
    known = session.numerics.ranges.modules
    if not known:
        return ()
    group, _, own = name.rpartition(".")
    names = [f"{group}.{each}" for each in own.split("+")]
    return tuple([
        (each[len(group) :] if "+" in own else each[len(name) :], tuple(sorted(found.items())))
        for each, found in known.items()
        if each in names or each.startswith(f"{name}.")
    ])  # fmt: skip


def _small(session: Session, x: object) -> bool:
    if not isinstance(x, SecretTensor) or x.hidden is not None or len(x.shape) < 2:
        return False
    return 0 < _rows(x) <= MOST_ROWS or is_chunk(session, x)


def is_chunk(session: Session, x: SecretTensor) -> bool:
    """Whether these are the rows of a whole chunk of a prompt that is repeated, on a GPU."""
    return _rows(x) in chunk_sizes(session.config) and uses_cuda_graphs(session)


def _rows(x: SecretTensor) -> int:
    width = x.shape[-1]
    return x.value(masked=True).numel() // width if width else 0


@dataclass(frozen=True)
class _Facts:
    """Public facts of a call: whether the result is one tensor, which results are coarse, which inputs were settled
    anew (and are coarse), and whose check was put off: its number among results and inputs, and the bits of its sums.
    """

    alone: bool
    coarse: tuple[bool, ...]
    settled: tuple[tuple[int, bool], ...]
    put_off: tuple[int, int] | None


class _ModuleCall:
    def __init__(
        self, forward: Callable[..., Any], module: _Module, alike: Hashable, args: Sequence[SecretTensor]
    ) -> None:  # fmt: skip
        self._forward, self._binding, self._alike = forward, module.binding, alike
        self._session, self._args = module.session, args
        self._odd: Any = None

    def made(self, programs: ProgramCache, held: int | None, graph_break: GraphBreak | None = None) -> Any:  # noqa: ANN401 - what the module returns
        """The module's results. held: which argument's check is put off."""
        checks, args = self._session.checks, self._args
        self._held, self._bits = held, 0 if checks.deferred is None else checks.deferred[1]
        key = (self._alike, held, self._bits, tuple([x.coarse for x in args]))
        values, facts = programs.run(
            self._session, key, [x.value(masked=True) for x in args], self._compute, self._binding, 1, graph_break
        )
        if not isinstance(facts, _Facts):
            return self._odd
        results = [SecretTensor(value) for value in values[: len(facts.coarse)]]
        for result, coarse in zip(results, facts.coarse, strict=True):
            result.coarse = coarse
        for (number, coarse), value in zip(facts.settled, values[len(results) :], strict=True):
            args[number].set_value(value, coarse)
        checks.deferred = None
        if facts.put_off is not None:
            number, bits = facts.put_off
            checks.deferred = [*results, *args][number], bits
        return results[0] if facts.alone else tuple(results)

    def _compute(self, inputs: Sequence[Fixed]) -> tuple[Sequence[Fixed], Hashable]:
        """Call the module with tensors of its own, and tell what became of them."""
        checks = self._session.checks
        args = [SecretTensor(x).inherit_flags(given) for x, given in zip(inputs, self._args, strict=True)]
        if self._held is not None:
            checks.deferred = (args[self._held], self._bits)
        made = self._forward(*args)
        results = list(made) if isinstance(made, tuple | list) else [made]
        pairs = enumerate(zip(args, inputs, strict=True))
        settled = [(n, x) for n, (x, was) in pairs if x.value(masked=True) is not was]
        put_off, pending = None, checks.deferred
        if pending is not None:
            found = (n for n, x in enumerate([*results, *args]) if x is pending[0])
            put_off = next(((n, pending[1]) for n in found), None)
        secret = [x for x in results if isinstance(x, SecretTensor) and x.hidden is None]
        own = {id(mine): given for mine, given in zip(args, self._args, strict=True)}
        handed_on = any(x.shares_memory_with(mine) for x in secret for mine in args)
        if len(secret) < len(results) or handed_on or (checks.deferred is not None and put_off is None):
            for n, x in settled:
                self._args[n].set_value(x.value(masked=True), x.coarse)
            for mine, given in zip(args, self._args, strict=True):
                given.inherit_flags(mine)
            if checks.deferred is not None:
                checked, bits = checks.deferred
                checks.deferred = own.get(id(checked), checked), bits
            self._odd = own.get(id(made), made)
            if isinstance(made, tuple | list):
                self._odd = type(made)(own.get(id(x), x) for x in made)
            return [], None
        checks.deferred = None
        facts = _Facts(
            len(results) == 1 and results[0] is made, tuple([x.coarse for x in secret]),
            tuple([(n, x.coarse) for n, x in settled]), put_off,
        )  # fmt: skip
        return [*(x.value(masked=True) for x in secret), *(x.value(masked=True) for _, x in settled)], facts
