"""Numba, Triton and the shape functions against the plain torch reference, bit for bit."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels import ops
from private_llm.ring.ring import RING32, RING64, Ring
from tests.kernels import reference
from tests.kernels.cases import ALL, Case, Draw, expected, operation, run

FAMILIES = {"ring": "matmul", "transpose": "bits", "block": "bits", "join": "bits", "inject": "bits"}
FAMILIES |= {"trunc": "fields", "pack": "fields", "unpack": "fields", "chacha20": "prg"}


def same(made: list[Tensor], want: list[Tensor]) -> None:
    assert len(made) == len(want)
    for a, b in zip(made, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("case", ALL, ids=str)
def test_cpu_kernel_equals_the_reference(case: Case, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("private_llm.kernels.parallel.threads", lambda seconds: threads)
    monkeypatch.setattr("private_llm.kernels.parallel._SMALL_S", 0.0)
    same(run(operation(case.op), case), expected(case))


def interpreted(case: Case) -> Any:
    """The Triton kernel behind `ops.<op>`, called as ops calls it, but on CPU tensors."""
    family = "conv" if case.op.startswith("ring_conv2d") else FAMILIES[case.op.split("_")[0]]
    module = importlib.import_module(f"private_llm.kernels.{family}.triton")
    listed = "_rows" in case.op or "_lines" in case.op

    def product(*arguments: Any, onto: Any = ()) -> Any:
        if listed:
            return module.listed_product(*arguments, "_rows" in case.op, *onto)
        return module.product(*arguments, *onto)

    def pair(x0: Tensor, y0: Tensor, x1: Tensor, y1: Tensor, *how: Any) -> Any:
        return product(x1, y1, *how, onto=[product(x0, y0, *how)])

    def into_results(*arguments: Any) -> Any:
        shapes = operation(case.op)(*(x.to("meta") if isinstance(x, Tensor) else x for x in arguments))
        made = [torch.zeros(x.shape, dtype=x.dtype) for x in ([shapes] if isinstance(shapes, Tensor) else shapes)]
        given = [arguments[0], arguments[2]] if case.op == "unpack_fields" else arguments
        getattr(module, case.op)(*given, *made)
        return made

    if case.op.startswith("ring_"):
        return pair if case.op.endswith("pair") else product

    def changed(*arguments: Any) -> None:
        operands = [x for x in arguments[:-1] if isinstance(x, Tensor)]
        plan = [x for x in arguments[:-1] if not isinstance(x, Tensor)]
        getattr(module, case.op)(*operands, *plan, arguments[-1])

    return changed if case.changes else into_results


@pytest.mark.sampled(32)
@pytest.mark.parametrize("case", [case for case in ALL if case.op != "gather_rows"], ids=str)
def test_triton_kernel_equals_the_reference(case: Case) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        same(run(operation(case.op), case, "cuda"), expected(case))
    else:
        same(run(interpreted(case), case), expected(case))


def triton_module(name: str) -> Any:
    pytest.importorskip("triton")
    return importlib.import_module(f"private_llm.kernels.{name}")


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def test_accumulators_of_digit_products_are_added_up_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per k at most LIMBS products of magnitude 2^14 reach one int32; chunks are exercised with a shorter one."""
    convolution = triton_module("conv.triton")
    assert 8 * 2**14 * convolution.CHUNK < 2**31
    assert all(convolution.CHUNK % tile.inner == 0 for tile in convolution.TUNER.tiles)
    monkeypatch.setattr(convolution, "CHUNK", 64)
    images = Draw("chunks").ring(RING64, 2, 17, 3, 3)
    case = Case("ring_conv2d", "chunks", (images, images, (1, 1), (1, 1), (1, 1), 1))
    same(run(convolution.product, case, device()), expected(case))


def test_sums_of_planes_are_added_up_before_they_overflow() -> None:
    """At most LIMBS products of magnitude 2^14 meet per k."""
    planes = triton_module("matmul.planes")
    assert 8 * 2**14 * planes.CHUNK < 2**31
    assert planes.CHUNK % planes.STEP == 0
    assert all(planes.STEP % tile.inner == 0 for tile in planes.TUNER.tiles)


