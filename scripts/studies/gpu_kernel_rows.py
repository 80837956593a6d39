"""Rows of bench_gpu.py about single kernels: ring products, convolutions, and kernels that move memory.

A ring product is compared with two other ways to compute it on a GPU (four 16-bit limbs in float64 matrix products;
plain int64 multiplications) and with what `torch._int_mm` reaches at the same size, divided by the 36 (64 bits) or 10
(32 bits) digit products that the ring needs. TMAC/s are 10^12 multiply-adds a second.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_timing import GPU
from torch import Tensor

from private_llm.kernels.bits import triton as triton_bits
from private_llm.kernels.conv import triton as triton_conv
from private_llm.kernels.matmul import planes as triton_planes
from private_llm.kernels.matmul import seeded_triton as triton_seeded
from private_llm.kernels.matmul import triton as triton_matmul
from private_llm.kernels.prg import triton as triton_prg
from private_llm.ring.prg import Seed
from private_llm.ring.ring import RING32, RING64, Ring

DEVICE = "cuda" if GPU else "cpu"
SHAPES = ((128, 768, 3072), (1024, 1024, 1024), (4096, 4096, 4096), (1, 4096, 4096))
CONVOLUTIONS = (
    ((16, 64, 32, 32), (64, 64, 3, 3)),
    ((16, 512, 4, 4), (512, 512, 3, 3)),
    ((16, 3, 224, 224), (64, 3, 7, 7)),
)


def draw(ring: Ring, *shape: int) -> Tensor:
    """Uniform ring elements on the device."""
    return Seed(bytes(32)).stream("bench").elements(torch.Size(shape).numel(), ring).view(shape).to(DEVICE)


def seconds(run: Callable[[], object]) -> float | None:
    """Median time of one call; nothing is timed without a GPU, but the call is made."""
    if not GPU:
        run()
        return None
    return float(triton.testing.do_bench(run, quantiles=[0.5])) / 1e3


def rate(count: float, taken: float | None) -> float | None:
    """10^12 per second."""
    return None if taken is None else round(count / taken / 1e12, 3)


# -- other ways to multiply -------------------------------------------------------------------------------------
def by_float64(x: Tensor, y: Tensor) -> Tensor:
    """Limbs of 16 bits; a product of limbs summed over K < 2^21 terms is exact in float64."""
    bits = x.element_size() * 8
    left, right = ([((v >> at) & 0xFFFF).double() for at in range(0, bits, 16)] for v in (x, y))
    out = torch.zeros(x.shape[0], y.shape[1], dtype=torch.int64, device=x.device)
    for i, a in enumerate(left):
        for j, b in enumerate(right[: len(left) - i]):
            out += (a @ b).long() << (16 * (i + j))
    return out.to(x.dtype)


@triton.jit
def int64_kernel(x, y, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """out [M, N] = x [M, K] y [K, N] by integer multiplications."""
    o_m, o_n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    b_out = tl.zeros((BM, BN), dtype=out.dtype.element_ty)
    for i_k in range(0, K, BK):
        o_k = i_k + tl.arange(0, BK)
        b_x = tl.load(x + o_m[:, None] * K + o_k[None, :], mask=(o_m < M)[:, None] & (o_k < K)[None, :], other=0)
        b_y = tl.load(y + o_k[:, None] * N + o_n[None, :], mask=(o_k < K)[:, None] & (o_n < N)[None, :], other=0)
        b_out += tl.sum(b_x[:, :, None] * b_y[None, :, :], axis=1)
    tl.store(out + o_m[:, None] * N + o_n[None, :], b_out, mask=(o_m < M)[:, None] & (o_n < N)[None, :])


def by_int64(x: Tensor, y: Tensor) -> Tensor:
    """What a GPU does without limbs."""
    out = x.new_empty(x.shape[0], y.shape[1])
    grid = (triton.cdiv(x.shape[0], 32), triton.cdiv(y.shape[1], 32))
    int64_kernel[grid](x, y, out, x.shape[0], y.shape[1], x.shape[1], BM=32, BN=32, BK=8)
    return out


# -- rows -------------------------------------------------------------------------------------------------------
def products(tiny: bool) -> Iterator[dict[str, Any]]:
    """Ring products three ways, all of them equal."""
    for ring in (RING64, RING32):
        for m, k, n in ((3, 17, 5),) if tiny else SHAPES:
            x, y = draw(ring, m, k), draw(ring, k, n)
            want = triton_matmul.product(x, y)
            if not (torch.equal(by_float64(x, y), want) and torch.equal(by_int64(x, y), want)):
                raise SystemExit(f"ring products of {m} x {k} x {n} in {ring.bits} bits differ")
            if tiny and not torch.equal(want.cpu(), x.cpu() @ y.cpu()):
                raise SystemExit("the ring product differs from PyTorch's on the CPU")
            macs = m * k * n
            found = {
                "tmac_per_s": rate(macs, seconds(lambda x=x, y=y: triton_matmul.product(x, y))),
                "tmac_per_s_planes": _planes(x, y, macs),
                "float64_limbs_tmac_per_s": rate(macs, seconds(lambda x=x, y=y: by_float64(x, y))),
                "int64_tmac_per_s": rate(macs, seconds(lambda x=x, y=y: by_int64(x, y))),
            }
            if GPU and m > 16:  # what torch._int_mm takes
                a, b = x.to(torch.int8), y.to(torch.int8).t().contiguous().t()
                peak = macs / (seconds(lambda a=a, b=b: torch._int_mm(a, b)) or 1.0) / 1e12
                found["int8_peak_tmac_per_s"] = round(peak / (36 if ring.bits == 64 else 10), 3)
            yield {"name": "ring-matmul", "ring": ring.bits, "shape": [m, k, n], **found}


def seeded(tiny: bool) -> Iterator[dict[str, Any]]:
    """Products with a weight whose mask is made: bytes of the mask a second, alone and beside a matrix in memory.

    A row, turned as models have it or not; and taking the mask apart into digit planes, as for many rows.
    """
    size = 20 if tiny else 4096
    for turned in (True, False):
        stream = Seed(bytes(32), "chacha20").drawn("mask", (size, size), RING64).to(DEVICE)
        x, z, held = draw(RING64, 1, size), draw(RING64, 1, size), draw(RING64, size, size)
        mask, y = (stream.mT, held.mT) if turned else (stream, held)
        whole = triton_seeded.made(mask)
        if not torch.equal(triton_matmul.pair(x, mask, z, y), triton_matmul.pair(x, whole, z, y)):
            raise SystemExit("a product with a mask that is made differs from that with the same mask in memory")
        if not torch.equal(triton_seeded.take_apart(mask, 0, size), triton_planes.take_apart(whole.mT[None])):
            raise SystemExit("digits of a mask that is made differ from those of the same mask in memory")
        made = 8 * size * size
        yield {
            "name": "seeded-matmul",
            "shape": [1, size, size],
            "turned": turned,
            "tb_per_s": rate(made, seconds(lambda x=x, mask=mask: triton_matmul.product(x, mask))),
            "tb_per_s_beside_memory": rate(made, seconds(lambda x=x, m=mask, z=z, y=y: triton_matmul.pair(x, m, z, y))),
            "tb_per_s_taken_apart": rate(made, seconds(lambda mask=mask: triton_seeded.take_apart(mask, 0, size))),
            "tb_per_s_in_memory": rate(made, seconds(lambda x=x, whole=whole: triton_matmul.product(x, whole))),
        }


def narrow(tiny: bool) -> Iterator[dict[str, Any]]:
    """Products with 16-bit weights, as servers of 'assisted' make them: bytes of the weight a second, and products."""
    inner, columns = (17, 5) if tiny else (4096, 14336)
    weight = (draw(RING64, columns, inner) % 65280 - 32640).to(torch.int16)
    for rows in (1, 8, 128):
        x = draw(RING64, rows, inner)
        if not torch.equal(triton_matmul.narrow(x, weight) << 24, triton_matmul.product(x, weight.long().mT) << 24):
            raise SystemExit(f"products of {rows} rows with 16-bit weights differ from ring products")
        taken = seconds(lambda x=x: triton_matmul.narrow(x, weight))
        yield {
            "name": "narrow-matmul",
            "shape": [rows, inner, columns],
            "tb_per_s": rate(2 * weight.numel(), taken),
            "tmac_per_s": rate(rows * weight.numel(), taken),
        }


def _planes(x: Tensor, y: Tensor, macs: int) -> float | None:
    """The same where both operands lie in planes already."""
    left, right = triton_planes.take_apart(x[None]), triton_planes.take_apart(y.mT[None])
    out = torch.empty((1, x.shape[0], y.shape[1]), dtype=x.dtype, device=x.device)
    return rate(macs, seconds(lambda: triton_planes.product_of_planes(left, right, out, False)))


def convolutions(tiny: bool) -> Iterator[dict[str, Any]]:
    """3 x 3 layers of VGG-16 and the first layer of a ResNet."""
    for ring in (RING64, RING32):
        for images, kernels in (((1, 2, 4, 4), (3, 2, 3, 3)),) if tiny else CONVOLUTIONS:
            x, w = draw(ring, *images), draw(ring, *kernels)
            how = ((1, 1), (kernels[2] // 2,) * 2, (1, 1), 1)
            made = triton_conv.product(x, w, *how)
            macs = made.numel() * w[0].numel()
            taken = seconds(lambda x=x, w=w, how=how: triton_conv.product(x, w, *how))
            yield {
                "name": "ring-conv2d",
                "ring": ring.bits,
                "shape": [images, kernels],
                "tmac_per_s": rate(macs, taken),
            }


def streams(tiny: bool) -> Iterator[dict[str, Any]]:
    """Kernels that move memory, in bytes of their result."""
    count = 1 << (8 if tiny else 24)
    x, words = draw(RING64, count), torch.empty(64, count // 64, dtype=torch.int64, device=DEVICE)
    taken = seconds(lambda: triton_bits.transpose_bits(x, 64, words))
    yield {"name": "transpose-bits", "elements": count, "tb_per_s": rate(8 * count, taken)}
    key, counter, out = draw(RING32, 8), draw(RING64, 1), torch.empty(2 * count, dtype=torch.int32, device=DEVICE)
    taken = seconds(lambda: triton_prg.chacha20(key, counter, 0, out))
    yield {"name": "chacha20", "elements": count, "tb_per_s": rate(8 * count, taken)}
