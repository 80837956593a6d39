"""Every CPU kernel of ring products, and every way to spread one over threads, against plain torch, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from private_llm.kernels import matmul, ops, parallel
from private_llm.kernels.matmul import amx as cpu_amx
from private_llm.ring.ring import RING32, RING64, Ring
from tests.kernels import reference
from tests.kernels.cases import Case, Draw, listed_cases, matmul_cases, operation, run

CASES, LISTED = list(matmul_cases()), list(listed_cases())
SIZES = (
    (1, 1, 1), (1, 300, 40), (16, 16, 16), (17, 15, 33), (130, 257, 65), (5, 530, 16), (40, 31, 7), (20, 3, 40),
    (19, 517, 8), (263, 261, 21),
)  # fmt: skip
needs_tiles = pytest.mark.skipif(not cpu_amx.usable(), reason="this processor has no byte tiles (AMX)")


def expected(case: Case) -> list[Tensor]:
    return run(getattr(reference, case.op), case)


def made(case: Case) -> list[Tensor]:
    def pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor) -> Tensor:
        return matmul.product(x1, y1, matmul.product(x0, y0))

    return run(pair if case.op.endswith("pair") else matmul.product, case)


@pytest.fixture(params=(1, 3), ids="{}-threads".format)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Any amount of work is worth a thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(parallel, "LEAST_S", 1e-30)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_register_tiles(case: Case, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_amx, "usable", lambda: False)
    assert all(map(torch.equal, made(case), expected(case)))


@pytest.mark.parametrize(
    ("threads", "stacks", "rows", "wanted"),
    [
        (1, 1, 64, 1),
        (2, 1, 64, 2),
        (2, 1, 40, 2),
        (2, 1, 1, 2),
        (3, 1, 64, 3),
        (4, 2, 64, 8),
        (4, 3, 1, 3),
        (4, 9, 1, 4),
    ],
)
def test_every_thread_has_a_part(
    threads: int, stacks: int, rows: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[object] = []
    monkeypatch.setattr(parallel, "threads", lambda seconds: threads)
    monkeypatch.setattr(matmul, "launch", lambda *arguments: parts.append(arguments))
    matmul.product(torch.ones(stacks, rows, 96, dtype=torch.int64), torch.ones(stacks, 96, 64, dtype=torch.int64))
    assert len(parts) == wanted


@pytest.mark.parametrize("case", LISTED, ids=str)
def test_register_tiles_of_listed_rows(case: Case, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_amx, "usable", lambda: False)
    assert all(map(torch.equal, run(operation(case.op), case), expected(case)))


@pytest.mark.parametrize("op", ["ring_matmul_rows", "ring_matmul_lines"])
def test_listed_rows_are_read_where_they_lie(op: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a part of a wider matrix and strided lists; the listed rows are not copied."""
    monkeypatch.setattr(Tensor, "index_select", lambda *_: pytest.fail("copied"))
    draw = Draw("in place")
    y = draw.ring(RING64, 60, 300)[3:50:2, 7:203]
    assert not y.is_contiguous()
    listed = torch.arange(46)[::2]
    assert not listed.is_contiguous()
    listed %= 20
    x = draw.ring(RING64, 196 if op.endswith("rows") else 23, 3).mT
    assert torch.equal(getattr(ops, op)(x, y, listed), getattr(reference, op)(x, y, listed))


@needs_tiles
@pytest.mark.parametrize("case", CASES, ids=str)
def test_byte_tiles(case: Case, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "tiled", lambda *_: True)
    assert all(map(torch.equal, made(case), expected(case)))


