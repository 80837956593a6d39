"""Parts of a step that are recorded, checked and repeated: any function of shared values that parties compute alike.

The first calls of a key run as always. The next one is recorded. The one behind runs as always, and then the program
runs on what that call drew and received: only if it sends and returns exactly the same it is used from then on. Modules
that are alike but for their weights share a program, and each of them is checked before it uses it. A
party decides alone; the others cannot tell, because masks, messages and ledgers are the same either way. What cannot be
recorded stays as it is, and `ProgramCache.refused` says why.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels.seeded_tensor import StreamKey
from private_llm.kernels.trace_hook import this_thread, traced_by
from private_llm.net.barrier import Point
from private_llm.protocols.session import PendingRangeCheck, Session
from private_llm.protocols.share import Share
from private_llm.ranges import QUANTITIES
from private_llm.replay import graphs
from private_llm.replay.capture import Pool
from private_llm.replay.cpu_recorder import CpuRecorder
from private_llm.replay.graph_break import GraphBreak
from private_llm.replay.graph_recorder import GraphRecorder
from private_llm.replay.graphs import GraphProgram
from private_llm.replay.joint import run_together
from private_llm.replay.points import CallPoints, end_of
from private_llm.replay.program import Arena, Inner
from private_llm.replay.regions import (
    NO_WEIGHTS,
    CompiledRegion,
    Compute,
    RegionState,
    Result,
    WeightBinding,
    compiled_region,
    layout_of,
    parts_of,
    uses_cuda_graphs,
    with_break,
    with_parts,
)
from private_llm.replay.side_effects import BreakCheck, BreakRecord, SideEffects
from private_llm.replay.transports import LiveTransport, RecordingTransport, ReplayTransport, TraceLog, recorded_by
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.scale import encode_public

MOST_PROGRAMS = 1024
"""Programs that a session keeps; the one that was used longest ago goes first."""
MOST_HELD = 256 << 20
"""Bytes of constants and tables of all programs of a session; again the one that was used longest ago goes first."""


class ProgramCache:
    """The programs of one party's session.

    counts: how many calls were "plain", "recorded", "checked" and "repeated". refused: why keys stay as they are.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._regions: OrderedDict[Hashable, RegionState] = OrderedDict()
        self.uncompiled = 0
        """Calls that Python computed because their program was not ready yet."""
        self.paused = False
        """Whether a larger region is computed for the first time, within which nothing is recorded."""
        self._arenas = (Arena(), Arena())  # the second one is for what is computed in a graph break
        self._pools = (Pool(), Pool())
        self._inside = 0
        self._live_transport: LiveTransport | None = None
        self._points = CallPoints()

    def __len__(self) -> int:
        """Keys that were met, and are still known."""
        return len(self._regions)

    def run(
        self, session: Session, key: Hashable, inputs: Sequence[Fixed], compute: Compute, binding: WeightBinding =
        NO_WEIGHTS, warmup: int = 1, graph_break: GraphBreak | None = None, in_place: Sequence[Fixed] = (),
        gives_way: bool = False,
    ) -> Result:  # fmt: skip
        """What `compute` makes of the inputs, and its facts.

        key: all that decides what is computed, but sizes and the binding's weights. warmup: calls before one is
        recorded. graph_break: what of this call stays in Python. in_place: values that `compute` takes from elsewhere,
        which programs read where they lie; such a call has no binding. gives_way: where programs hold too much, this
        one goes, for good.
        """
        region = RegionState()
        point = self._points.next(session, self._inside > 0, inputs, binding)
        try:
            if in_place:
                binding = WeightBinding(
                    weights=tuple([part.untyped_storage() for x in in_place for part in x.share.parts])
                )
                key = (key, layout_of(in_place, binding.addresses))
            region = self._region(session, key, inputs, binding)
            region.calls += 1
            region.gives_way = gives_way
            call = self._call(session, region, inputs, binding, warmup, graph_break, point)
        except Exception as error:  # noqa: BLE001 - nothing is computed yet, so Python computes as always
            self._refuse(region, binding, error)
            if graph_break is not None:
                graph_break.unhook()
            self._alone(session, point)
            call = self._without(session, region, inputs, graph_break)
        return call(compute)

    def _call(
        self, session: Session, region: RegionState, inputs: Sequence[Fixed], binding: WeightBinding, warmup: int,
        graph_break: GraphBreak | None, point: Point | None,
    ) -> Callable[[Compute], Result]:  # fmt: skip
        """How this call is computed, ready to begin."""
        refused = region.refused_all or binding.name in region.refused
        if binding.name in region.checked and region.compiled is not None:
            return self._repeat(session, region.compiled, inputs, binding, graph_break, point)
        self._alone(session, point)
        self.uncompiled += not refused
        if refused or (region.calls <= warmup and graph_break is None):  # others may have a program all the same
            return self._without(session, region, inputs, graph_break)
        if region.calls <= warmup:
            return functools.partial(self._plain, region, inputs, graph_break)
        if region.compiled is None:
            return self._record(session, region, inputs, binding, graph_break)
        return self._check(session, region, region.compiled, inputs, binding, graph_break)

    def _links(self, session: Session) -> LiveTransport:
        protocol, held = session.protocol, self._live_transport
        if held is None or held.transport is not protocol.transport:
            held = self._live_transport = LiveTransport(protocol.transport, protocol.mask_streams)
        return held

    def _alone(self, session: Session, point: Point | None) -> None:
        """This call is not one that all parties repeat together."""
        if point is not None and (end := end_of(session, self._links(session).barrier_end)) is not None:
            end.skip(point)

    def _without(
        self, session: Session, region: RegionState, inputs: Sequence[Fixed], graph_break: GraphBreak | None
    ) -> Callable[[Compute], Result]:
        """As always, at a party that has no program, while others may have one."""

        def hidden(compute: Compute) -> Result:
            with self._points.hiding(graph_break, self._inside_break):
                return self._plain(region, inputs, None, compute)

        return hidden if uses_cuda_graphs(session) else functools.partial(self._plain, region, inputs, None)

    def _refuse(self, region: RegionState, binding: WeightBinding, error: Exception) -> None:
        """From now on Python computes: for this binding, where there is a program for others."""
        self.refused[str(error) or type(error).__name__] += 1
        region.checked.discard(binding.name)
        region.refused.add(binding.name)
        region.refused_all |= region.compiled is None

    def _plain(
        self, region: RegionState, inputs: Sequence[Fixed], graph_break: GraphBreak | None, compute: Compute
    ) -> Result:
        """As always."""
        self.counts["plain"] += 1
        if graph_break is None:
            made, facts = compute(inputs)
        else:
            made, facts = self._plain_first(inputs, compute, graph_break)
            region.refused_all |= self._lacks_break(graph_break)
        region.refused_all |= facts is None
        return made, facts

    def _plain_first(
        self, inputs: Sequence[Fixed], compute: Compute, graph_break: GraphBreak
    ) -> Result:  # fmt: skip
        """As always, but what is within is not recorded by itself, and the graph break is watched."""

        @contextmanager
        def outside() -> Iterator[None]:
            self.paused = False
            with self._inside_break():
                yield
            self.paused = True

        graph_break.outside, self.paused = outside, True
        try:
            with with_break(graph_break):
                return compute(inputs)
        finally:
            self.paused = False

    def _lacks_break(self, graph_break: GraphBreak) -> bool:
        """Whether a region has not the graph break that it should have."""
        if not graph_break.reached:
            graph_break.refuse("a graph break that was not reached")
        if graph_break.reason is not None:
            self.refused[graph_break.reason] += 1
        return graph_break.reason is not None

    @contextmanager
    def _inside_break(self) -> Iterator[None]:
        """Inside, a graph break is computed, whose programs run in memory of their own."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @property
    def _place(self) -> int:
        """1 within a graph break, whose programs run in memory of their own, else 0."""
        return min(self._inside, 1)

    @property
    def _arena(self) -> Arena:
        return self._arenas[self._place]

    def _region(self, session: Session, key: Hashable, inputs: Sequence[Fixed], binding: WeightBinding) -> RegionState:
        # a graph reads the memories with which it was captured, in the pool of its place
        alone = (binding.name, self._place) if uses_cuda_graphs(session) else ()
        key, place = (key, alone, tuple([(tuple(x.shape), x.form, len(x.share.parts)) for x in inputs])), alone[1:]
        found = self._regions.get(key)
        if found is None:
            found = self._regions[key] = RegionState(place)
            if len(self._regions) > MOST_PROGRAMS:
                self._regions.popitem(last=False)
        else:
            self._regions.move_to_end(key)
        return found

    def _evict(self, region: RegionState) -> None:
        """Forget programs of a place while all of them, with this new one, hold too much.

        Raises UnsupportedOp for one that gives way: layers would push each other out in every chunk of a prompt.
        """
        place = region.place
        held = [
            (key, each.compiled.program.held)
            for key, each in self._regions.items()
            if each.compiled is not None and each.place == place
        ]
        total, most = sum(size for _, size in held), graphs.MOST_HELD if place else MOST_HELD
        if region.gives_way and total > most:
            region.compiled = None
            raise UnsupportedOp(f"programs of more than {most >> 20} MiB")
        for key, size in held[:-1]:
            if total <= most:
                break
            total -= size
            del self._regions[key]

    def _record(
        self, session: Session, region: RegionState, inputs: Sequence[Fixed], binding: WeightBinding, graph_break:
        GraphBreak | None
    ) -> Callable[[Compute], Result]:  # fmt: skip
        protocol = session.protocol
        if uses_cuda_graphs(session) and any(isinstance(x, StreamKey) and not x.on_gpus for x in binding.weights):
            raise UnsupportedOp("masks of weights that are made in main memory")
        recorder: Any = (
            GraphRecorder(
                protocol.transport, protocol.mask_streams, torch.device(session.device), self._pools[self._place]
            )
            if uses_cuda_graphs(session)
            else CpuRecorder(protocol.transport, protocol.mask_streams, binding.places)
        )
        parts: list[Tensor] = []
        operands = []
        for part in [part for x in inputs for part in x.share.parts]:
            parts.append(part.contiguous().clone())
            operands.append(recorder.given(parts[-1]))
        effects = SideEffects(session, binding.name)
        if graph_break is not None:
            operands += [recorder.public(x) for x in graph_break.publics]
            self._watch_break(graph_break, effects, recorder, recorder.outside)
            graph_break.exit = effects.exit_hook(recorder.graph_break)
        given = with_parts(inputs, parts)
        parts.clear()
        self.counts["recorded"] += 1

        def record(compute: Compute) -> Result:
            with recorder.operations(), traced_by(recorder), recorded_by(protocol, recorder), with_break(graph_break):
                made, facts = compute(given)
            given.clear()  # nothing that changes may outlive the step
            try:
                region.compiled = self._compiled(recorder, operands, effects, made, facts, graph_break)
                self._evict(region)
            except Exception as error:  # noqa: BLE001 - the step is done; only its program is not
                self._refuse(region, binding, error)
            return made, facts

        return record

    def _compiled(
        self, recorder: Any, operands: Sequence[Any], effects: SideEffects, made: Sequence[Fixed], facts: Hashable,  # noqa: ANN401
        graph_break: GraphBreak | None,
    ) -> CompiledRegion:  # fmt: skip
        """The program of a step that was recorded. Raises UnsupportedOp where there is none."""
        new = effects.end()
        if facts is None:
            raise UnsupportedOp("results that are no secret tensors")
        if graph_break is not None and self._lacks_break(graph_break):
            raise UnsupportedOp(f"its graph break: {graph_break.reason}")
        return compiled_region(recorder, operands, effects, made, facts, new)

    def _watch_break(
        self, graph_break: GraphBreak, effects: SideEffects, transport: RecordingTransport, unseen: Callable[[],
        AbstractContextManager[None]] = nullcontext
    ) -> None:  # fmt: skip
        """Let `effects` and `transport` see nothing of a graph break."""

        @contextmanager
        def outside() -> Iterator[None]:
            with (
                unseen(),
                traced_by(None),
                recorded_by(effects.session.protocol, transport.inner),
                self._inside_break(),
            ):
                yield

        def enter() -> str | None:
            effects.pause()
            deferred = effects.session.numerics.deferred_check is not None
            return "a check that was put off until the graph break" if deferred else None

        graph_break.outside, graph_break.enter = outside, enter

    def _check(
        self, session: Session, region: RegionState, compiled: CompiledRegion, inputs: Sequence[Fixed],
        binding: WeightBinding, graph_break: GraphBreak | None,
    ) -> Callable[[Compute], Result]:  # fmt: skip
        protocol = session.protocol
        trace_log = TraceLog(protocol.transport, protocol.mask_streams)
        given = [part.contiguous().clone() for x in inputs for part in x.share.parts]
        effects, break_check = SideEffects(session, binding.name), BreakCheck()
        if graph_break is not None:
            given += [x.clone() for x in graph_break.publics]
            self._watch_break(graph_break, effects, trace_log)
            graph_break.exit = effects.exit_hook(break_check.record)
        self.counts["checked"] += 1

        def right(made: Sequence[Fixed], facts: Hashable) -> bool:
            new, replayed = effects.end(), ReplayTransport(trace_log.trace)
            if trace_log.reason is not None or (graph_break is not None and graph_break.reason is not None):
                raise UnsupportedOp(f"its check: {trace_log.reason or (graph_break and graph_break.reason)}")
            if graph_break is not None:
                given.extend(
                    encode_public(inputs[0], graph_break.publics[each[0]], each) for each in compiled.encodings
                )
            again, outputs = (
                compiled.program.run(replayed, self._arena, given, binding.addresses, break_check.replay),
                parts_of(made, new),
            )
            said = tuple([x.form for x in made]), tuple([bits for _, bits, _ in new]), facts
            return (
                (compiled.forms, compiled.owed, compiled.facts) == said and replayed.agrees(trace_log.trace)
                and (compiled.delta, compiled.graph_break) == (effects.delta, effects.break_record) and break_check.same
                and len(again) == len(outputs) and all(map(torch.equal, again, outputs))
            )  # fmt: skip

        def check(compute: Compute) -> Result:
            with traced_by(trace_log), recorded_by(protocol, trace_log), with_break(graph_break):
                made, facts = compute(inputs)
            try:
                if not right(made, facts):
                    raise UnsupportedOp("a recorded program that gives something else")
                region.checked.add(binding.name)
            except Exception as error:  # noqa: BLE001 - as above
                self._refuse(region, binding, error)
            return made, facts

        return check

    def _repeat(
        self, session: Session, compiled: CompiledRegion, inputs: Sequence[Fixed], binding: WeightBinding,
        graph_break: GraphBreak | None, point: Point | None,
    ) -> Callable[[Compute], Result]:  # fmt: skip
        protocol, transport = session.protocol, self._links(session)
        parts = [part for x in inputs for part in x.share.parts]
        each = len(parts) // len(inputs)
        inner: Inner | None = None
        if graph_break is not None and compiled.graph_break is not None:
            parts += [
                *graph_break.publics,
                *(encode_public(inputs[0], graph_break.publics[e[0]], e) for e in compiled.encodings),
            ]  # fmt: skip
            inner = functools.partial(self._inner, session, compiled.graph_break, graph_break, binding.name)
        program, end = compiled.program, end_of(session, transport.barrier_end)
        if isinstance(program, GraphProgram) and end is not None and point is not None:
            program.take(parts)
            ready: Callable[[Inner | None], list[Tensor]] = functools.partial(
                run_together, program, transport, end, point
            )
        else:
            self._alone(session, point)
            ready = program.ready(transport, self._arena, parts, binding.addresses)
        self.counts["repeated"] += 1

        def repeat(_: Compute) -> Result:
            known = session.numerics
            before = len(known.pending_range_checks)
            made = ready(inner)
            protocol.ledger.add_again(compiled.delta, binding.name)
            shares = [Share(tuple(made[at : at + each])) for at in range(0, len(made), each)]
            values = [Fixed(session, share, *form) for share, form in zip(shares, compiled.forms, strict=False)]
            sums: list[PendingRangeCheck] = [
                (share, bits, None) for share, bits in zip(shares[len(values) :], compiled.owed, strict=True)
            ]  # fmt: skip
            first = len(sums) if compiled.graph_break is None else compiled.graph_break.owed
            known.pending_range_checks[before:before] = sums[:first]
            known.pending_range_checks += sums[first:]
            return values, compiled.facts

        return repeat

    def _inner(
        self, session: Session, break_record: BreakRecord, graph_break: GraphBreak, owner: str, parts: Sequence[Tensor]
    ) -> Sequence[Tensor]:  # fmt: skip
        """The graph break of a program that is repeated."""
        ledger = session.protocol.ledger
        count = len(parts) // len(break_record.forms)
        values = [
            Fixed(session, Share(tuple(parts[at * count : (at + 1) * count])), *form)
            for at, form in enumerate(break_record.forms)
        ]
        outer = ledger.enter(break_record.module(ledger, owner))
        try:
            with self._inside_break():
                made = graph_break.recompute(values)
                if made.form != break_record.form:
                    raise DomainError(
                        f"a repeated layer: its attention gives {made.form} bits, recorded {break_record.form}"
                    )
                return made.share.parts
        finally:
            ledger.leave(outer)


_held: weakref.WeakKeyDictionary[Session, ProgramCache] = weakref.WeakKeyDictionary()


def programs_of(session: Session) -> ProgramCache | None:
    """The programs of a session, None where steps are not repeated: with `replay=False`, with a device map, in a
    32-bit ring, while costs are counted, where each row of a batch has its own verdict, and inside a step that is
    recorded.
    """
    if not session.config.replay or this_thread.hook is not None or session.numerics.batch is not None:
        return None
    protocol = session.protocol
    placed = session.device == "meta" or (session.config.device_map is not None and protocol.placed)
    if placed or session.ring.bits != 64 or not protocol.mask_streams:
        return None
    found = _held.get(session)
    if found is None:
        found = _held[session] = ProgramCache()
    return None if found.paused else found


def repeat(
    session: Session, key: Hashable, inputs: Sequence[Fixed], compute: Callable[[Sequence[Fixed]], Sequence[Fixed]],
    warmup: int = 1, in_place: Sequence[Fixed] = (),
) -> Sequence[Fixed]:  # fmt: skip
    """What `compute` makes of the inputs, repeated as a program where that can be.

    key, warmup: as for `ProgramCache.run`; the ranges of the module that is computed are part of the key anyway.
    in_place: large inputs after the others, which a program of a CPU reads where they lie, in the same layout each
    time, instead of copying them.
    """
    programs, known = programs_of(session), session.numerics
    if programs is None or known.deferred_check is not None:
        return compute([*inputs, *in_place])
    if uses_cuda_graphs(session):
        inputs, in_place = [*inputs, *in_place], ()

    def effects(values: Sequence[Fixed]) -> Result:
        made = compute([*values, *in_place])
        return made, () if known.deferred_check is None else None

    key = (key, *map(session.exponent, QUANTITIES))
    return programs.run(session, key, inputs, effects, warmup=warmup, in_place=in_place)[0]


def uncompiled_calls(session: Session | None = None) -> int:
    """Calls of a session (None: of all in this process) that Python computed because their program was not ready."""
    return sum([found.uncompiled for each, found in _held.copy().items() if session is None or session is each])


def forget(session: Session) -> None:
    """Let go of a session's programs, and of the weights that they read."""
    _held.pop(session, None)
