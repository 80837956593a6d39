"""Parts of a step that are recorded, checked and repeated: any function of shared values that parties compute alike.

The first calls of a key run as always, and the next one is recorded. The one after it runs as always, and then the
program runs on what that call drew and received: only if it sends and returns exactly the same it is used from then on.
Modules that are alike but for their weights share a program, and each of them is checked before it uses it. A party
decides alone; the others cannot tell, because masks, messages and ledgers are the same either way.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.kernels.seeded_tensor import StreamKey
from private_llm.kernels.trace_hook import this_thread, traced_by
from private_llm.net.direct import Point
from private_llm.protocols.session import Session
from private_llm.protocols.share import Share
from private_llm.ranges import QUANTITIES
from private_llm.replay import graphs
from private_llm.replay.ahead import are_compiling
from private_llm.replay.cpu_recorder import CpuRecorder
from private_llm.replay.events import Inner
from private_llm.replay.graph_break import GraphBreak, with_break
from private_llm.replay.graph_recorder import GraphRecorder
from private_llm.replay.graphs import GraphProgram
from private_llm.replay.joint import CallPoints, end_of, run_together
from private_llm.replay.layouts import Pool, part_of
from private_llm.replay.program import Arena
from private_llm.replay.recording import Encoding, StepRecorder
from private_llm.replay.regions import (
    NO_WEIGHTS,
    BreakCheck,
    BreakRecord,
    CompiledRegion,
    RegionState,
    Result,
    SideEffects,
    StepBody,
    WeightBinding,
    layout_of,
    uses_cuda_graphs,
    with_parts,
)
from private_llm.replay.transports import LiveTransport, ReplayTransport, TraceLog, recorded_by, unrecorded
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.scale import encode_public

MOST_PROGRAMS = 1024  # programs that a session keeps; the one that was used longest ago goes first
MOST_HELD = 256 << 20  # bytes of constants and tables of a session's programs; the one used longest ago goes first


@dataclass
class _RegionCall:
    """One call of a region. point: which of the other parties' calls it is (`replay.joint`)."""

    session: Session
    inputs: Sequence[Fixed]
    binding: WeightBinding
    graph_break: GraphBreak | None
    point: Point | None
    region: RegionState = field(default_factory=RegionState)

    def parts(self) -> list[Tensor]:
        return [part for x in self.inputs for part in x.share.parts]

    def encoded(self, encodings: Iterable[Encoding]) -> Iterator[Tensor]:
        """Ring elements of this call's public tensors."""
        if self.graph_break is not None:
            for each in encodings:
                yield encode_public(self.inputs[0], self.graph_break.publics[each[0]], each)


