"""Run a work with all its parties on this machine and make a row of it.

The client shares the inputs once, then says "go" and waits until every party is done: runs until no step is recorded
any more (the first one compiles kernels), then the timed ones. Sharing and opening are outside the timed
part and outside its bytes.

With preprocessing apart (`--preprocess`), before each run the helping party (party 0, the dealer, in
quad party 3) computes ahead and its receivers store what it sends; the run reads those stores while it is silent.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch
from torch import Tensor

from bench.link import LinkSpeed, SlowMesh
from bench.rows import Row, settings, spread
from bench.whole import WholeWork, measure_whole
from bench.work import Work, warm_up
from private_llm.approximations import emulated
from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, PartyFailed, PrivateLLMError
from private_llm.kernels.address import tune_allocator
from private_llm.kernels.parallel import threads_per_party
from private_llm.net.children import start_children
from private_llm.net.ledger import CONTROL as PHASES
from private_llm.net.local import LocalMesh
from private_llm.net.parallel_sessions import parallel_session_links
from private_llm.net.rendezvous import connect
from private_llm.net.transport import CLIENT, Transport
from private_llm.protocol_facts import names_where
from private_llm.protocols.ends import ClientEnd
from private_llm.protocols.offline_phase import OfflinePhase, section_label
from private_llm.protocols.session import Session, join, join_as_client
from private_llm.protocols.share import Share
from private_llm.protocols.weight_sharing import deal
from private_llm.replay.program_cache import uncompiled_calls
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed

CONTROL = "bench"
"""Tag of the signals that start and stop runs."""
_STOP, _GO, _AHEAD, _ONLINE = range(4)
"""What the client asks for: the end, a run, or one phase of a run."""


class _ParallelSession:
    """One parallel session of a party: its session, its inputs, its last result."""

    def __init__(self, work: Work, config: PrivateConfig, transport: Transport, number: int) -> None:
        links = parallel_session_links(transport, config.parties, number, config.rotate_roles)
        self.session = join(config, links.me, links)
        with torch.no_grad():
            self._run = work.prepare(self.session, dict(receive_weights(work, self.session, links)))
        parts = zip(work.inputs, work.share_of(number, config.parallel_sessions), strict=True)
        shapes = [(len(range(shape[0])[rows]), *shape[1:]) for shape, rows in parts]
        taken = [self.session.protocol.receive_input(shape) for shape in shapes]
        self._inputs = [Fixed(self.session, share, self.session.frac) for share in taken]
        self._links = links
        self._plan = 0
        self.ahead = OfflinePhase(self.session, links)
        self.result: Fixed | None = None

    @property
    def sent(self) -> list[int]:
        """Bytes to each party in the last run, both phases of it."""
        made = [0] * self.session.config.parties
        for (_, what, to), count in self._links.ledger.sent.items():
            if what != PHASES and to != CLIENT:
                made[to] += count
        return made

    @property
    def rounds(self) -> int:
        """Exchanges that this party waited for in the last run."""
        return self._links.ledger.cost().rounds

    def run(self, order: int) -> None:
        """Compute once, or a phase of it; parties that could have cheated prove that they have not."""
        if order != _ONLINE:
            self._links.ledger.reset()
        if order == _GO:
            self._compute()
        elif order == _AHEAD:
            self._plan += 1
            self.ahead = OfflinePhase(self.session, self._links)
            self.ahead.prepare(section_label(self._plan, 0), self._compute)
        elif self.session.party != self.session.config.helper:
            with self.ahead.following(section_label(self._plan, 0)):
                self._compute()
            self.ahead.close()

    def _compute(self) -> None:
        with torch.no_grad():
            self.result = self._run(self.session, self._inputs)
            self.session.protocol.verify()

    def close(self) -> None:
        """Delete what is stored."""
        self.ahead.close()

    def reveal(self, describe: bool) -> None:
        """Open the last result towards the client, who is told its shape if `describe`."""
        if self.result is None:
            raise DomainError("a benchmark needs at least one run")
        if describe:
            described = torch.tensor([self.result.frac, *self.result.shape])
            self._links.send(CLIENT, CONTROL, torch.tensor([described.numel()]))
            self._links.send(CLIENT, CONTROL, described)
        self.session.protocol.reveal_to_client(self.result.share)


def serve(work: Work, config: PrivateConfig, party: int, transport: Transport) -> None:
    """One party: take the inputs, run as often as the client asks, then open the last result."""
    tune_allocator()
    torch.set_num_threads(threads_per_party(config.parties))
    sessions = [_ParallelSession(work, config, transport, number) for number in range(config.parallel_sessions)]
    with ThreadPoolExecutor(len(sessions), f"party {party} parallel session") as pool, ExitStack() as stack:
        for each in sessions:
            stack.callback(each.close)
        while (order := int(transport.recv(CLIENT, CONTROL, (1,), torch.int64))) != _STOP:
            if len(sessions) == 1:
                sessions[0].run(order)  # on this thread: switching costs more than a small work
            else:
                list(pool.map(lambda session: session.run(order), sessions))
            sent = [sum(counts) for counts in zip(*(each.sent for each in sessions), strict=True)]
            ahead = sum(sum(each.sent) for each in sessions if each.session.party == config.helper)
            rounds = max(each.rounds for each in sessions)
            recorded = sum(uncompiled_calls(each.session) for each in sessions)
            transport.send(CLIENT, CONTROL, torch.tensor([*sent, ahead, rounds, recorded]))
    for each in sessions:
        each.reveal(describe=each.session.party == 0)


def measure(
    work: Work | WholeWork, config: PrivateConfig, repeat: int = 5, speed: LinkSpeed | None = None,
    progress: Callable[[], None] = lambda: None, mesh: LocalMesh | None = None, apart: bool = False,
) -> Row:  # fmt: skip
    """Run `work` until nothing is recorded, and `repeat` times with the clock on, parties as config.party_mode says.

    With party_mode="remote" every party must run `serve` with the same work. progress is called after the
    runs that warm up, and after each timed one. mesh: carries the frames of parties that are threads, at its own speed.
    apart: preprocess before each run; the row's `seconds` are those of the online phase. Raises ConfigError where there
    is nothing to separate, and what a party raised (PartyFailed for anything unforeseen).
    """
    if apart and config.helper is None:
        raise ConfigError(f"--preprocess: want protocol {names_where(lambda facts: facts.helper is not None)}")
    if isinstance(work, WholeWork):
        return measure_whole(work, config, repeat, speed, progress, mesh, apart)
    if apart and config.parallel_sessions > 1:
        raise ConfigError(
            f"--preprocess: benchmark {work.name!r} runs in one session then; parallel sessions are for whole models"
        )
    (row,) = measure_in_turns([(work, config)], repeat, progress, speed, mesh, apart)
    return row


def measure_in_turns(
    works: Sequence[tuple[Work, PrivateConfig]], repeat: int = 5, progress: Callable[[], None] = lambda: None,
    speed: LinkSpeed | None = None, mesh: LocalMesh | None = None, apart: bool = False,
) -> list[Row]:  # fmt: skip
    """As `measure`, each run of one work followed by one of the next, so that all of them meet the same machine.

    Parties and weights of all works are there at once. progress is called after each turn. Raises what a party raised.
    """
    with ExitStack() as stack:
        running = []
        for work, config in works:
            transport, stop = _start(work, config, speed, mesh)
            stack.callback(stop)
            running.append(_Running(work, config, transport, apart))
        for each in running:
            each.warm_up()
        progress()
        for _ in range(repeat):
            for each in running:
                each.once()
            progress()
        rows = [each.row(speed) for each in running]
    if running[1:]:
        running.clear()
        gc.collect()  # parties' modules refer to themselves, and hold their weights until this
    return rows


def _start(
    work: Work, config: PrivateConfig, speed: LinkSpeed | None, mesh: LocalMesh | None
) -> tuple[Transport, Callable[[], None]]:
    """The parties, as config.party_mode says: the client's end, and what stops them."""
    mode = "threads" if config.party_mode == "auto" else config.party_mode
    if mode == "processes":
        facts = {"name": work.name, "shape": list(work.shape)}
        return start_children(config, "bench.measure:serve_named", facts)
    if mode == "remote":
        transport = connect(config, CLIENT)
        return transport, transport.close
    return _start_threads(work, config, speed, mesh)


