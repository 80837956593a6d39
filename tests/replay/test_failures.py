"""A recorder never ends what runs without it: an error in any function of it leaves answers, bytes and rounds as they
are, at one party or at all.
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import private_llm.replay
from private_llm.config import PrivateConfig
from private_llm.errors import ProtocolAbort
from private_llm.kernels import parallel
from private_llm.kernels.matmul import amx, seeded_cpu
from private_llm.net.local import LocalMesh
from private_llm.net.transport import PassingTransport, Transport
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.session import Session
from private_llm.replay import cpu_recorder
from private_llm.replay.modules import repeated, repeated_around
from private_llm.replay.program_cache import forget
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from tests.replay.test_graph_breaks import FRAC, WIDTH, Powers, around, expected
from tests.replay.test_programs import CALLS, run, some
from tests.session import run_session

_FOLDER = str(Path(private_llm.replay.__file__).parent)
_CALLS = ("plain", "recorded", "checked", "repeated")

STEP_ITSELF = frozenset({
    # computes or sends for the step, calls what may fail where an error is caught, or says that there was one
    "programs_of", "uses_cuda_graphs", "ProgramCache.__init__", "Arena.__init__", "Pool.__init__", "ProgramCache.run",
    "ProgramCache._computed", "ProgramCache._plain", "ProgramCache._lacks_break", "ProgramCache._inside_break",
    "ProgramCache._refuse", "ProgramCache._links", "ProgramCache._alone",
    "ProgramCache._without", "ProgramCache._without.<locals>.hidden", "CallPoints.__init__", "CallPoints.next",
    "CallPoints.hiding", "CallPoints.hiding.<locals>.shown", "end_of",
    "LiveTransport.__init__", "ProgramCache._plain.<locals>.outside", "ProgramCache._watched.<locals>.outside",
    "ProgramCache._watched.<locals>.run", "GraphBreak.run",
    "GraphBreak.refuse", "GraphBreak.unhook", "with_break", "recorded_by", "unrecorded", "noted.<locals>.guarded",
    "TracedTransport.send", "TracedTransport._recv", "TracedTransport.stop", "TracedTransport.operations",
    "StepRecorder.stop",
    "StepRecorder.operations", "_Operations.__init__", "_Operations.__torch_dispatch__",
    "StepRecorder.encoded", "StepRecorder.graph_break",
    "StepRecorder.computing", "CpuRecorder.operated", "CpuRecorder.parallel_region",
    "GraphRecorder.operated", "GraphRecorder.computed",
})  # fmt: skip
BEGUN = frozenset({
    # of a program that is repeated: masks are drawn and messages are on their way
    "ProgramCache._repeat.<locals>.repeat", "ProgramCache._inner", "Program._run", "Program._run_to_stop",
    "LiveTransport.fill", "LiveTransport.stream", "MaskDraw.draw", "MaskDraw.launch", "LiveTransport.write",
    "GraphProgram._draw_and_run", "GraphProgram.run_drawn", "GraphProgram.draw",
    "GraphProgram.resume", "GraphProgram.results", "compute", "compute_segment", "mapped", "_copies", "_copy_all",
    "_doing.<locals>.<lambda>", "_doing.<locals>.call", "_doing.<locals>.receive", "_doing.<locals>.resume",
    "BreakRecord.compute", "Outcome.settle",
})  # fmt: skip

Place = tuple[str, str]
"""A function, and the call of a region in which it is called."""


class Fault:
    """Follows one party through the recorder's functions, and raises where `place` is called for the `left`-th time."""

    def __init__(self) -> None:
        self.files: tuple[str, ...] = ()
        self.reached: Counter[Place] = Counter()
        self.place: Place | None = None
        self.left = self.raised = 0

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        def called(frame: FrameType, event: str, argument: object) -> None:
            name, file = frame.f_code.co_qualname, frame.f_code.co_filename
            name = re.sub(r"(\.<locals>\.<(list|set|dict)comp>|\.<locals>\.<genexpr>)+$", "", name)
            if not file.startswith(_FOLDER) or file.endswith("modules.py") or name in STEP_ITSELF:
                return
            if self.files and not file.endswith(self.files):
                return
            if call == "repeated" and name in BEGUN:
                return
            self.reached[name, call] += 1
            self.left -= (name, call) == self.place
            if (name, call) == self.place and not self.left:
                self.place, self.raised = None, self.raised + 1
                raise RuntimeError("injected")

        sys.settrace(called)
        try:
            yield
        finally:
            sys.settrace(None)


