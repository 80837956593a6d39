"""Recorded programs send and give exactly what Python sends and gives, and what cannot be recorded stays in Python."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import private_llm.nn  # noqa: F401 - rules of functions
from private_llm.config import PrivateConfig
from private_llm.errors import UnsupportedOp
from private_llm.kernels import parallel, teams
from private_llm.kernels.trace_hook import as_array
from private_llm.net.transport import Transport
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.session import Session, meta_session
from private_llm.protocols.share import Share
from private_llm.replay import modules, program_cache
from private_llm.replay.modules import repeated
from private_llm.replay.program import MOST_TABLES, Parallel, Program
from private_llm.replay.program_cache import ProgramCache, programs_of
from private_llm.replay.regions import WeightBinding
from private_llm.replay.transports import ReplayTransport, Trace
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from tests.session import run_session

WIDTH = 70
CALLS = 7
FRAC = 18

Function = Callable[[SecretTensor], Tensor]

FUNCTIONS: dict[str, Function] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": lambda x: x.sigmoid(),
    "softmax": lambda x: F.softmax(x, -1),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "rms norm": lambda x: F.rms_norm(x, (WIDTH,)),
    "max": lambda x: x.amax(-1),
    "moves": lambda x: torch.cat([x.flip(-1), x.roll(3, -1)], 0).T[::2] + x.repeat(2, 1).T[::2],
}


def run(
    config: PrivateConfig, function: Function, inputs: list[Tensor], wrap: bool = True
) -> tuple[list[Tensor], dict[int, ProgramCache], list[dict[object, int]]]:
    """`function` of each input in turn: the results, each party's programs, and what each of its ledgers says."""
    held: dict[int, ProgramCache] = {}
    ledgers: list[dict[object, int]] = [{} for _ in range(config.parties)]
    shape: list[torch.Size] = []
    ready = threading.Barrier(config.parties)

    def party(session: Session, transport: Transport) -> None:
        called = repeated(function, "unit", session, "function", []) if wrap else function
        for given in inputs:
            x = SecretTensor(Fixed(session, session.protocol.receive_input(tuple(given.shape)), session.frac))
            made = called(x)
            fixed = made.to_fixed()  # type: ignore[attr-defined]
            shape[:] = [fixed.shape]
            session.protocol.reveal_to_client(fixed.share)
        ready.wait()
        found = programs_of(session)
        if found is not None:
            held[session.party] = found
        ledger = session.protocol.ledger
        ledgers[session.party] = {**ledger.sent, **ledger.rounds, **ledger.macs}  # type: ignore[dict-item]

    def client(end: ClientEnd) -> list[Tensor]:
        made = []
        for given in inputs:
            with torch.no_grad():
                want = function(given).shape  # type: ignore[arg-type]
            elements = (given.double() * (1 << config.frac_bits)).round()
            end.share(elements.to(torch.int64 if config.ring == 64 else torch.int32))
            made.append(end.open(tuple(want)).double() / (1 << config.frac_bits))
        return made

    return run_session(config, party, client), held, ledgers


def some(seed: int, shape: tuple[int, ...] = (2, WIDTH)) -> list[Tensor]:
    torch.manual_seed(seed)
    return [4 * torch.randn(shape) for _ in range(CALLS)]


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_is_repeated(name: str, protocol: str) -> None:
    inputs = some(1)
    config = PrivateConfig.from_dict({"protocol": protocol})
    made, held, ledgers = run(config, FUNCTIONS[name], inputs)
    for got, given in zip(made, inputs, strict=True):
        assert torch.allclose(got, FUNCTIONS[name](given).double(), atol=2e-3)  # type: ignore[arg-type]
    want = {"plain": 1, "recorded": 1, "checked": 1, "repeated": CALLS - 3}
    assert [dict(held[party].counts) for party in range(3)] == [want] * 3
    assert not any(each.refused for each in held.values())
    plain = run(PrivateConfig.from_dict({"protocol": protocol, "replay": False}), FUNCTIONS[name], inputs)
    assert ledgers == plain[2], "the same bytes, rounds and multiply-adds under the same names"


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (5, 64), (3, 129)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    inputs = some(2, shape)
    made, held, _ = run(PrivateConfig(), F.gelu, inputs)
    assert all(torch.allclose(got, F.gelu(x).double(), atol=2e-3) for got, x in zip(made, inputs, strict=True))
    assert held[1].counts["repeated"] == CALLS - 3