def _start_threads(
    work: Work, config: PrivateConfig, speed: LinkSpeed | None, given: LocalMesh | None
) -> tuple[Transport, Callable[[], None]]:
    mesh = given or LocalMesh(config.parties, config.timeout_s)
    if speed is not None and given is None:
        mesh = SlowMesh(config.parties, config.timeout_s, speed, CONTROL)
    threads = [
        threading.Thread(target=_guarded, args=(work, config, i, mesh.transport(i)), name=f"party {i}", daemon=True)
        for i in range(config.parties)
    ]
    for thread in threads:
        thread.start()

    def stop() -> None:
        for thread in threads:
            thread.join(1.0)

    return mesh.transport(CLIENT), stop


class _Running:
    """The client's part: inputs and weights shared once, runs on demand, then a row."""

    def __init__(self, work: Work, config: PrivateConfig, transport: Transport, apart: bool = False) -> None:
        self._work, self._config, self._transport, self._apart = work, config, transport, apart
        self._ring = Ring(config.ring)
        self._weights, self._values = work.weight_values(), work.values()
        self._ends = []
        for number in range(config.parallel_sessions):
            links = parallel_session_links(transport, config.parties, number, config.rotate_roles)
            end = join_as_client(config, links)
            send_weights(self._weights, config, links)
            for value, rows in zip(self._values, work.share_of(number, config.parallel_sessions), strict=True):
                end.share(self._ring.encode(value[rows], config.frac_bits))
            self._ends.append(end)
        self._ahead: list[float] = []
        self._times: list[float] = []
        self._first = 0.0
        self._reports = torch.zeros(1, 1)

    def warm_up(self) -> None:
        """Runs that do not count."""
        self._first = warm_up(self.once, lambda: int(self._reports[:, -1].sum()))
        self._ahead.clear()
        self._times.clear()

    def once(self) -> float:
        """One run: seconds of it, or of its online phase."""
        if self._apart:
            self._ahead.append(self._ask(_AHEAD))
        self._times.append(self._ask(_ONLINE if self._apart else _GO))
        return self._times[-1]

    def _ask(self, order: int) -> float:
        """Seconds of what parties are asked for; they report bytes by receiver and ahead, rounds, unrecorded calls."""
        transport, parties, started = self._transport, self._config.parties, time.perf_counter()
        for party in range(parties):
            transport.send(party, CONTROL, torch.tensor([order]))
        reports = [transport.recv(party, CONTROL, (parties + 3,), torch.int64) for party in range(parties)]
        seconds = time.perf_counter() - started
        self._reports = torch.stack(reports)
        return seconds

    def row(self, speed: LinkSpeed | None) -> Row:
        """Open the last result, compare it, and end."""
        work, config, reports = self._work, self._config, self._reports
        result = _open(self._transport, self._ends, self._ring, config.parties)
        with torch.no_grad(), emulated(config.approximations):
            truth = work.truth(self._values, self._weights)
        sent = {str(party): int(reports[party, :-3].sum()) for party in range(config.parties)}
        return Row(
            **settings(config, speed), name=work.name, shape=work.shape, repeat=len(self._times),
            seconds=spread(self._times), seconds_first=self._first,
            bytes_total=sum(sent.values()), bytes_per_party=sent,
            rounds=int(reports[:, -2].max()), error_max=float((result - truth).abs().max()),
            bytes_preprocessing=int(reports[:, -3].sum()),
            bytes_received={str(party): int(reports[:, party].sum()) for party in range(config.parties)},
            seconds_preprocessing=spread(self._ahead) if self._apart else None,
        )  # fmt: skip