class ProgramCache:
    """Programs of a party's session. counts: calls "plain", "recorded", "checked", "repeated"; refused: why not."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._regions: OrderedDict[Hashable, RegionState] = OrderedDict()
        self.uncompiled = 0  # calls that Python computed because their program was not ready yet
        self.paused = False  # while a larger region is computed for the first time, nothing within is recorded
        self._arenas = (Arena(), Arena())  # the second one is for what is computed in a graph break
        self._pools = (Pool(), Pool())
        self._place = 0  # 1 within a graph break, whose programs run in memory of their own
        self._live_transport: LiveTransport | None = None
        self._points = CallPoints()

    def __len__(self) -> int:
        """Keys that were met, and are still known."""
        return len(self._regions)

    def run(
        self, session: Session, key: Hashable, inputs: Sequence[Fixed], compute: StepBody, binding: WeightBinding =
        NO_WEIGHTS, warmup: int = 1, graph_break: GraphBreak | None = None, in_place: Sequence[Fixed] = (),
    ) -> Result:  # fmt: skip
        """What `compute` makes of the inputs, and its facts.

        key: all that decides what is computed, but sizes and the binding's weights. warmup: calls before one is
        recorded. graph_break: what of this call stays in Python. in_place: values that `compute` takes from elsewhere,
        which programs read where they lie; such a call has no binding.
        """
        point = self._points.next(session, self._place > 0, inputs, binding)
        call = _RegionCall(session, inputs, binding, graph_break, point)
        try:
            if in_place:
                memories = tuple([part.untyped_storage() for x in in_place for part in x.share.parts])
                call.binding = WeightBinding(weights=memories)
                key = (key, layout_of(in_place, call.binding.addresses))
            call.region = self._region(call, key)
            call.region.calls += 1
            started = self._started(call, warmup)
        except Exception as error:  # noqa: BLE001 - nothing is computed yet, so Python computes as always
            self._refuse(call, error)
            if graph_break is not None:
                graph_break.unhook()
            self._alone(call)
            started = self._without(call)
        return started(compute)

    def _started(self, call: _RegionCall, warmup: int) -> Callable[[StepBody], Result]:
        region, name = call.region, call.binding.name
        refused = region.refused_all or name in region.refused
        if not region.fits(call.binding):
            region.checked.discard(name)
        if name in region.checked and region.compiled is not None:
            return self._repeat(call, region.compiled)
        self._alone(call)
        self.uncompiled += not refused
        waits = region.calls <= warmup or (region.compiled is None and are_compiling())
        if not refused and waits and call.graph_break is not None:
            return functools.partial(self._plain, call, call.graph_break)
        if refused or waits:  # others may have a program all the same
            return self._without(call)
        return self._record(call) if region.compiled is None else self._check(call, region.compiled)

    def _links(self, session: Session) -> LiveTransport:
        protocol, held = session.protocol, self._live_transport
        if held is None or held.transport is not protocol.transport:
            held = self._live_transport = LiveTransport(protocol.transport, protocol.mask_streams)
        return held

    def _alone(self, call: _RegionCall) -> None:
        """This call is not one that all parties repeat together."""
        if call.point is not None and (end := end_of(call.session, self._links(call.session).barrier_end)) is not None:
            end.skip(call.point)

    def _without(self, call: _RegionCall) -> Callable[[StepBody], Result]:
        """As always, at a party that has no program, while others may have one."""

        def hidden(compute: StepBody) -> Result:
            with self._points.hiding(call.graph_break, self._inside_break):
                return self._computed(call, compute)

        return hidden if uses_cuda_graphs(call.session) else functools.partial(self._computed, call)

    def _refuse(self, call: _RegionCall, error: Exception) -> None:
        """From now on Python computes: for this binding, where there is a program for others."""
        region, name = call.region, call.binding.name
        self.refused[str(error) or type(error).__name__] += 1
        region.checked.discard(name)
        region.refused.add(name)
        region.bound.pop(name, None)
        region.refused_all |= region.compiled is None and len(region.refused) > 1  # once may be for want of memory

    def _computed(self, call: _RegionCall, compute: StepBody) -> Result:
        self.counts["plain"] += 1
        made, facts = compute(call.inputs)
        call.region.refused_all |= facts is None
        return made, facts

    def _plain(self, call: _RegionCall, graph_break: GraphBreak, compute: StepBody) -> Result:
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
                made = self._computed(call, compute)
        finally:
            self.paused = False
        call.region.refused_all |= self._lacks_break(graph_break)
        return made

    def _lacks_break(self, graph_break: GraphBreak) -> bool:
        """Whether a region has not the graph break that it should have."""
        if not graph_break.reached:
            graph_break.refuse("a graph break that was not reached")
        if graph_break.reason is not None:
            self.refused[graph_break.reason] += 1
        return graph_break.reason is not None

    @contextmanager
    def _inside_break(self) -> Iterator[None]:
        before, self._place = self._place, 1
        try:
            yield
        finally:
            self._place = before

    def _region(self, call: _RegionCall, key: Hashable) -> RegionState:
        place = (self._place,) if uses_cuda_graphs(call.session) else ()  # whose pool its memory is of
        key = (key, place, tuple([(tuple(x.shape), x.form, len(x.share.parts)) for x in call.inputs]))
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

        Raises UnsupportedOp for a new one of more than a quarter: those of long prompts would push each other out.
        """
        place = region.place
        held = [
            (key, sum([program.held for program in (each.compiled.program, *each.bound.values())]))
            for key, each in self._regions.items()
            if each.compiled is not None and each.place == place
        ]
        total, most, new = sum(size for _, size in held), MOST_HELD, region.compiled
        if new is not None and isinstance(new.program, GraphProgram):
            most = part_of(new.program.device, 8, graphs.MOST_HELD)
        if place and total > most and held[-1][1] > most // 4:
            region.compiled = None
            raise UnsupportedOp(f"programs of more than {most >> 20} MiB")
        for key, size in held[:-1]:
            if total <= most:
                break
            total -= size
            del self._regions[key]

    def _record(self, call: _RegionCall) -> Callable[[StepBody], Result]:
        protocol, binding, graph_break = call.session.protocol, call.binding, call.graph_break
        recorder: StepRecorder[Any]
        if uses_cuda_graphs(call.session):
            if any(isinstance(x, StreamKey) and not x.on_gpus for x in binding.weights):
                raise UnsupportedOp("masks of weights that are made in main memory")
            device, pool = torch.device(call.session.device), self._pools[self._place]
            recorder = GraphRecorder(protocol.transport, protocol.mask_streams, device, pool, binding.weights)
        else:
            recorder = CpuRecorder(protocol.transport, protocol.mask_streams, binding.places)
        parts: list[Tensor] = []
        operands = []
        for part in call.parts():
            parts.append(part.contiguous().clone())
            operands.append(recorder.given(parts[-1]))
        if graph_break is not None:
            operands += [recorder.public(x) for x in graph_break.publics]
        given = with_parts(call.inputs, parts)
        parts.clear()

        def finish(effects: SideEffects, made: Sequence[Fixed], facts: Hashable) -> None:
            given.clear()  # nothing that changes may outlive the step
            call.region.compiled = self._compiled(recorder, operands, effects, made, facts, graph_break)
            self._evict(call.region)

        return self._watched(call, "recorded", recorder, recorder.graph_break, given, finish)

    def _compiled(
        self, recorder: StepRecorder[Any], operands: Sequence[Any], effects: SideEffects, made: Sequence[Fixed],
        facts: Hashable, graph_break: GraphBreak | None,
    ) -> CompiledRegion:  # fmt: skip
        """The program of a step that was recorded. Raises UnsupportedOp where there is none."""
        outcome, parts = effects.end(made, facts)
        if facts is None:
            raise UnsupportedOp("results of other types than secret tensors")
        if graph_break is not None and self._lacks_break(graph_break):
            raise UnsupportedOp(f"its graph break: {graph_break.reason}")
        encodings = recorder.encodings()
        return CompiledRegion(
            recorder.program([*operands, *encodings.values()], parts), outcome, tuple(encodings)
        )  # fmt: skip

    def _watched(
        self, call: _RegionCall, what: str, watcher: TraceLog | StepRecorder[Any], leaves: Callable[[Sequence[Tensor],
        Sequence[Tensor]], Sequence[Tensor]], given: Sequence[Fixed], finish: Callable[[SideEffects, Sequence[Fixed],
        Hashable], None]
    ) -> Callable[[StepBody], Result]:  # fmt: skip
        """As always, of `given`, while `watcher` writes down all but the graph break, of which `leaves` is told; then
        `finish`, whose errors refuse the program.
        """
        session, graph_break = call.session, call.graph_break
        protocol, effects = session.protocol, SideEffects(session, call.binding.name)

        @contextmanager
        def outside() -> Iterator[None]:
            with unrecorded(), traced_by(None), recorded_by(protocol, watcher.inner), self._inside_break():
                yield

        def enter() -> str | None:
            effects.pause()
            deferred = session.checks.deferred is not None
            return "a check that was put off until the graph break" if deferred else None

        if graph_break is not None:
            graph_break.outside, graph_break.enter, graph_break.exit = outside, enter, effects.exit_hook(leaves)
        self.counts[what] += 1

        def run(compute: StepBody) -> Result:
            with watcher.operations(), traced_by(watcher), recorded_by(protocol, watcher), with_break(graph_break):
                made, facts = compute(given)
            try:
                finish(effects, made, facts)
            except Exception as error:  # noqa: BLE001 - the step is done; only its program is not
                self._refuse(call, error)
            return made, facts

        return run

    def _check(self, call: _RegionCall, compiled: CompiledRegion) -> Callable[[StepBody], Result]:
        protocol, graph_break = call.session.protocol, call.graph_break
        trace_log, break_check = TraceLog(protocol.transport, protocol.mask_streams), BreakCheck()
        given = [part.contiguous().clone() for part in call.parts()]
        if graph_break is not None:
            given += [x.clone() for x in graph_break.publics]

        def finish(effects: SideEffects, made: Sequence[Fixed], facts: Hashable) -> None:
            outcome, outputs = effects.end(made, facts)
            reason = trace_log.reason or (graph_break and graph_break.reason)
            if reason:
                raise UnsupportedOp(f"its check: {reason}")
            given.extend(call.encoded(compiled.encodings))
            replayed = ReplayTransport(trace_log.trace)
            program, addresses = call.region.bound_program(compiled.program, call.binding), call.binding.addresses
            again = program.ready(replayed, self._arenas[self._place], given, addresses)(break_check.replay)
            same = len(again) == len(outputs) and all(map(torch.equal, again, outputs))
            agrees = compiled.outcome == outcome and replayed.agrees(trace_log.trace)
            if not (same and agrees and break_check.same):
                raise UnsupportedOp("a recorded program that gives something else")
            call.region.checked.add(call.binding.name)

        return self._watched(call, "checked", trace_log, break_check.record, call.inputs, finish)

    def _repeat(self, call: _RegionCall, compiled: CompiledRegion) -> Callable[[StepBody], Result]:
        session, point, outcome = call.session, call.point, compiled.outcome
        program = call.region.bound_program(compiled.program, call.binding)
        transport, parts = self._links(session), call.parts()
        each = len(parts) // len(call.inputs)
        inner: Inner | None = None
        if call.graph_break is not None and outcome.graph_break is not None:
            parts += [*call.graph_break.publics, *call.encoded(compiled.encodings)]
            inner = functools.partial(self._inner, call, outcome.graph_break, call.graph_break)
        end = end_of(session, transport.barrier_end)
        ready: Callable[[Inner | None], list[Tensor]]
        if isinstance(program, GraphProgram) and end is not None and point is not None:
            program.take(parts)
            ready = functools.partial(run_together, program, transport, end, point)
        else:
            self._alone(call)
            ready = program.ready(transport, self._arenas[self._place], parts, call.binding.addresses)
        self.counts["repeated"] += 1

        def repeat(_: StepBody) -> Result:
            before = len(session.checks.pending)
            made = ready(inner)
            shares = [Share(tuple(made[at : at + each])) for at in range(0, len(made), each)]
            return outcome.settle(session, call.binding.name, shares, before)

        return repeat

    def _inner(
        self, call: _RegionCall, record: BreakRecord, graph_break: GraphBreak, parts: Sequence[Tensor]
    ) -> Sequence[Tensor]:  # fmt: skip
        with self._inside_break():
            return record.compute(call.session, graph_break, call.binding.name, parts)