Faults = tuple[Fault, Fault, Fault]


def repeated_times(
    times: int, before: Callable[[int, int, Fault], None] = lambda number, party, fault: None, replay: bool = True
) -> tuple[Faults, list[Any]]:
    """Four calls of a region, `times` times from the beginning: right answers, each with `before`."""
    faults, ledgers = (Fault(), Fault(), Fault()), [None] * 3
    x, angle = torch.linspace(-1, 1, WIDTH).view(1, -1), torch.linspace(0, 1, WIDTH)
    want = expected(x, angle, 1).double()

    def party(session: Session, transport: Transport) -> None:
        for number in range(times):
            forget(session)
            called = repeated_around(around, "layer", session, "kind", [])
            before(number, session.party, faults[session.party])
            for call in _CALLS:
                given = SecretTensor(Fixed(session, session.protocol.receive_input((1, WIDTH)), FRAC))
                graph_break = Powers(1, [angle])
                with faults[session.party].during(call):
                    made = (
                        around(given, angle, graph_break)
                        if called is None
                        else called(given, {"angle": angle, "own": graph_break}, (), graph_break)
                    )
                session.protocol.reveal_to_client(made.to_fixed().share)
        ledger = session.protocol.ledger
        ledgers[session.party] = {**ledger.sent, **ledger.rounds, **ledger.macs}  # type: ignore[call-overload]

    def client(end: ClientEnd) -> None:
        for number, call in itertools.product(range(times), _CALLS):
            end.share((x.double() * (1 << FRAC)).round().long())
            got = end.open((1, WIDTH)).double() / (1 << FRAC)
            assert torch.allclose(got, want, atol=1e-3), (number, call)

    run_session(PrivateConfig.from_dict({"replay": replay}), party, client)
    return faults, ledgers


