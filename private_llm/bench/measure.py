"""Run a work with all its parties on this machine and make a row of it.

The client shares the inputs once, then says "go" and waits until every party is done: one warm-up run (which
compiles kernels), then the timed ones. Sharing and opening are outside the timed part and outside its bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from private_llm.bench.link import LinkSpeed, SlowHub
from private_llm.bench.rows import Row, party_threads, spread
from private_llm.bench.whole import WholeWork, measure_whole
from private_llm.bench.work import Work
from private_llm.config import PrivateConfig
from private_llm.errors import DomainError, PartyFailed, PrivateLLMError
from private_llm.kernels.memory import tune_allocator
from private_llm.net.children import start_children
from private_llm.net.local import LocalHub
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocols.session import ClientEnd, Session, deal, join, join_as_client
from private_llm.protocols.share import Share
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed

_CONTROL = "bench"
_GO, _STOP = 1, 0


def serve(work: Work, config: PrivateConfig, party: int, transport: Transport) -> None:
    """One party: take the inputs, run on every "go", then open the last result."""
    tune_allocator()
    torch.set_num_threads(party_threads(config.parties))
    session = join(config, party, transport)
    with torch.no_grad():
        run = work.prepare(session, dict(_receive_weights(work, session, transport)))
        taken = [session.protocol.receive_input(shape) for shape in work.inputs]
        inputs = [Fixed(session, share, session.frac) for share in taken]
        result = None
        while int(transport.recv(CLIENT, _CONTROL, (1,), torch.int64)) == _GO:
            transport.ledger.reset()
            result = run(session, inputs)
            cost = transport.ledger.cost()
            sent = [cost.sent.get((party, to), 0) for to in (*range(config.parties), CLIENT)]
            transport.send(CLIENT, _CONTROL, torch.tensor([*sent, cost.rounds]))
        if result is None:
            raise DomainError("a benchmark needs at least one run")
        described = torch.tensor([result.frac, *result.shape])
        if party == 0:
            transport.send(CLIENT, _CONTROL, torch.tensor([described.numel()]))
            transport.send(CLIENT, _CONTROL, described)
        session.protocol.reveal_to_client(result.share)


def measure(
    work: Work | WholeWork, config: PrivateConfig, repeat: int = 5, speed: LinkSpeed | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Row:  # fmt: skip
    """Run `work` once to warm up and `repeat` times with the clock on, parties as config.party_mode says.

    progress is called after each run. Raises what a party raised (PartyFailed for anything unforeseen).
    """
    if isinstance(work, WholeWork):
        return measure_whole(work, config, repeat, speed, progress)
    mode = "threads" if config.party_mode == "auto" else config.party_mode
    transport: Transport
    if mode == "processes":
        facts = {"name": work.name, "shape": list(work.shape)}
        transport, stop = start_children(config, "private_llm.bench.measure:serve_named", facts)
    else:
        transport, stop = _start_threads(work, config, speed)
    try:
        return _measure(work, config, mode, repeat, speed, transport, progress)
    finally:
        stop()


def _start_threads(work: Work, config: PrivateConfig, speed: LinkSpeed | None) -> tuple[Transport, Callable[[], None]]:
    hub = LocalHub(config.parties, config.timeout_s)
    if speed is not None:
        hub = SlowHub(config.parties, config.timeout_s, speed, _CONTROL)
    threads = [
        threading.Thread(target=_guarded, args=(work, config, i, hub.transport(i)), name=f"party {i}", daemon=True)
        for i in range(config.parties)
    ]
    for thread in threads:
        thread.start()

    def stop() -> None:
        for thread in threads:
            thread.join(1.0)

    return hub.transport(CLIENT), stop


def _measure(
    work: Work, config: PrivateConfig, mode: str, repeat: int, speed: LinkSpeed | None, transport: Transport,
    progress: Callable[[], None],
) -> Row:  # fmt: skip
    """The client's part."""
    ring = Ring(config.ring)
    end = join_as_client(config, transport)
    weights = work.weight_values()
    _send_weights(weights, config, transport)
    values = work.values()
    for value in values:
        end.share(ring.encode(value, config.frac_bits))
    times, reports = [], torch.empty(0)
    for _ in range(repeat + 1):
        seconds, reports = _one_run(transport, config.parties)
        times.append(seconds)
        progress()
    result = _open(transport, end, ring, config.parties)
    with torch.no_grad():
        truth = work.truth(values, weights)
    sent = {str(party): int(reports[party, :-1].sum()) for party in range(config.parties)}
    return Row(
        name=work.name, protocol=config.protocol, ring=config.ring, shape=work.shape, parties=config.parties,
        seconds=spread(times[1:]), bytes_total=sum(sent.values()), bytes_per_party=sent,
        rounds=int(reports[:, -1].max()), error_max=float((result - truth).abs().max()),
        threads=party_threads(config.parties), party_mode=mode, repeat=repeat,
        bandwidth_mbit=speed.bandwidth_mbit if speed else None, latency_ms=speed.latency_ms if speed else None,
    )  # fmt: skip


def serve_named(config: PrivateConfig, party: int, transport: Transport, name: str, shape: list[int]) -> None:
    """One party in a process of its own, which makes the work again from its name and shape."""
    from private_llm.bench.catalogue import make

    work = make(name, tuple(shape))
    if isinstance(work, Work):
        _guarded(work, config, party, transport)


def _guarded(work: Work, config: PrivateConfig, party: int, transport: Transport) -> None:
    """`serve`, whose end, however it comes, the others hear of."""
    finished = False
    try:
        serve(work, config, party, transport)
        finished = True
    except PartyFailed:
        finished = True  # another endpoint has said why
    except PrivateLLMError as error:
        transport.abort(f"party {party}, benchmark '{work.name}': {error}")
    finally:
        if not finished:
            transport.abort(f"party {party} stopped in benchmark '{work.name}'; its traceback says why")


def _send_weights(weights: Mapping[str, Tensor], config: PrivateConfig, transport: Transport) -> None:
    """As the model owner: one share of every weight to every party."""
    ring, seed = Ring(config.ring), Seed.fresh()
    for name, value in weights.items():
        for party, share in enumerate(deal(config, ring.encode(value, config.frac_bits), seed, name)):
            for part in share.parts:
                transport.send(party, "weight", part.contiguous())


def _receive_weights(work: Work, session: Session, transport: Transport) -> Iterator[tuple[str, Fixed]]:
    for name, shape in work.weights.items():
        count = 1 if session.config.protocol == "plain" else 2
        parts = [transport.recv(CLIENT, "weight", shape, session.ring.dtype) for _ in range(count)]
        yield name, Fixed(session, Share(tuple(parts)), session.frac)


def _one_run(transport: Transport, parties: int) -> tuple[float, Tensor]:
    """Seconds of one run and every party's report: bytes by receiver, then rounds."""
    started = time.perf_counter()
    for party in range(parties):
        transport.send(party, _CONTROL, torch.tensor([_GO]))
    reports = [transport.recv(party, _CONTROL, (parties + 2,), torch.int64) for party in range(parties)]
    return time.perf_counter() - started, torch.stack(reports)


def _open(transport: Transport, end: ClientEnd, ring: Ring, parties: int) -> Tensor:
    for party in range(parties):
        transport.send(party, _CONTROL, torch.tensor([_STOP]))
    length = int(transport.recv(0, _CONTROL, (1,), torch.int64))
    frac, *shape = transport.recv(0, _CONTROL, (length,), torch.int64).tolist()
    return ring.decode(end.open(tuple(shape)), frac)