_held: weakref.WeakKeyDictionary[Session, ProgramCache] = weakref.WeakKeyDictionary()


def programs_of(session: Session) -> ProgramCache | None:
    """The programs of a session, None where steps are not repeated: with `replay=False`, a device map or a 32-bit ring,
    while costs are counted, where a batch's rows have verdicts of their own, and in a step that is recorded.
    """
    if not session.config.replay or this_thread.hook is not None or session.checks.batch is not None:
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
    in_place: large inputs after the others, which a program of a CPU reads where they lie, in one layout.
    """
    programs, checks = programs_of(session), session.checks
    if programs is None or checks.deferred is not None:
        return compute([*inputs, *in_place])
    if uses_cuda_graphs(session):
        inputs, in_place = [*inputs, *in_place], ()

    def effects(values: Sequence[Fixed]) -> Result:
        made = compute([*values, *in_place])
        return made, () if checks.deferred is None else None

    key = (key, *map(session.exponent, QUANTITIES))
    return programs.run(session, key, inputs, effects, warmup=warmup, in_place=in_place)[0]


def uncompiled_calls(session: Session | None = None) -> int:
    """Calls of a session (None: of all in this process) that Python computed because their program was not ready."""
    return sum([found.uncompiled for each, found in _held.copy().items() if session is None or session is each])


def forget(session: Session) -> None:
    """Let go of a session's programs, and of the weights that they read."""
    _held.pop(session, None)