def an_error_in_any_function(*files: str, first: int = 0, every: int = 1) -> None:
    """Each time at other functions of two parties, while the third one goes on.

    files: of the recorder; none: all. first, every: which of all functions, in the order of their names.
    """

    def follow(number: int, party: int, fault: Fault) -> None:
        fault.files = files
        fault.reached.clear()

    known, _ = repeated_times(2, follow)
    counts = [fault.reached for fault in known]
    places = sorted(set().union(*counts))[first::every]

    def fail(number: int, party: int, fault: Fault) -> None:
        fault.files, at = files, 2 * number + (party - number) % 3
        if at < min(2 * number + 2, len(places)):
            fault.place = places[at]
            fault.left = 1 + 7 * at % max(1, counts[party][fault.place])  # at any of its calls

    times = -(-len(places) // 2)
    faults, ledgers = repeated_times(times, fail)
    assert ledgers == repeated_times(times, replay=False)[1]
    assert sum(fault.raised for fault in faults) > 0.8 * len(places), "not all parties call all functions"


@pytest.mark.full
@pytest.mark.parametrize("first", range(6))
def test_an_error_in_any_function_of_a_recorder(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "threads", lambda seconds: 3)
    monkeypatch.setattr("private_llm.kernels.parallel._SMALL_S", 0.0)
    an_error_in_any_function(first=first, every=6)


@pytest.mark.parametrize("most", [20_000, 1_000])
def test_a_step_that_is_too_large_to_record(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it runs, or as soon as what it is given is met."""
    monkeypatch.setattr(cpu_recorder, "MOST_RECORDED", most)
    made, held, _ = run(PrivateConfig(), F.gelu, some(4))
    assert all(torch.allclose(got, F.gelu(x).double(), atol=2e-3) for got, x in zip(made, some(4), strict=True))
    assert held[1].counts["recorded"] == (most > 1_000)
    assert held[1].counts["plain"] + held[1].counts["recorded"] == CALLS
    assert any("MiB in one step" in why for why in held[1].refused)


def test_no_memory_for_copies_of_a_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the first copies in turn."""
    clone, inputs = Tensor.clone, some(4)[:5]

    def scarce(this: Tensor, **how: Any) -> Tensor:
        file = sys._getframe(1).f_code.co_filename
        if file.startswith(_FOLDER) and not file.endswith("program.py"):
            made[threading.get_ident()] += 1
            if made[threading.get_ident()] == number:
                raise RuntimeError("can't allocate memory")
        return clone(this, **how)

    monkeypatch.setattr(Tensor, "clone", scarce)
    for number in (1, 3, 9, 30):  # noqa: B007 - `scarce` reads it
        made = Counter[int]()
        got, held, _ = run(PrivateConfig(), F.silu, inputs)
        assert all(torch.allclose(each, F.silu(x).double(), atol=2e-3) for each, x in zip(got, inputs, strict=True))
        assert any("allocate" in why for each in held.values() for why in each.refused)


def test_the_operation_that_ends_a_recording_is_named() -> None:
    """Which operation cannot be repeated is the first thing to know of a refusal."""
    held = cpu_recorder.CpuRecorder(LocalMesh(2).transport(0), [])
    x = torch.ones(4, dtype=torch.int64)
    held.given(x)
    with held.operations():
        x.nonzero()
    assert held.reason is not None
    assert "nonzero" in held.reason


@pytest.mark.parametrize("kernel", [amx.product, seeded_cpu.in_byte_tiles])
def test_a_kernel_that_does_not_say_what_it_writes_stays_in_python(kernel: Any) -> None:
    """Its step would keep addresses of memory that is gone when it runs again."""
    held = cpu_recorder.CpuRecorder(LocalMesh(2).transport(0), [])
    held.launched(kernel, [np.uint64(0)] * kernel.py_func.__code__.co_argcount)
    assert "states no addresses" in str(held.reason)
    assert not held._into


def test_memory_that_a_recording_holds_is_let_go_when_it_runs_out() -> None:
    held = cpu_recorder.CpuRecorder(LocalMesh(2).transport(0), [])
    held.given(torch.ones(3, dtype=torch.int64))

    def large() -> int:
        if held.reason is None:
            raise MemoryError
        return 3

    with pytest.raises(MemoryError):
        held.computing(large, writes=True)
    assert held.computing(large, writes=False) == 3
    assert "memory" in str(held.reason)
    assert not any(each for each in vars(held).values() if isinstance(each, list | dict | set))
    with pytest.raises(ValueError, match="its own"):
        held.computing(lambda: int("its own"), writes=False)


@pytest.mark.parametrize("error", [ProtocolAbort, KeyboardInterrupt])
@pytest.mark.parametrize("call", range(len(_CALLS)))
def test_errors_of_the_step_itself_go_on(error: type[BaseException], call: int) -> None:
    """What a link raises, in each call of a region."""

    class Broken(PassingTransport):
        def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            if now == [call] and self.me == 1 and tag == "msb":
                raise error("of the link")
            return super()._recv(frm, tag, shape, dtype)

    now = [-1]

    def party(session: Session, transport: Transport) -> None:
        called = repeated(F.relu, "unit", session, "function", [])
        for number in range(len(_CALLS)):
            x = SecretTensor(Fixed(session, session.protocol.receive_input((1, 8)), FRAC))
            if session.party == 1:
                now[:] = [number]
            called(x)

    def client(end: ClientEnd) -> None:
        for _ in _CALLS:
            end.share(torch.ones((1, 8), dtype=torch.int64))

    with pytest.raises(error, match="of the link"):
        run_session(PrivateConfig(), party, client, Broken)
    assert now == [call]