def test_one_party_may_use_python_where_others_repeat() -> None:
    inputs = some(3)
    alone = {0: True, 1: False, 2: True}

    def function(x: SecretTensor) -> Tensor:
        return F.silu(x)

    def sometimes(x: SecretTensor) -> Tensor:
        wrapped = memo.setdefault(x.session, repeated(function, "unit", x.session, "function", []))
        return wrapped(x) if not isinstance(x, SecretTensor) or alone[x.session.party] else function(x)

    memo: dict[Session, Callable[..., Tensor]] = {}

    def either(x: Tensor) -> Tensor:
        return sometimes(x) if isinstance(x, SecretTensor) else F.silu(x)

    made, held, _ = run(PrivateConfig(), either, inputs, wrap=False)  # type: ignore[arg-type]
    assert all(torch.allclose(got, F.silu(x).double(), atol=2e-3) for got, x in zip(made, inputs, strict=True))
    assert held[0].counts["repeated"] == CALLS - 3
    assert not held[1].counts


def test_masks_never_repeat() -> None:
    """A program that is run twice on the same share sends other bytes: masks come from the streams, not the record."""
    seen: list[Tensor] = []

    def party(session: Session, transport: Transport) -> None:
        x = SecretTensor(Fixed(session, session.protocol.receive_input((1, 8)), FRAC))
        called = repeated(F.relu, "unit", session, "function", [])
        for _ in range(6):
            made = called(x.duplicate()).to_fixed().share
            if session.party == 1:
                seen.append(torch.cat([part.flatten() for part in made.parts]))

    run_session(PrivateConfig(), party, lambda end: end.share(torch.arange(8).view(1, 8) << FRAC))
    assert len({tuple(each.tolist()) for each in seen}) == 6


def test_what_depends_on_values_is_refused() -> None:
    """A function that reads what it should not, through NumPy or as a number, is found when it is recorded."""

    def through_numpy(x: Fixed) -> Fixed:
        part = torch.from_numpy(as_array(x.share.parts[0]) * 1)
        return x.with_share(Share((part, *x.share.parts[1:])))

    def as_number(x: Fixed) -> Fixed:
        some = int(x.share.parts[0].sum()) % 2
        return x.view(lambda part: part * (1 + some))

    for function in (through_numpy, as_number):
        refused: list[str] = []

        def party(session: Session, transport: Transport, function: Callable[[Fixed], Fixed] = function) -> None:
            x, programs = Fixed(session, session.protocol.receive_input((2, 8)), FRAC), ProgramCache()
            for _ in range(5):
                programs.run(session, "unit", [x], lambda values: ([function(values[0])], ()))
            refused.extend(programs.refused)  # noqa: B023 - read behind the session
            if programs.counts["repeated"]:
                raise RuntimeError("a function of values was repeated")

        run_session(PrivateConfig(), party, lambda end: end.share(torch.ones(2, 8, dtype=torch.int64)))
        assert len(refused) == 3


def test_a_program_that_is_wrong_is_found_before_it_is_used() -> None:
    """What a function takes from outside and changes from call to call is seen by the check, not by the recorder."""
    refused: list[str] = []

    def party(session: Session, transport: Transport) -> None:
        x, programs, outside = Fixed(session, session.protocol.receive_input((2, 8)), FRAC), ProgramCache(), [0]

        def function(values: list[Fixed]) -> tuple[list[Fixed], tuple[()]]:
            outside[0] += 1
            return [values[0].view(lambda part: part * outside[0])], ()

        for call in range(5):
            made, _ = programs.run(session, "unit", [x], function)  # type: ignore[arg-type]
            if not torch.equal(made[0].share.parts[0], x.share.parts[0] * (call + 1)):
                raise RuntimeError("a program of the past")
        refused.extend(programs.refused)

    run_session(PrivateConfig(), party, lambda end: end.share(torch.ones(2, 8, dtype=torch.int64)))
    assert refused == ["a recorded program that gives something else"] * 3


SENT = (1, "mul", torch.arange(3))


@pytest.mark.parametrize(
    ("sent", "right"),
    [
        ([SENT], True), ([], False), ([SENT, SENT], False), ([(2, *SENT[1:])], False), ([(1, "and", SENT[2])], False),
        ([(1, "mul", SENT[2] + 1)], False), ([(1, "mul", SENT[2][:2])], False),
    ],
)  # fmt: skip
def test_a_program_must_send_what_python_sent(sent: list[tuple[int, str, Tensor]], right: bool) -> None:
    notes = Trace()
    notes.sent.append(SENT)
    program = ReplayTransport(notes)
    for message in sent:
        program.send(*message)
    assert program.agrees(notes) is right


