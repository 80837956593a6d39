"""The attention part of a decode step under a policy of the KV cache: counted on meta tensors, or run and timed.

A prompt is its last two queries, which attend to all of its keys; then the policy evicts and makes clusters as after
any prompt. Keys, values and queries are random. Layers that share choices run together, and figures are of one of them
on average.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scripts_folder  # noqa: F401 - finds `bench`
import torch
from bench.link import LinkSpeed, SlowMesh
from bench.rows import spread
from bench.work import warm_up

from private_llm.config import PrivateConfig
from private_llm.kernels.address import tune_allocator
from private_llm.kernels.parallel import threads_per_party
from private_llm.kv_cache.evicting import EvictingLayer
from private_llm.kv_cache.merged_heads import apart, merge_heads
from private_llm.kv_cache.policies.policy import CachePolicy
from private_llm.net.ledger import Cost
from private_llm.net.local import LocalMesh
from private_llm.net.transport import CLIENT
from private_llm.nn.attention import AttentionQuery, attend
from private_llm.protocols.session import Session, join, join_as_client, meta_session
from private_llm.protocols.share import Share
from private_llm.replay.program_cache import uncompiled_calls
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed

LAST_QUERIES = 2
WARM_UP_TOKENS = 128
Figures = tuple[float, float]
"""Bytes over all links, rounds."""


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention: query heads, key heads, elements of a head, tokens of the prompt."""

    heads: int
    groups: int
    depth: int
    tokens: int

    def inputs(self) -> list[tuple[int, ...]]:
        """Keys and values of the prompt, its last queries; query, key and value of the next token."""
        held, new = (1, self.groups, self.tokens, self.depth), (1, self.groups, 1, self.depth)
        return [held, held, (1, self.heads, LAST_QUERIES, self.depth), (1, self.heads, 1, self.depth), new, new]


@dataclass(frozen=True)
class Counted:
    """Of one layer: bytes over all links and rounds. A party's memory of the entries that it holds after the prompt.

    prompt: the last queries, eviction and clusters. steps: the tokens after it, one by one; now and then one makes the
    clusters that are full. ops: bytes of the first one by kind of exchange.
    """

    prompt: Figures
    steps: list[Figures]
    entries: int
    held_bytes: int
    ops: dict[str, float]

    @property
    def mean(self) -> Figures:
        """Of all steps."""
        return statistics.fmean(s[0] for s in self.steps), statistics.fmean(s[1] for s in self.steps)