@pytest.mark.full
@pytest.mark.parametrize("ring", [RING64, RING32], ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 5, 7), (2, 70, 150, 33), (1, 130, 9, 20)], ids=str)
def test_products_of_planes(shape: tuple[int, ...], ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of the rows and of K, from operands of any strides, and added to what is there."""
    planes = triton_module("matmul.planes")
    (batch, rows, inner, columns), tiles = shape, planes.TUNER.tiles
    draw = Draw("planes")
    x, y = draw.ring(ring, batch, rows, inner), draw.ring(ring, batch, inner, columns)
    want = reference.ring_matmul(x, y)
    monkeypatch.setattr(planes, "TUNER", type(planes.TUNER)([tiles[0]]))
    for chunk, sums, most in ((planes.CHUNK, planes.SUMS, planes.BYTES), (128, 1 << 13, 1)):
        monkeypatch.setattr(planes, "CHUNK", chunk)
        monkeypatch.setattr(planes, "SUMS", sums)
        monkeypatch.setattr(planes, "BYTES", most)
        for right in (y, y.mT.contiguous().mT):
            made = torch.full_like(want, 7, device=device())
            planes.add_product(x.to(device()), right.to(device()), made, False)
            assert torch.equal(made.cpu(), want)
            planes.add_product(x.to(device()), right.to(device()), made, True)
            assert torch.equal(made.cpu(), 2 * want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 33, 70), (8, 130, 5), (9, 150, 40), (40, 7, 3)])
@pytest.mark.parametrize("bits", [16, 8])
def test_products_with_narrow_weights(
    rows: int, inner: int, columns: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Modulo 2^40 or 2^32, in whole planes and in pieces of some lines of the weight."""
    planes, matmul, draw = triton_module("matmul.planes"), triton_module("matmul.triton"), Draw("narrow")
    most, kind, shift = (32640, torch.int16, 24) if bits == 16 else (128, torch.int8, 32)
    x, weight = draw.ring(RING64, rows, inner), (draw.ring(RING64, columns, inner) % (2 * most) - most).to(kind)
    weight[0], weight[-1] = -1 << (bits - 1), most - 1
    want = reference.ring_matmul(x, weight.long().mT) << shift
    for most in (planes.BYTES, 4 * inner):
        monkeypatch.setattr(planes, "BYTES", most)
        made = matmul.narrow(x.to(device()), weight.to(device())).cpu()
        assert torch.equal(made << shift, want)


@pytest.mark.parametrize("rows", [2, 9])
def test_more_matrices_than_a_call_takes(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul, draw = triton_module("matmul.triton"), Draw("stacks")
    x, y = draw.ring(RING64, 5, rows, 7), draw.ring(RING64, 5, 7, 6)
    monkeypatch.setattr(matmul, "MOST_STACKED", 2)
    same(run(matmul.product, Case("ring_matmul", "stacks", (x, y)), device()), [reference.ring_matmul(x, y)])


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_every_tile_of_few_rows_gives_the_same_result(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows = triton_module("matmul.triton")
    draw = Draw("few rows")
    x, y = draw.ring(RING64, rows, 300).to(device()), draw.ring(RING64, 300, 67).to(device())
    want = reference.ring_matmul(x.cpu(), y.cpu())
    for tile in few_rows.TUNER.tiles:
        monkeypatch.setattr(few_rows, "TUNER", type(few_rows.TUNER)([tile]))
        made = torch.ones_like(want, device=device())
        few_rows.add_product(x[None], y[None], made[None])
        assert torch.equal(made.cpu(), want + 1)


@pytest.mark.parametrize(("name", "count"), [("matmul.planes", 5), ("conv.triton", 3)])
def test_every_tile_gives_the_same_result(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module, draw = triton_module(name), Draw("tiles")
    tiles = module.TUNER.tiles
    assert len(tiles) == count
    for tile in tiles:
        monkeypatch.setattr(module, "TUNER", type(module.TUNER)([tile]))
        if name == "conv.triton":
            images, w = draw.ring(RING32, 2, 2, 5, 4), draw.ring(RING32, 3, 2, 2, 3)
            case = Case("ring_conv2d", "tiles", (images, w, (1, 1), (1, 1), (1, 1), 1))
            same(run(module.product, case, device()), expected(case))
        else:
            case = Case("ring_matmul", "tiles", (draw.ring(RING32, 18, 33), draw.ring(RING32, 33, 67)))
            same(run(triton_module("matmul.triton").product, case, device()), expected(case))


@pytest.mark.parametrize("case", ALL, ids=str)
def test_meta_tensors_get_the_shapes_of_the_results(case: Case) -> None:
    arguments = [a.to("meta") if isinstance(a, Tensor) else a for a in case.arguments]
    made = operation(case.op)(*arguments)
    if case.changes:
        assert made is None
    else:
        made = [made] if isinstance(made, Tensor) else made
        assert [(t.shape, t.dtype, t.device.type) for t in made] == [(t.shape, t.dtype, "meta") for t in expected(case)]


def test_a_device_without_kernels_is_named() -> None:
    x = Draw("device").ring(RING64, 2, 2)
    with pytest.raises(UnsupportedOp, match="meta"):
        ops.ring_matmul(x, x.to("meta"))
    with pytest.raises(UnsupportedOp, match="one device"):
        ops.trunc_open(x.view(4), x.view(4).to("meta"), x.view(4), x.view(4), 18, 18)


@pytest.mark.parametrize("f", [1, 13, 37, 63])
@pytest.mark.parametrize("n", [0, 1, 512, 700])
def test_packed_fields_come_back(n: int, f: int) -> None:
    values = Draw("fields").ring(RING64, n)
    words = ops.pack_fields(values, f)
    assert words.numel() == -(-n * f // 64)
    assert torch.equal(ops.unpack_fields(words, n, f), values & ((1 << f) - 1))


def test_fields_that_cannot_be_are_refused() -> None:
    values = Draw("fields").ring(RING64, 8)
    for f in (0, 64):
        with pytest.raises(DomainError, match="1 to 63"):
            ops.pack_fields(values, f)
    with pytest.raises(DomainError, match="int64"):
        ops.pack_fields(values.int(), 3)
    with pytest.raises(DomainError, match="want 1 int64 for 8 of 7 bits"):
        ops.unpack_fields(values, 8, 7)


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [((2, 3), (4, 2), "want"), ((3,), (3, 2), "want"), ((2, 3), (3,), "want")],
)
def test_products_that_do_not_fit_are_refused(left: tuple[int, ...], right: tuple[int, ...], message: str) -> None:
    draw = Draw("refused")
    with pytest.raises(DomainError, match=message):
        ops.ring_matmul(draw.ring(RING64, *left), draw.ring(RING64, *right))


def test_products_of_floats_and_unequal_pairs_are_refused() -> None:
    x = Draw("floats").ring(RING64, 2, 2)
    with pytest.raises(DomainError, match="float32"):
        ops.ring_matmul(x.float(), x.float())
    with pytest.raises(DomainError, match="one shape"):
        ops.ring_matmul_pair(x, x, x[:1], x)


@pytest.mark.parametrize("index", [[3], [-1, 0]])
def test_rows_that_are_not_there_are_refused(index: list[int]) -> None:
    with pytest.raises(DomainError, match=r"outside 0 \.\. 2"):
        ops.gather_rows(Draw("rows").ring(RING64, 3, 2), torch.tensor(index))


@pytest.mark.parametrize("op", ["ring_matmul_rows", "ring_matmul_lines"])
@pytest.mark.parametrize("ring", [RING64, RING32], ids=str)
def test_products_with_rows_that_are_not_there_are_refused(op: str, ring: Ring) -> None:
    draw = Draw("absent")
    x, y = draw.ring(ring, 1, 2), draw.ring(ring, 3, 2)
    for index in ([3, 0], [0, -1], [2**62, 1], [-(2**63), 1]):
        listed = torch.tensor(index)
        with pytest.raises(DomainError, match=r"outside 0 \.\. 2"):
            getattr(ops, op)(x, y, listed)
        with pytest.raises(DomainError, match=r"outside 0 \.\. 2"):
            getattr(ops, op)(x, y.mT.contiguous().mT, listed)
        with pytest.raises(DomainError, match=r"outside 0 \.\. 2"):
            operation(f"{op}_pair")(x, y, x, y, listed)
    with pytest.raises(DomainError, match=r"outside 0 \.\. -1"):
        getattr(ops, op)(x, y[:0], torch.tensor([0, 0]))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("op", ["ring_matmul_rows", "ring_matmul_lines"])
def test_listed_products_that_do_not_fit_are_refused(op: str, device: str) -> None:
    x, y = (torch.zeros(shape, dtype=torch.int64, device=device) for shape in ((1, 2), (3, 2)))
    two = torch.tensor([0, 1])
    call = getattr(ops, op)
    for wrong in ((x[0], y, two), (x, y[0], two), (x[:, :1], y, two), (x, y, two.int()), (x, y, two.view(1, 2))):
        with pytest.raises(DomainError, match="want \\[M, "):
            call(*wrong)
    with pytest.raises(DomainError, match="int32; want"):
        call(x, y.int(), two)
    with pytest.raises(DomainError, match="one shape"):
        operation(f"{op}_pair")(x, y, x, y[:2], two)


def test_rows_of_other_shapes_are_refused() -> None:
    table = Draw("rows").ring(RING64, 3, 2)
    for wrong in (torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)):
        with pytest.raises(DomainError, match="want"):
            ops.gather_rows(table, wrong)


def test_keys_counters_and_results_of_other_shapes_are_refused() -> None:
    key, counter, out = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.zeros(16)
    for wrong in ((key[:4], counter, 0, out.int()), (key, counter.int(), 0, out.int()), (key, counter, 0, out)):
        with pytest.raises(DomainError, match="want"):
            ops.chacha20(*wrong)
    with pytest.raises(DomainError, match="whole blocks"):
        ops.chacha20(key, counter, 0, out[:15].int())


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("n", [1, 511, 513, 5000])
@pytest.mark.parametrize("ring", [RING32, RING64], ids=str)
def test_threads_share_the_words_of_a_transposition(
    threads: int, n: int, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("private_llm.kernels.parallel.threads", lambda seconds: threads)
    monkeypatch.setattr("private_llm.kernels.parallel._SMALL_S", 0.0)
    x = Draw("threads").ring(ring, n)
    assert torch.equal(ops.transpose_bits(x, ring.bits - 1), reference.transpose_bits(x, ring.bits - 1))