def test_modules_that_are_alike_share_a_program_and_keep_their_weights() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(5, 8) for _ in range(4)]
    inputs = [torch.randn(1, 8) for _ in range(3)]
    counts: list[dict[str, int]] = []

    def party(session: Session, transport: Transport) -> None:
        def received(shape: tuple[int, ...]) -> SecretTensor:
            return SecretTensor(Fixed(session, session.protocol.receive_input(shape), FRAC))

        held = [received((5, 8)) for _ in weights]
        layers = [
            repeated(lambda x, w=w: F.linear(x, w), f"layer {n}", session, "linear", [("weight", w)])
            for n, w in enumerate(held)
        ]
        for _ in inputs:
            x = received((1, 8))
            for layer in layers:
                session.protocol.reveal_to_client(layer(x).to_fixed().share)
        found = programs_of(session)
        counts.append({} if found is None else dict(found.counts))

    def client(end: ClientEnd) -> list[list[Tensor]]:
        for w in weights:
            end.share((w.double() * (1 << FRAC)).round().long())
        made = []
        for x in inputs:
            end.share((x.double() * (1 << FRAC)).round().long())
            made.append([end.open((1, 5)).double() / (1 << FRAC) for _ in weights])
        return made

    made = run_session(PrivateConfig(), party, client)
    for x, row in zip(inputs, made, strict=True):
        for w, got in zip(weights, row, strict=True):
            assert torch.allclose(got, F.linear(x, w).double(), atol=1e-4)
    # 12 calls: the first as always, the second recorded, then one check for each of four layers
    assert counts == [{"plain": 1, "recorded": 1, "checked": 4, "repeated": 6}] * 3