@pytest.fixture(params=("registers", pytest.param("bytes", marks=needs_tiles)))
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of products: register tiles (of pairs where the processor suits them), or byte tiles."""
    if request.param == "bytes":
        monkeypatch.setattr(matmul, "tiled", lambda *_: True)
    else:
        monkeypatch.setattr(cpu_amx, "usable", lambda: False)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("ring", [RING64, RING32], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=("rows", "turned"))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_at_edges(size: tuple[int, int, int], turned: bool, ring: Ring) -> None:
    rows, inner, columns = size
    draw = Draw(f"edges {size}")
    x, y, onto = draw.ring(ring, rows, inner), draw.ring(ring, inner, columns), draw.ring(ring, rows, columns)
    y = y.mT.contiguous().mT if turned else y
    want = onto + reference.ring_matmul(x, y)
    assert torch.equal(matmul.product(x, y, onto), want)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("ring", [RING64, RING32], ids=str)
@pytest.mark.parametrize("fill", [-1, "least", 0x0101010101010101], ids=str)
def test_largest_sums(ring: Ring, fill: int | str) -> None:
    """Bytes of all ones make the largest sums: with too long blocks, those of the low bytes would wrap."""
    value = torch.iinfo(ring.dtype).min if fill == "least" else int(fill) & (2**31 - 1) if fill != -1 else -1
    x, y = (torch.full((17, 40000), value, dtype=ring.dtype) for _ in range(2))
    y[:, ::3] = -1
    for right in (y.mT, y.mT.contiguous()):
        assert torch.equal(matmul.product(x, right), reference.ring_matmul(x, right))


@pytest.mark.parametrize("ring", [RING64, RING32], ids=str)
def test_threads_of_one_process_do_not_share_scratch(ring: Ring) -> None:
    draw = Draw("side by side")
    pairs = [(draw.ring(ring, 40, 300), draw.ring(ring, 300, 70)) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda pair: [matmul.product(*pair) for _ in range(20)], pairs))
    for (x, y), found in zip(pairs, results, strict=True):
        want = reference.ring_matmul(x, y)
        assert all(torch.equal(one, want) for one in found)


def test_cuts_cover_everything_once_at_multiples() -> None:
    for total in (1, 5, 16, 17, 100):
        for pieces in (1, 2, 3, 8):
            for step in (1, 16):
                ranges = parallel.split_range(total, pieces, step)
                assert [i for first, last in ranges for i in range(first, last)] == list(range(total))
                assert len(ranges) <= pieces
                assert all(first % step == 0 and last > first for first, last in ranges)


def test_a_failing_piece_is_heard() -> None:
    def work(first: int, last: int) -> None:
        if first:
            raise ArithmeticError(f"{first} to {last}")

    with pytest.raises(ArithmeticError, match="2 to 4"):
        parallel.run_parallel(work, [(0, 2), (2, 4)])


def test_byte_tiles_are_refused_where_the_compiler_targets_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    find = cpu_amx.usable.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr("numba.config.CPU_NAME", "generic")
        assert find() is False
    with monkeypatch.context() as patch:
        patch.setattr("platform.machine", lambda: "aarch64")
        assert find() is False


def test_parties_and_lanes_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "usable_cores", lambda: 16)
    assert [parallel.threads_per_party(*case) for case in ((3, 1), (3, 4), (1, 1), (4, 9))] == [8, 2, 16, 1]
    assert [parallel.threads_per_node(alpha) for alpha in (1, 2, 3, 40)] == [16, 8, 5, 1]


def test_small_work_stays_on_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = [parallel.threads(seconds) for seconds in (0.0, parallel.LEAST_S, 2.5 * parallel.LEAST_S, 1.0)]
    finally:
        torch.set_num_threads(before)
    assert found == [1, 1, 2, 3]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("rows", "inner", "columns"), [(1, 64, 33), (3, 16, 16), (20, 40, 48), (1, 64, 80), (3, 128, 64)]
)
def test_matrices_that_lie_apart_are_read_where_they_lie(rows: int, inner: int, columns: int, turned: bool) -> None:
    """Entries of a cache in larger buffers, and one matrix for many."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(-(2**62), 2**62, (2, 3, rows, inner), generator=generator)
    for room in (0, 7):
        lines = (columns, inner) if turned else (inner, columns)
        buffer = torch.randint(-(2**62), 2**62, (2, 3, lines[0] + room, lines[1]), generator=generator)
        y = buffer[:, :, : lines[0]]
        assert matmul.matrix_step(y) == (lines[0] + room) * lines[1]
        y = y.mT if turned else y
        assert torch.equal(matmul.product(x, y), x @ y)
    alike = torch.randint(-(2**62), 2**62, (inner, columns), generator=generator).expand(2, 3, inner, columns)
    assert matmul.matrix_step(alike) == 0
    assert torch.equal(matmul.product(x, alike), x @ alike)
    assert matmul.matrix_step(buffer.transpose(0, 1)) is None
    assert matmul.matrix_step(buffer[..., 1:]) is None