class Layers:
    """Attention of neighbouring layers that choose together, at one party."""

    def __init__(self, policy: CachePolicy, shape: AttentionShape) -> None:
        self.policy, self.shape = policy, shape
        first = EvictingLayer(policy)
        self.each = [first, *(EvictingLayer(policy, first) for _ in range(policy.sharing.layers - 1))]

    def prompt(self, values: Sequence[Fixed]) -> None:
        """Cache a prompt and evict."""
        for layer in self.each:
            layer.buffer.append(values[0], values[1])
            self._attend(layer, values[2], self.shape.tokens)

    def step(self, values: Sequence[Fixed]) -> None:
        """The next token."""
        for layer in self.each:
            layer.buffer.append(values[4], values[5])
            self._attend(layer, values[3], 1)

    def _attend(self, layer: EvictingLayer, query: Fixed, queries: int) -> None:
        scale, merged = self.shape.depth**-0.5, self.policy.merged_heads
        if merged == 1:
            layer.attend(AttentionQuery(query, None, None, scale), queries)
            return
        keys, values = layer.buffer.keys, layer.buffer.values
        if keys is not None and values is not None:
            wide = merge_heads(query, keys, values, merged, scale)
            apart(attend(*wide[:3], None, wide[3]), merged, self.shape.heads // self.shape.groups)

    def held_bytes(self) -> int:
        """Keys and values of one layer, as shares."""
        held = (self.each[0].buffer.keys, self.each[0].buffer.values)
        parts = [part for x in held if x is not None for part in x.share.parts]
        return sum(part.numel() * part.element_size() for part in parts)


def counted(config: PrivateConfig, policy: CachePolicy, shape: AttentionShape, period: int = 32) -> Counted:
    """The costs, exactly, without computing anything."""
    made = []
    for number in range(config.parties):
        session = meta_session(config, number)
        values, layers = _empty(session, shape), Layers(policy, shape)
        ledger, costs, ops = session.protocol.ledger, list[Cost](), dict[str, int]()
        for place in range(period + 1):
            ledger.reset()
            layers.prompt(values) if place == 0 else layers.step(values)
            session.protocol.verify()
            session.checks.pending.clear()  # range checks are settled once a call of the whole model
            costs.append(ledger.cost())
            if place == 0:
                held, length = layers.held_bytes(), layers.each[0].buffer.length
            if place == 1:
                for (_, op, _), count in ledger.sent.items():
                    ops[op] = ops.get(op, 0) + count
        made.append((costs, ops))
    several = len(Layers(policy, shape).each)
    sums = [
        (sum(c[place].total for c, _ in made) / several, max(c[place].rounds for c, _ in made) / several)
        for place in range(period + 1)
    ]
    names = sorted({op for _, ops in made for op in ops})
    by_op = {op: sum(ops.get(op, 0) for _, ops in made) / several for op in names}
    return Counted(sums[0], sums[1:], length, held, by_op)


def _empty(session: Session, shape: AttentionShape) -> list[Fixed]:
    count = len(session.protocol.public(torch.zeros(1, dtype=session.ring.dtype, device="meta")).parts)

    def one(size: tuple[int, ...]) -> Fixed:
        part = torch.empty(size, dtype=session.ring.dtype, device="meta")
        return Fixed(session, Share((part,) * count), session.frac)

    return [one(size) for size in shape.inputs()]


@dataclass(frozen=True)
class Timed:
    """Of one layer under one policy: seconds of the prompt (last queries, eviction, clusters), of a step (spread over
    the repetitions; processor: those of the processor, all parties together) and of the first step, which begins to
    record, and what the ledgers booked of the prompt and of each step, those before the repetitions included.
    """

    prompt_seconds: float
    seconds: dict[str, float]
    processor: dict[str, float]
    first_seconds: float
    prompt: Figures
    steps: list[Figures]


def timed(
    config: PrivateConfig, policies: Sequence[CachePolicy], shape: AttentionShape, repeat: int,
    progress: Callable[[], None] = lambda: None, speed: LinkSpeed | None = None,
) -> list[Timed]:  # fmt: skip
    """Prompts, then steps of all policies in turns until none is recorded, and `repeat` timed ones; threads as parties.

    speed: of every link, if they are to be slower than memory.

    A run lasts from when all parties are ready until the last one is done. Raises what a party raised.
    """
    slow = None if speed is None else SlowMesh(config.parties, config.timeout_s, speed, instant="control")
    mesh = LocalMesh(config.parties, config.timeout_s) if slow is None else slow
    ready = threading.Barrier(config.parties)
    records: list[list[tuple[float, float, float, float, Cost]]] = [[] for _ in range(config.parties)]
    unsettled = [0] * config.parties
    failures: list[BaseException] = []

    def party(number: int) -> None:
        try:
            _serve(number)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)
            ready.abort()
            mesh.abort(f"party {number}: {error}")

    def _serve(number: int) -> None:
        tune_allocator()
        torch.set_num_threads(threads_per_party(config.parties))
        session = join(config, number, mesh.transport(number))
        shares = [session.protocol.receive_input(size) for size in shape.inputs()]
        values = [Fixed(session, share, session.frac) for share in shares]
        every = [Layers(policy, shape) for policy in policies]

        def run(what: Callable[[Sequence[Fixed]], None]) -> None:
            ready.wait()
            session.protocol.ledger.reset()
            started = time.perf_counter(), time.process_time()
            with torch.no_grad():
                what(values)
                session.protocol.verify()
            ended = time.perf_counter(), time.process_time()
            records[number].append((started[0], ended[0], started[1], ended[1], session.protocol.ledger.cost()))
            session.checks.pending.clear()

        for policy in policies:
            _warm_up(policy, shape, values)
        for layers in every:
            run(layers.prompt)

        def turn() -> float:
            for layers in every:
                run(layers.step)
            return 0.0

        def all_unsettled() -> int:
            unsettled[number] = uncompiled_calls(session)
            ready.wait()
            found = sum(unsettled)
            ready.wait()
            return found

        warm_up(turn, all_unsettled)
        for timed_turn in range(repeat + 1):
            if timed_turn:
                turn()
            if number == 0:
                progress()

    threads = [threading.Thread(target=party, args=(number,), daemon=True) for number in range(config.parties)]
    for thread in threads:
        thread.start()
    try:
        _share(config, mesh, shape)
    except Exception as error:  # noqa: BLE001 - raised again below
        failures.append(error)
        mesh.abort(f"the client: {error}")
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [_timed(records, place, len(policies), repeat, policy) for place, policy in enumerate(policies)]


def _warm_up(policy: CachePolicy, shape: AttentionShape, values: Sequence[Fixed]) -> None:
    """A short prompt and a token, which compile kernels."""
    short = min(shape.tokens, WARM_UP_TOKENS)
    few = [x.view(lambda part: part[:, :, :short]) for x in values]
    layers = Layers(policy, replace(shape, tokens=short))
    with torch.no_grad():
        layers.prompt(few)
        layers.step(few)
    values[0].session.checks.pending.clear()


def _share(config: PrivateConfig, mesh: LocalMesh, shape: AttentionShape) -> None:
    """As the client: random keys, values and queries, never zeros."""
    end, random, ring = join_as_client(config, mesh.transport(CLIENT)), np.random.default_rng(1), Ring(config.ring)
    for size in shape.inputs():
        end.share(ring.encode(torch.from_numpy(random.normal(0.0, 1.0, size)), config.frac_bits))


def _timed(records: Any, place: int, count: int, repeat: int, policy: CachePolicy) -> Timed:  # noqa: ANN401
    several = policy.sharing.layers

    def run(index: int) -> tuple[float, float, Figures]:
        rows = [party[index] for party in records]
        seconds, processor = (max(row[at + 1] for row in rows) - min(row[at] for row in rows) for at in (0, 2))
        total = sum(row[4].total for row in rows) / several
        return seconds / several, processor / several, (total, max(row[4].rounds for row in rows) / several)

    prompt = run(place)
    steps = [run(count * turn + place) for turn in range(1, len(records[0]) // count)]
    seconds, processor = spread([step[0] for step in steps[-repeat:]]), spread([step[1] for step in steps[-repeat:]])
    return Timed(prompt[0], seconds, processor, steps[0][0], prompt[2], [cost for _, _, cost in steps])
