"""Local kernels on one core, without parties: what the steps of a protocol cost before anything is sent.

python scripts/studies/bench_kernels.py          all kernels, both rings, on one core and on all
python scripts/studies/bench_kernels.py --json   one row each
python scripts/studies/bench_kernels.py --tiny   smallest shapes: does everything run?

Times are processor time of the measuring thread, so that other work on the machine disturbs them little; but those on
all cores by the clock, in turns with one core. Products of listed rows of a weight take turns with the product of the
whole weight, products with a mask that is made from its key stream with those of the mask in memory.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

import numpy as np
import scripts_folder  # noqa: F401 - finds `bench`
import torch
from bench.rows import machine, provenance, spread
from bench.table_options import Repeat, Tiny, new_app, run_app
from private_llm_cli.commands.output import duration, emit_json, emit_table, progress_bar
from private_llm_cli.options import Json
from torch import Tensor

from private_llm.kernels import matmul, ops, steps
from private_llm.kernels.address import tune_allocator
from private_llm.kernels.matmul import amx as cpu_amx
from private_llm.kernels.matmul import cpu as cpu_matmul
from private_llm.kernels.parallel import addresses, split_range, usable_cores
from private_llm.protocols.carry import carry_plan
from private_llm.replay.program import Arena, ArenaAddress, Memory, Operand, Parallel, Program, ProgramStep
from private_llm.replay.transports import ReplayTransport, Trace
from private_llm.ring.prg import Prg, Seed
from private_llm.ring.ring import RING32, RING64, Ring


@dataclass(frozen=True)
class KernelRow:
    """One kernel at one shape. rate: of `unit` in a second, by the fastest run. note: which of several kernels.

    speedup: where several threads work, how many times as fast as one in the same run, fastest runs of both.
    over_dense: of a product of listed rows, or with a mask that is made, how many times as fast as with all rows in
    memory in the same run, by medians.
    """

    name: str
    note: str
    ring: int
    shape: tuple[int, ...]
    seconds: dict[str, float]
    rate: float
    unit: str
    threads: int
    speedup: float | None = None
    over_dense: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The row with the machine and the versions it was taken with."""
        return {**asdict(self), **provenance()}


@dataclass(frozen=True)
class _Job:
    """run: one call. work: how much it does of `unit` (G: 10^9). threads: that it may use. dense: to compare with."""

    name: str
    note: str
    ring: int
    shape: tuple[int, ...]
    run: Callable[[], object]
    work: float
    unit: str
    threads: int = 1
    dense: Callable[[], object] | None = None


_PRODUCTS = ((128, 128, 128), (128, 768, 3072), (16, 768, 3072), (1, 768, 3072))
_TINY_PRODUCTS = ((5, 20, 9),)
_WEIGHTS, _TINY_WEIGHTS = ((3072, 768), (8192, 2048)), ((70, 20),)
"""Neurons x width of the feed-forward layers of OPT-125M and OPT-1.3B."""
_DRAWN, _TINY_DRAWN = ((128, 2048, 8192), (1, 2048, 8192), (1, 768, 3072)), ((5, 20, 9),)
"""Feed-forward layers of OPT-1.3B and OPT-125M, a prompt and a token."""
_STEP, _TINY_STEP = (4096, 4096), (70, 20)
"""Neurons x width of a projection of LLaMA-7B."""
_PARTS = ((1, 1), (2, 1), (2, 32), (10, 1), (10, 32))
"""One in so many neurons is active, in blocks of so many neighbours."""
_TURNS = 8
"""Turns of a product of listed rows with the dense one, for each repetition."""
_IMAGE, _TINY_IMAGE = (16, 64, 32, 32), (1, 3, 5, 5)
"""Batch x channels x height x width, for 3 x 3 windows and as many output channels: VGG-16's second layer."""
_DRAWS = (64, 4096, 1 << 20, 1 << 26)
_ELEMENTS, _TINY = 1 << 20, 1000
_FRACTIONS = {64: 18, 32: 12}
_ENOUGH_S = 0.02
"""A timed run repeats short calls for this long."""


def measure_kernels(
    repeat: int = 5, tiny: bool = False, progress: Callable[[str], None] = lambda _: None,
    wanted: Callable[[str, str], bool] = lambda name, note: True,
) -> Iterator[KernelRow]:  # fmt: skip
    """Every job on one thread, many on all: `repeat` runs of 20 ms after a warm-up. wanted: of name and note."""
    tune_allocator()  # as a party does at its start
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for ring in (RING64, RING32):
            for job in (job for job in _jobs(ring, tiny) if wanted(job.name, job.note)):
                torch.set_num_threads(1)
                yield _measured(job, repeat, tiny)
                progress(job.name)
    finally:
        torch.set_num_threads(before)


