"""Preprocessing apart from the online phase, both timed: `private-llm bench --preprocess`.

Before each run the helping party (party 0, the dealer, in quad party 3) computes ahead and its receivers store what it
sends; the run itself reads those stores while it is silent. The same works as in `measure`, whole models in parallel
sessions, too; parties as threads or processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch

from private_llm.approximations import emulated
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PrivateLLMError
from private_llm.kernels.address import tune_allocator
from private_llm.net.children import start_children
from private_llm.net.ledger import CONTROL
from private_llm.net.local import LocalMesh
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocol_facts import names_where
from private_llm.protocols.offline_phase import OfflinePhase, section_label
from private_llm.protocols.session import join, join_as_client
from private_llm.replay.program_cache import uncompiled_calls
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from private_llm_cli.bench.link import LinkSpeed, SlowMesh
from private_llm_cli.bench.measure import receive_weights, send_weights
from private_llm_cli.bench.rows import Row, party_threads, settings, spread
from private_llm_cli.bench.whole import WholeWork
from private_llm_cli.bench.work import Work, warm_up

_SIGNAL = "bench"
_STOP, _AHEAD, _ONLINE = 0, 1, 2
"""What the client asks for."""


@dataclass(frozen=True)
class _Measured:
    """Times of both phases and of the first online one, bytes of both by endpoint, rounds, and the largest error."""

    first: float
    before: list[float]
    online: list[float]
    ahead: int
    sent: dict[str, int]
    rounds: int
    error: float


def measure_apart(
    work: Work | WholeWork, config: PrivateConfig, repeat: int = 5, speed: LinkSpeed | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Row:  # fmt: skip
    """Run `work` until nothing is recorded, and `repeat` times; the row's `seconds` are those of the online phase.

    speed: of emulated links (parties as threads). progress is called after the runs that warm up, and
    after each timed one.
    Raises ConfigError where there is nothing to separate, and what a party raised.
    """
    if config.helper is None:
        raise ConfigError(f"--preprocess: want protocol {names_where(lambda facts: facts.helper is not None)}")
    if config.parallel_sessions > 1 and isinstance(work, Work):
        raise ConfigError(
            f"--preprocess: benchmark {work.name!r} runs in one session then; parallel sessions are for whole models"
        )
    if isinstance(work, WholeWork):
        found = _whole(work, config, repeat, speed, progress)
    else:
        found = _ring(work, config, repeat, speed, progress)
    return Row(
        **settings(config, speed), name=work.name, shape=work.shape, repeat=repeat,
        seconds=spread(found.online), seconds_first=found.first,
        bytes_total=sum(found.sent.values()), bytes_per_party=found.sent,
        rounds=found.rounds, error_max=found.error,
        bytes_preprocessing=found.ahead, seconds_preprocessing=spread(found.before),
    )  # fmt: skip


def _slow(config: PrivateConfig, speed: LinkSpeed | None, instant: str) -> LocalMesh | None:
    """Links of that speed; messages tagged `instant` take no time."""
    return None if speed is None else SlowMesh(config.parties, config.timeout_s, speed, instant=instant)


# -- whole models -------------------------------------------------------------------------------------------------
def _whole(
    work: WholeWork, config: PrivateConfig, repeat: int, speed: LinkSpeed | None, progress: Callable[[], None]
) -> _Measured:
    from private_llm_hf import patch

    plan = work.plan
    if plan is None:
        raise ConfigError(f"--preprocess: benchmark {work.name!r} has no preprocessing plan")
    model = work.build()
    private: Any = patch(model, config, _slow(config, speed, "control"))
    before: list[float] = []
    online: list[float] = []
    logits = asked = torch.empty(0)
    with closing(private), torch.no_grad():

        def run() -> float:
            nonlocal logits, asked
            private.cost(reset=True)
            started = time.perf_counter()
            private.preprocess(plan())
            before.append(time.perf_counter() - started)
            started = time.perf_counter()
            logits, asked = work.call(private)
            online.append(time.perf_counter() - started)
            return online[-1]

        first = warm_up(run, uncompiled_calls)
        before.clear()
        online.clear()
        progress()
        for _ in range(repeat):
            run()
            progress()
        costs = private.cost()
    with torch.no_grad(), emulated(config.approximations, model):
        error = float((logits - work.truth(model.double(), asked)).abs().max())
    sent = costs.to_dict()["bytes_per_party"]
    return _Measured(first, before, online, costs.preprocessing.total, sent, costs.rounds, error)


# -- single operations and layers -----------------------------------------------------------------------------------
def serve(work: Work, config: PrivateConfig, party: int, transport: Transport) -> None:
    """One party: take weights and inputs, then do what the client asks for, then open the last result."""
    tune_allocator()
    torch.set_num_threads(party_threads(config.parties))
    session = join(config, party, transport)
    made: list[Fixed] = []
    with torch.no_grad():
        run = work.prepare(session, dict(receive_weights(work, session, transport)))
        inputs = [Fixed(session, session.protocol.receive_input(shape), session.frac) for shape in work.inputs]
        plan, ahead = 0, OfflinePhase(session, transport)

        def compute() -> None:
            made.append(run(session, inputs))
            session.protocol.verify()

        with ExitStack() as plans:
            while (order := int(transport.recv(CLIENT, _SIGNAL, (1,), torch.int64))) != _STOP:
                if order == _AHEAD:
                    transport.ledger.reset()
                    plan, ahead = plan + 1, plans.enter_context(closing(OfflinePhase(session, transport)))
                    ahead.prepare(section_label(plan, 0), compute)
                elif party != config.helper:
                    with ahead.following(section_label(plan, 0)):
                        compute()
                    ahead.close()
                booked = transport.ledger.sent.items()
                sent = sum(count for (_, op, to), count in booked if op != CONTROL and to != CLIENT)
                told = [sent, transport.ledger.cost().rounds, uncompiled_calls(session)]
                transport.send(CLIENT, _SIGNAL, torch.tensor(told))
    if party == 1:
        described = torch.tensor([made[-1].frac, *made[-1].shape])
        transport.send(CLIENT, _SIGNAL, torch.tensor([described.numel()]))
        transport.send(CLIENT, _SIGNAL, described)
    session.protocol.reveal_to_client(made[-1].share)


def serve_named(config: PrivateConfig, party: int, transport: Transport, name: str, shape: list[int]) -> None:
    """One party in a process of its own, which makes the work again from its name and shape."""
    from private_llm_cli.bench.catalogue import make

    work = make(name, tuple(shape))
    if isinstance(work, Work):
        _guarded(work, config, party, transport)


def _guarded(work: Work, config: PrivateConfig, party: int, transport: Transport) -> None:
    """`serve`, whose failure the others are told of."""
    try:
        serve(work, config, party, transport)
    except PrivateLLMError as error:
        transport.abort(f"party {party}, benchmark '{work.name}': {error}")


def _ring(
    work: Work, config: PrivateConfig, repeat: int, speed: LinkSpeed | None, progress: Callable[[], None]
) -> _Measured:
    transport: Transport
    if config.party_mode == "processes":
        facts = {"name": work.name, "shape": list(work.shape)}
        transport, stop = start_children(config, "private_llm_cli.bench.apart:serve_named", facts)
    else:
        mesh = _slow(config, speed, _SIGNAL) or LocalMesh(config.parties, config.timeout_s)
        for party in range(config.parties):
            threading.Thread(target=_guarded, args=(work, config, party, mesh.transport(party)), daemon=True).start()
        transport, stop = mesh.transport(CLIENT), lambda: None
    try:
        return _ask(work, config, repeat, transport, progress)
    finally:
        stop()


def _ask(
    work: Work, config: PrivateConfig, repeat: int, transport: Transport, progress: Callable[[], None]
) -> _Measured:
    """The client's part."""
    ring, weights, values = Ring(config.ring), work.weight_values(), work.values()
    end = join_as_client(config, transport)
    send_weights(weights, config, transport)
    for value in values:
        end.share(ring.encode(value, config.frac_bits))
    before: list[float] = []
    online: list[float] = []
    reports = torch.zeros(1, 1)

    def run() -> float:
        nonlocal reports
        seconds, _ = _one(transport, config.parties, _AHEAD)
        before.append(seconds)
        seconds, reports = _one(transport, config.parties, _ONLINE)
        online.append(seconds)
        return seconds

    first = warm_up(run, lambda: int(reports[:, -1].sum()))
    before.clear()
    online.clear()
    progress()
    for _ in range(repeat):
        run()
        progress()
    for party in range(config.parties):
        transport.send(party, _SIGNAL, torch.tensor([_STOP]))
    length = int(transport.recv(1, _SIGNAL, (1,), torch.int64))
    frac, *shape = transport.recv(1, _SIGNAL, (length,), torch.int64).tolist()
    result = ring.decode(end.open(tuple(shape)), frac)
    with torch.no_grad(), emulated(config.approximations):
        error = float((result - work.truth(values, weights)).abs().max())
    sent = {str(party): int(reports[party, 0]) for party in range(config.parties)}
    return _Measured(first, before, online, sent[str(config.helper)], sent, int(reports[:, 1].max()), error)


def _one(transport: Transport, parties: int, order: int) -> tuple[float, torch.Tensor]:
    """Seconds of one phase, and what every party has sent and waited for since the first phase began, and its
    uncompiled calls."""
    started = time.perf_counter()
    for party in range(parties):
        transport.send(party, _SIGNAL, torch.tensor([order]))
    reports = [transport.recv(party, _SIGNAL, (3,), torch.int64) for party in range(parties)]
    return time.perf_counter() - started, torch.stack(reports)
