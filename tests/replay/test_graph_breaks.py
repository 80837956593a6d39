"""Regions with a graph_break: what is around it is a program, and the graph break runs in Python between, in the same
order."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import private_llm.nn  # noqa: F401 - rules of functions
from private_llm.config import PrivateConfig
from private_llm.net.transport import Transport
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.session import Session
from private_llm.replay.graph_break import GraphBreak, this_call
from private_llm.replay.modules import repeated_around
from private_llm.replay.program_cache import ProgramCache, programs_of
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from tests.session import run_session

CALLS = 7
WIDTH = 12
FRAC = 18


class Powers(GraphBreak):
    """Multiplies what it is given with itself, `times` times: another number in each call."""

    def __init__(self, times: int, publics: Sequence[Tensor] = ()) -> None:
        super().__init__(publics)
        self.times = times

    def recompute(self, values: Sequence[Fixed]) -> Fixed:
        x = values[0]
        for _ in range(self.times):
            x = x * x
        return x


def around(
    x: SecretTensor, angle: Tensor, own: Powers, met: Callable[[Powers, Fixed], Fixed] | None = None
) -> SecretTensor:
    """Draws, waits and owes checks before and behind the graph break, and uses a public tensor in both.

    own: the graph break of this call, which nobody watches where the region is refused.
    """
    before = F.relu(x) * angle.unsqueeze(0)
    assert this_call.graph_break in (own, None)
    given = before.to_fixed()  # type: ignore[attr-defined]
    made = own.run((given,), functools.partial(own.recompute, (given,))) if met is None else met(own, given)
    return F.relu(SecretTensor(made) + x * angle) * x  # type: ignore[return-value]


def expected(x: Tensor, angle: Tensor, times: int) -> Tensor:
    made = F.relu(x) * angle
    for _ in range(times):
        made = made * made
    return F.relu(made + x * angle) * x


def run(
    protocol: str, replay: bool, met: Callable[[Powers, Fixed], Fixed] | None = None
) -> tuple[list[Tensor], list[ProgramCache], list[dict[object, int]], list[int]]:
    """What the client gets, each party's programs, its ledger, and the bits of the checks that it owes, in order."""
    config = PrivateConfig.from_dict({"protocol": protocol, "replay": replay})
    inputs = [torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(CALLS)]
    angles = [torch.rand(WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(CALLS)]
    held: list[ProgramCache] = []
    ledgers: list[dict[object, int]] = [{} for _ in range(config.parties)]
    owed: list[int] = []
    ready = threading.Barrier(config.parties)

    def party(session: Session, transport: Transport) -> None:
        called = repeated_around(functools.partial(around, met=met), "layer", session, "kind", [])
        for number, angle in enumerate(angles):
            x = SecretTensor(Fixed(session, session.protocol.receive_input((1, WIDTH)), FRAC))
            graph_break = Powers(number % 3, [angle])
            made = (
                around(x, angle, graph_break, met)
                if called is None
                else called(x, {"angle": angle, "own": graph_break}, (), graph_break)
            )
            session.protocol.reveal_to_client(made.to_fixed().share)
        ready.wait()
        found = programs_of(session)
        if found is not None:
            held.append(found)
        ledger = session.protocol.ledger
        for counts in (ledger.sent, ledger.rounds, ledger.macs):
            ledgers[session.party].update(counts)  # type: ignore[arg-type]
        if session.party == 1:
            owed.extend(len(sums.parts[0]) * 1000 + bits for sums, bits, _ in session.checks.pending)

    def client(end: ClientEnd) -> list[Tensor]:
        made = []
        for given in inputs:
            end.share((given.double() * (1 << FRAC)).round().long())
            made.append(end.open((1, WIDTH)).double() / (1 << FRAC))
        return made

    made = run_session(config, party, client)
    for got, x, angle, number in zip(made, inputs, angles, range(CALLS), strict=True):
        assert torch.allclose(got, expected(x, angle, number % 3).double(), atol=1e-3)
    return made, held, ledgers, owed


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_a_graph_break_that_differs_from_call_to_call(protocol: str) -> None:
    _, held, ledgers, owed = run(protocol, replay=True)
    want = {"plain": 1, "recorded": 1, "checked": 1, "repeated": CALLS - 3}
    assert [dict(each.counts) for each in held] == [want] * 3
    assert not any(each.refused for each in held)
    _, none, plain, owed_plainly = run(protocol, replay=False)
    assert not none
    assert ledgers == plain
    assert owed == owed_plainly, "checks of ranges in the same order"


def test_a_graph_break_goes_with_its_call() -> None:
    """It holds a layer's weights and a cache, which must not wait for Python to look for circles: neither does a call
    that is refused keep it, nor one that is recorded, checked or repeated.
    """
    alive: list[list[bool]] = []

    def meets(pending: bool) -> Callable[[Powers, Fixed], Fixed]:
        def met(own: Powers, given: Fixed) -> Fixed:
            checks, before = given.session.checks, given.session.checks.deferred
            checks.deferred = (SecretTensor(given), 20) if pending else before
            made = own.run((given,), functools.partial(own.recompute, (given,)))
            checks.deferred = before
            return made

        return met

    def party(session: Session, transport: Transport) -> None:
        for name, met in (("layer", meets(pending=False)), ("refused", meets(pending=True))):
            called = repeated_around(functools.partial(around, met=met), name, session, name, [])
            assert called is not None
            seen = []
            for _ in range(CALLS):
                angle = torch.ones(WIDTH)
                graph_break = Powers(1, [angle])
                x = SecretTensor(Fixed(session, session.protocol.receive_input((1, WIDTH)), FRAC))
                called(x, {"angle": angle, "own": graph_break}, (), graph_break)
                gone = weakref.ref(graph_break)
                del graph_break
                seen.append(gone() is not None)
            alive.append(seen)
        found = programs_of(session)
        assert found is not None
        assert dict(found.counts) == {"plain": 1 + 1 + CALLS - 2, "recorded": 2, "checked": 1, "repeated": CALLS - 3}
        reason = "a check that was put off until the graph break"
        assert found.refused == {reason: 1, f"its graph break: {reason}": 1}

    def client(end: ClientEnd) -> None:
        for _ in range(2 * CALLS):
            end.share(torch.ones(1, WIDTH, dtype=torch.int64) << FRAC)

    gc.collect()
    gc.disable()
    try:
        run_session(PrivateConfig(), party, client)
    finally:
        gc.enable()
    assert alive == [[False] * CALLS] * 6


def test_what_has_no_graph_break_or_two_stays_in_python() -> None:
    def without(graph_break: Powers, given: Fixed) -> Fixed:
        return graph_break.recompute((given,))

    def twice(graph_break: Powers, given: Fixed) -> Fixed:
        graph_break.run((given,), lambda: given)
        return graph_break.run((given,), functools.partial(graph_break.recompute, (given,)))

    for met, reason in ((without, "a graph break that was not reached"), (twice, "two graph breaks")):
        _, held, _, _ = run("trio", replay=True, met=met)
        assert [dict(each.counts) for each in held] == [{"plain": CALLS}] * 3
        assert [dict(each.refused) for each in held] == [{reason: 1}] * 3


def test_public_values_that_are_computed_are_refused() -> None:
    """Ring elements of a sum of public values would be those of the recorded call."""

    def party(session: Session, transport: Transport) -> None:
        def forward(x: SecretTensor, angle: Tensor, own: Powers) -> SecretTensor:
            return around(x, angle + 1, own)

        called = repeated_around(forward, "layer", session, "kind", [])
        assert called is not None
        for number in range(4):
            x = SecretTensor(Fixed(session, session.protocol.receive_input((1, WIDTH)), FRAC))
            angle = torch.full((WIDTH,), 0.25 * number)
            graph_break = Powers(0, [angle])
            made = called(x, {"angle": angle, "own": graph_break}, (), graph_break)
            session.protocol.reveal_to_client(made.to_fixed().share)
        found = programs_of(session)
        assert found is not None
        assert "repeated" not in found.counts
        assert found.refused == {"ring elements of public values that are computed": 1}

    def client(end: ClientEnd) -> None:
        for number in range(4):
            x = torch.linspace(0, 1, WIDTH).view(1, -1)
            end.share((x.double() * (1 << FRAC)).round().long())
            got = end.open((1, WIDTH)).double() / (1 << FRAC)
            assert torch.allclose(got, expected(x, torch.full((WIDTH,), 1 + 0.25 * number), 0).double(), atol=1e-3)

    run_session(PrivateConfig(), party, client)