def count(tiny: bool = False) -> int:
    """How many rows there will be."""
    return sum(1 for ring in (RING64, RING32) for _ in _jobs(ring, tiny))


def _in_turns(job: _Job, repeat: int) -> KernelRow:
    """A job on its threads and on one in turns, by the clock."""
    times: dict[int, list[float]] = {job.threads: [], 1: []}
    for number in range(4 * repeat + 1):
        for threads, found in times.items():
            torch.set_num_threads(threads)
            started = time.perf_counter()
            job.run()
            if number:  # the first pair warms up
                found.append(time.perf_counter() - started)
    many, one = times[job.threads], times[1]
    return KernelRow(
        job.name, job.note, job.ring, job.shape, spread(many), job.work / min(many), job.unit, job.threads,
        min(one) / min(many),
    )  # fmt: skip


def _beside_dense(job: _Job, dense: Callable[[], object], repeat: int, tiny: bool) -> KernelRow:
    """A job and its dense form in turns, each a few milliseconds long."""
    works = (job.run, dense)
    times: tuple[list[float], list[float]] = ([], [])
    counts = [1 if tiny else max(1, int(_ENOUGH_S / 4 / _timed(work, 2))) for work in works]
    for _ in range(_TURNS * repeat):
        for work, calls, found in zip(works, counts, times, strict=True):
            found.append(_timed(work, calls))
    mine, whole = (spread(found) for found in times)
    return KernelRow(
        job.name, job.note, job.ring, job.shape, mine, job.work / mine["min"], job.unit, 1, None,
        whole["median"] / mine["median"],
    )  # fmt: skip


def _timed(work: Callable[[], object], calls: int) -> float:
    """Processor time of a call, of `calls` in a row."""
    started = time.thread_time()
    for _ in range(calls):
        work()
    return max((time.thread_time() - started) / calls, 1e-7)


def _measured(job: _Job, repeat: int, tiny: bool) -> KernelRow:
    if job.threads > 1:
        return _in_turns(job, repeat)
    if job.dense is not None:
        return _beside_dense(job, job.dense, repeat, tiny)
    job.run()
    calls = 1 if tiny else max(1, int(_ENOUGH_S / _timed(job.run, 1)))
    times = [_timed(job.run, calls) for _ in range(repeat)]
    return KernelRow(job.name, job.note, job.ring, job.shape, spread(times), job.work / min(times), job.unit, 1)


def _jobs(ring: Ring, tiny: bool) -> Iterator[_Job]:
    stream = Seed(bytes(32)).stream("bench kernels")
    for shape in _TINY_PRODUCTS if tiny else _PRODUCTS:
        yield from _products(ring, shape, stream)
    for weight in _TINY_WEIGHTS if tiny else _WEIGHTS:
        yield from _listed(ring, weight, stream)
    for shape in _TINY_DRAWN if tiny else _DRAWN:
        yield _drawn(ring, shape, stream)
    if usable_cores() > 1 and ring.bits == 64:
        yield _team(_TINY_STEP if tiny else _STEP, stream)
    yield _convolution(ring, _TINY_IMAGE if tiny else _IMAGE, stream)
    n = _TINY if tiny else _ELEMENTS
    yield from _comparison(ring, n, stream)
    yield from _truncation(ring, n, stream)
    for size in (64,) if tiny else _DRAWS:
        items = size * 8 // ring.bits
        yield _Job("prg", "", ring.bits, (items,), _draw(stream, items, ring), size / 1e9, "GB/s")
    if usable_cores() > 1:
        yield _Job(
            "prg", "all cores", ring.bits, (items,), _draw(stream, items, ring), size / 1e9, "GB/s", usable_cores()
        )


def _draw(stream: Prg, items: int, ring: Ring) -> Callable[[], object]:
    return lambda: stream.elements(items, ring)