@pytest.mark.sampled(4)
@pytest.mark.skipif(not teams.HERE, reason="no teams on this system")
@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_pieces_of_a_step_run_side_by_side(name: str, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [x.expand(15, WIDTH).contiguous() for x in some(1, (1, WIDTH))]
    plain = run(PrivateConfig.from_dict({"protocol": protocol, "replay": False}), FUNCTIONS[name], inputs)
    monkeypatch.setattr(parallel, "threads", lambda seconds: 3)
    monkeypatch.setattr("private_llm.kernels.parallel._SMALL_S", 0.0)
    made, held, ledgers = run(PrivateConfig.from_dict({"protocol": protocol}), FUNCTIONS[name], inputs)
    for got, given in zip(made, inputs, strict=True):
        assert torch.allclose(got, FUNCTIONS[name](given).double(), atol=2e-3)  # type: ignore[arg-type]
    assert [dict(each.refused) for each in held.values()] == [{}] * 3
    assert all(each.counts["repeated"] == CALLS - 3 for each in held.values())
    assert ledgers == plain[2]
    found = [program for each in held.values() for program in programs(each)]
    together = [event for program in found for event in program.events if isinstance(event, Parallel)]
    assert len(found) == 3
    assert bool(together) == (name != "moves")
    assert {len(event.pieces) for event in together} <= {2, 3}


def programs(programs: ProgramCache) -> list[Program]:
    """What is held of a party's regions."""
    made = [region.compiled.program for region in programs._regions.values() if region.compiled is not None]
    return [program for program in made if isinstance(program, Program)]


def test_large_modules_stay_in_python_where_nobody_helps_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[Counter[str]] = []
    monkeypatch.setattr(teams, "HERE", False)
    monkeypatch.setattr(modules, "PYTHON_S", 5 * 8 * 2 * 8 / modules.BYTES / 2)  # half of what reading the weight takes

    def party(session: Session, transport: Transport) -> None:
        def received(shape: tuple[int, ...]) -> SecretTensor:
            return SecretTensor(Fixed(session, session.protocol.receive_input(shape), FRAC))

        weight = received((5, 8))
        layer = repeated(lambda x: F.linear(x, weight), "layer", session, "linear", [("weight", weight)])
        for number in range(6):
            mine.threads = 3 if number < 3 else 1
            session.protocol.reveal_to_client(layer(received((1, 8))).to_fixed().share)
        found = programs_of(session)
        counts.append(Counter() if found is None else found.counts)

    def client(end: ClientEnd) -> None:
        end.share(torch.ones((5, 8), dtype=torch.int64))
        for _ in range(6):
            end.share(torch.ones((1, 8), dtype=torch.int64) << FRAC)
            end.open((1, 5))

    mine = threading.local()
    monkeypatch.setattr(parallel, "threads", lambda seconds: getattr(mine, "threads", 1))
    run_session(PrivateConfig(), party, client)
    assert [dict(each) for each in counts] == [{"plain": 1, "recorded": 1, "checked": 1}] * 3


def test_values_that_are_read_where_they_lie() -> None:
    """A program for each layout, also where two of them share their memory; tables of addresses are bounded."""
    counts: list[tuple[int, int, bool]] = []

    def party(session: Session, transport: Transport) -> None:
        kept = []  # at addresses of their own

        def received() -> Fixed:
            kept.append(Fixed(session, session.protocol.receive_input((4, 6)), session.frac))
            return kept[-1]

        def called(x: Fixed, *in_place: Fixed) -> None:
            def compute(values: Sequence[Fixed]) -> Sequence[Fixed]:
                return [values[0].mul(values[1]) - values[0].mul(values[2])]

            made = program_cache.repeat(session, "in_place", [x], compute, in_place=in_place)[0]
            session.protocol.reveal_to_client(made.share)

        x = received()
        for _ in range(CALLS):
            one = received()
            called(x, one, one)
        for _ in range(CALLS + MOST_TABLES):
            called(x, received(), received())
        wide = [each.view(lambda part: torch.cat([part, part], 1)[:, :6]) for each in (received(), received())]
        for _ in range(CALLS):
            called(x, *wide)
        found = programs_of(session)
        assert found is not None
        assert not found.refused
        tables = [len(each._bound.tables) for each in programs(found) if each._bound is not None]
        counts.append((found.counts["repeated"], len(tables), max(tables) <= MOST_TABLES))

    def client(end: ClientEnd) -> None:
        def shared(seed: int) -> Tensor:
            torch.manual_seed(seed)
            x = torch.randn(4, 6, dtype=torch.float64)
            end.share((x * (1 << FRAC)).round().long())
            return x

        def opened(want: Tensor) -> None:
            assert torch.allclose(end.open((4, 6)).double() / (1 << FRAC), want, atol=1e-3)

        x = shared(0)
        for number in range(CALLS):
            shared(number)
            opened(torch.zeros(4, 6, dtype=torch.float64))
        for number in range(CALLS + MOST_TABLES):
            opened(x * (shared(2 * number) - shared(2 * number + 1)))
        wide = shared(500), shared(501)
        for _ in range(CALLS):
            opened(x * (wide[0] - wide[1]))

    run_session(PrivateConfig(), party, client)
    assert counts == [(3 * CALLS + MOST_TABLES - 9, 3, True)] * 3


def test_constants_of_programs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.arange(WIDTH)

    def adds(x: SecretTensor) -> Tensor:
        return x + table.float() * x.shape[0]

    inputs = [x for rows in range(1, 6) for x in some(6, (rows, WIDTH))[:3]]
    _, held, _ = run(PrivateConfig(), adds, inputs)
    assert len(held[1]) == 5
    monkeypatch.setattr(program_cache, "MOST_HELD", 1)
    _, held, _ = run(PrivateConfig(), adds, inputs)
    assert len(held[1]) == 1


def test_arguments_that_are_handed_on_stay_the_same_tensors() -> None:
    """What returns its argument, or a view of it, is not repeated; in-place operations on views are refused as ever."""
    facts: list[bool] = []

    def outer(x: SecretTensor) -> Tensor:
        if not isinstance(x, SecretTensor):  # the client, who asks for the shape
            return x
        same = repeated(lambda y: y, "same", x.session, "same", [])
        view = repeated(lambda y: y.flatten(), "view", x.session, "view", [])
        inplace = repeated(lambda y: F.relu(y, inplace=True), "relu", x.session, "relu", [])
        for _ in range(4):
            facts.append(same(x) is x)
            facts.append(view(x).shares_memory_with(x))
            with pytest.raises(UnsupportedOp, match="in-place"):
                inplace(x[:1])
        return x + 0.0

    run(PrivateConfig(), outer, some(7)[:2], wrap=False)
    assert facts
    assert all(facts)


def test_a_session_lets_go_of_the_program_that_was_used_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("private_llm.replay.program_cache.MOST_PROGRAMS", 2)
    held: list[int] = []

    def party(session: Session, transport: Transport) -> None:
        x, programs = Fixed(session, session.protocol.receive_input((2, 8)), FRAC), ProgramCache()
        for key in "abc":
            programs.run(session, key, [x], lambda values: (list(values), ()), WeightBinding())
        held.append(len(programs))

    run_session(PrivateConfig(), party, lambda end: end.share(torch.ones(2, 8, dtype=torch.int64)))
    assert held == [2, 2, 2]


@pytest.mark.parametrize(
    "settings",
    [
        {"replay": False}, {"protocol": "quad"}, {"ring": 32, "frac_bits": 13}, {"device_map": {"": "cpu"}},
    ],
)  # fmt: skip
def test_where_steps_are_not_repeated(settings: dict[str, object]) -> None:
    _, held, _ = run(PrivateConfig.from_dict(settings), F.relu, some(4))
    assert not held


@pytest.mark.parametrize("settings", [{}, {"device_map": {"": "cpu"}}])
def test_counting_costs_records_nothing(settings: dict[str, object]) -> None:
    assert programs_of(meta_session(PrivateConfig.from_dict(settings), 1)) is None