def serve_named(config: PrivateConfig, party: int, transport: Transport, name: str, shape: list[int]) -> None:
    """One party in a process of its own, which makes the work again from its name and shape."""
    from bench.catalogue import make

    work = make(name, tuple(shape))
    if isinstance(work, Work):
        _guarded(work, config, party, transport)


def _guarded(work: Work, config: PrivateConfig, party: int, transport: Transport) -> None:
    """`serve`, whose end, however it comes, the others are told of."""
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


def send_weights(weights: Mapping[str, Tensor], config: PrivateConfig, transport: Transport) -> None:
    """As the model owner: one share of every weight to every party."""
    ring, seed = Ring(config.ring), Seed.fresh()
    for name, value in weights.items():
        for party, share in enumerate(deal(config, ring.encode(value, config.frac_bits), seed, name)):
            for part in share.parts:
                transport.send(party, "weight", part.contiguous())


def receive_weights(work: Work, session: Session, transport: Transport) -> Iterator[tuple[str, Fixed]]:
    """As a party: this party's shares of them."""
    for name, shape in work.weights.items():
        count = len(session.protocol.public(torch.zeros(1, dtype=session.ring.dtype)).parts)
        parts = [transport.recv(CLIENT, "weight", shape, session.ring.dtype) for _ in range(count)]
        yield name, Fixed(session, Share(tuple(parts)), session.frac)


def _open(transport: Transport, ends: Sequence[ClientEnd], ring: Ring, parties: int) -> Tensor:
    for party in range(parties):
        transport.send(party, CONTROL, torch.tensor([_STOP]))
    opened = []
    for end in ends:
        length = int(end.transport.recv(0, CONTROL, (1,), torch.int64))
        frac, *shape = end.transport.recv(0, CONTROL, (length,), torch.int64).tolist()
        opened.append(ring.decode(end.open(tuple(shape)), frac))
    return torch.cat(opened)