def _products(ring: Ring, shape: tuple[int, int, int], stream: Prg) -> Iterator[_Job]:
    """x [M, K] by the transpose of a weight [N, K] as a linear layer has it: the chosen kernel, and register tiles."""
    rows, inner, columns = shape
    x, w = stream.elements(rows * inner, ring).view(rows, inner), stream.elements(columns * inner, ring)
    w, out = w.view(columns, inner), torch.zeros(rows, columns, dtype=ring.dtype)
    zero = np.uint64(0) if ring.bits == 64 else np.uint32(0)
    work = rows * inner * columns / 1e9

    def registers() -> None:
        cpu_matmul.dot_product(*addresses(x, w, out), 1, rows, inner, columns, inner * columns, zero)

    if cpu_amx.usable() and matmul.tiled(rows, inner, columns, turned=True):
        yield _Job("matmul", "byte tiles", ring.bits, shape, lambda: matmul.product(x, w.mT, out), work, "GMAC/s")
    yield _Job("matmul", "register tiles", ring.bits, shape, registers, work, "GMAC/s")


def _drawn(ring: Ring, shape: tuple[int, int, int], stream: Prg) -> _Job:
    """x [M, K] by the transpose of a mask [N, K] that is made tile by tile, beside the same mask in memory."""
    rows, inner, columns = shape
    x, mask = stream.elements(rows * inner, ring).view(rows, inner), Seed(bytes(32)).drawn("w", (columns, inner), ring)
    held = mask.made()
    return _Job(
        "matmul-drawn", "mask from its seed", ring.bits, shape, lambda: ops.ring_matmul(x, mask.t()),
        rows * inner * columns / 1e9, "GMAC/s", dense=lambda: ops.ring_matmul(x, held.t()),
    )  # fmt: skip


def _team(shape: tuple[int, int], stream: Prg) -> _Job:
    """One row times the transpose of a weight [N, K] as a step of a program, in one piece or in one for each core."""
    columns, inner = shape
    x, w = stream.elements(inner, RING64), stream.elements(columns * inner, RING64)
    memory = Memory(8 * columns, -1, 1)
    whole = Operand(memory, 0, (columns,), (1,))

    def program(pieces: int) -> Program:
        made = []
        for first, last in split_range(columns, pieces, 8):
            weight, place = w.data_ptr() + 8 * first * inner, ArenaAddress(memory, 8 * first)
            row = (x.data_ptr(), weight, place, 1, 1, inner, last - first, 0)
            made.append((ProgramStep(steps.step_of(cpu_matmul.dot_product)[0], row),))
        return Program([Parallel(tuple(made))], [whole], [whole], [], [x, w])

    programs = {count: program(count) for count in (1, usable_cores())}
    arena, outside, zeros = Arena(), ReplayTransport(Trace()), torch.zeros(columns, dtype=torch.int64)
    return _Job(
        "step", "all cores", 64, (1, inner, columns),
        lambda: programs[torch.get_num_threads()].ready(outside, arena, [zeros], ())(None), columns * inner / 1e9,
        "GMAC/s",
        usable_cores(),
    )  # fmt: skip


def _listed(ring: Ring, shape: tuple[int, int], stream: Prg) -> Iterator[_Job]:
    """One row of x by the active neurons of a weight [neurons, width]; each call has others than the one before."""
    neurons, width = shape
    w = stream.elements(neurons * width, ring).view(shape)
    x, hidden = stream.elements(width, ring).view(1, width), stream.elements(neurons, ring).view(1, neurons)
    for part, block in _PARTS:
        count = neurons // block // part * block
        lists = cycle(_active(stream, neurons, part, block))
        note = f"{100 - 100 // part} % zero" + (f", blocks of {block}" if block > 1 else ", scattered" * (part > 1))
        factors, work = hidden[:, :count].contiguous(), count * width / 1e9

        def rows(lists: Iterator[Tensor] = lists) -> Tensor:
            return ops.ring_matmul_rows(x, w, next(lists))

        def lines(lists: Iterator[Tensor] = lists, factors: Tensor = factors) -> Tensor:
            return ops.ring_matmul_lines(factors, w, next(lists))

        for name, run, dense in (
            ("matmul-rows", rows, lambda: ops.ring_matmul(x, w.mT)),
            ("matmul-lines", lines, lambda: ops.ring_matmul(hidden, w)),
        ):
            yield _Job(name, note, ring.bits, (1, width, neurons), run, work, "GMAC/s", dense=dense)


def _active(stream: Prg, neurons: int, part: int, block: int) -> list[Tensor]:
    """`part` lists of equally many neurons, none in two: random blocks of neighbours, in order."""
    blocks = neurons // block
    found = stream.elements(blocks, RING64).argsort()[: blocks // part * part].view(part, -1).sort(-1).values
    return [(each.unsqueeze(-1) * block + torch.arange(block)).reshape(-1) for each in found]


def _convolution(ring: Ring, shape: tuple[int, int, int, int], stream: Prg) -> _Job:
    batch, channels, height, width = shape
    x = stream.elements(batch * channels * height * width, ring).view(shape)
    w = stream.elements(channels * channels * 9, ring).view(channels, channels, 3, 3)
    work = x.numel() * channels * 9 / 1e9
    return _Job(
        "conv2d", "3 x 3", ring.bits, shape, lambda: ops.ring_conv2d(x, w, (1, 1), (1, 1), (1, 1), 1), work, "GMAC/s"
    )


def _comparison(ring: Ring, n: int, stream: Prg) -> Iterator[_Job]:
    """The local steps of a sign bit of n elements, and of ReLU's product with it."""
    plan = carry_plan(ring.bits - 1)
    blocks, groups = np.array(plan.blocks), np.array(plan.levels[0])
    words = (n + 63) // 64

    def rows(count: int) -> Tensor:
        return stream.words(count * words).view(count, words)

    x, bits, mono = stream.elements(n, ring), rows(ring.bits), rows(plan.monomial_rows)
    pairs, made, products = rows(plan.block_rows), rows(plan.joined_rows[0]), rows(plan.product_rows[0])
    shares = stream.elements(2 * n, ring).view(2, n)
    sign, weighted, weight = rows(1), np.array([True]), torch.ones(1, 1, dtype=ring.dtype)
    out = torch.zeros(n, dtype=ring.dtype)
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        ("transpose_bits", lambda: ops.transpose_bits(x, ring.bits)),
        ("block_monomials", lambda: ops.block_monomials(bits, 0, blocks, mono)),
        ("block_carries", lambda: ops.block_carries(bits, 0, blocks, mono, True, pairs)),
        ("join_products", lambda: ops.join_products(pairs, groups, len(blocks), products)),
        ("join_carries", lambda: ops.join_carries(pairs, pairs, products, groups, len(blocks), True, made)),
        ("inject_products", lambda: ops.inject_products(sign, x, weighted, shares)),
        ("inject_terms", lambda: ops.inject_terms(sign, x, x, shares, weighted, weight, weight, True, out)),
    )
    yield from _alone_and_together(calls, ring, n)


def _truncation(ring: Ring, n: int, stream: Prg) -> Iterator[_Job]:
    """Both sides of the truncation of n products."""
    f = _FRACTIONS[ring.bits]
    error, one, two, mask = (stream.elements(n, ring) for _ in range(4))
    rho, zeta, other = (stream.words(ops.packed_words(n, f)) for _ in range(3))
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        ("trunc_helper", lambda: ops.trunc_helper(error, one, two, mask, rho, zeta, other, f, f)),
        ("trunc_open", lambda: ops.trunc_open(one, two, rho, zeta, f, f)),
        ("trunc_close", lambda: ops.trunc_close(one, rho, zeta, mask, other, f, f)),
    )
    yield from _alone_and_together(calls, ring, n)


def _alone_and_together(
    calls: Sequence[tuple[str, Callable[[], object]]], ring: Ring, n: int
) -> Iterator[_Job]:  # fmt: skip
    """Each call on one thread, and on all cores."""
    cores = usable_cores()
    for name, run in calls:
        yield _Job(name, "", ring.bits, (n,), run, n / 1e9, "G elements/s")
        if cores > 1:
            yield _Job(name, "all cores", ring.bits, (n,), run, n / 1e9, "G elements/s", cores)


app = new_app()


@app.command()
def main(as_json: Json = False, repeat: Repeat = 5, tiny: Tiny = False) -> None:
    """Local kernels on one core of this machine, both rings."""
    rows = []
    with progress_bar(count(tiny), quiet=as_json) as step:
        for row in measure_kernels(repeat, tiny, step):
            rows.append(row)
            if as_json:
                emit_json(row.to_dict())
    if not as_json:
        cells = [
            (
                f"{row.name}, {row.note}" if row.note else row.name, row.ring, "x".join(map(str, row.shape)),
                duration(row.seconds["median"]), duration(row.seconds["min"]), f"{row.rate:.2f} {row.unit}"
                + ("" if row.speedup is None else f", {row.speedup:.2f} x one thread")
                + ("" if row.over_dense is None else f", {row.over_dense:.2f} x dense"),
            )
            for row in rows
        ]  # fmt: skip
        headings = ("kernel", "ring", "shape", "median", "min", "rate")
        emit_table("local kernels, one thread", headings, cells, caption=machine())


if __name__ == "__main__":
    run_app(app)
