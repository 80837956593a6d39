"""Arguments for every kernel: odd sizes, both rings, and the extremes of the ring among the values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from private_llm.kernels import ops
from private_llm.protocols.carry import carry_plan
from private_llm.ring.prg import Seed
from private_llm.ring.ring import RING32, RING64, Ring
from tests.kernels import reference

RINGS = (RING64, RING32)


class Draw:
    """Reproducible tensors whose first elements are 0, -1, the least and the greatest ring element."""

    def __init__(self, label: str) -> None:
        self._stream = Seed(bytes(32)).stream(label)

    def ring(self, ring: Ring, *shape: int) -> Tensor:
        x = self._stream.elements(int(np.prod(shape)), ring)
        limits = torch.iinfo(ring.dtype)
        for place, value in enumerate((0, -1, limits.min, limits.max)):
            if place < x.numel():
                x[place] = value
        return x.view(shape)

    def words(self, *shape: int) -> Tensor:
        return self._stream.words(int(np.prod(shape))).view(shape)


@dataclass(frozen=True)
class Case:
    """A call of `ops.<op>`; `changed` is the argument that it changes, if any."""

    op: str
    note: str
    arguments: tuple[Any, ...]
    changes: bool = False

    def __str__(self) -> str:
        return f"{self.op}-{self.note}"


def operation(name: str) -> Any:
    """One of `ops`, or the sum of two products with it."""
    found = getattr(ops, name, None)
    return found or partial(ops.pair_of, getattr(ops, name.removesuffix("_pair")))


def run(function: Any, case: Case, device: str = "cpu") -> list[Tensor]:
    """Results and changed argument of one call on copies of the arguments, as CPU tensors."""
    arguments = [a.clone().to(device) if isinstance(a, Tensor) else a for a in case.arguments]
    out = function(*arguments)
    made = [arguments[-1]] if case.changes else [out] if isinstance(out, Tensor) else list(out)
    return [t.cpu() for t in made]


def matmul_cases() -> Iterator[Case]:
    shapes = (
        ((3, 5), (5, 4)), ((2, 9, 33), (33, 65)), ((2, 1, 4, 8), (3, 8, 5)), ((1, 67), (67, 3)), ((2, 0), (0, 3)),
        ((1, 40), (40, 170)), ((70, 540), (540, 21)),  # wide lines; more rows and steps than one block
        ((1, 21), (21, 515)), ((2, 1, 8), (2, 8, 600)), ((1, 7), (7, 512)),  # whole lines, eight at a time or fewer
    )  # fmt: skip
    for ring in RINGS:
        for left, right in shapes:
            draw = Draw(f"matmul {left}")
            x, y = draw.ring(ring, *left), draw.ring(ring, *right)
            note = f"{ring.bits}-{left}-{right}".replace(" ", "")
            yield Case("ring_matmul", note, (x, y))
            yield Case("ring_matmul", note + "-turned", (x, y.mT.contiguous().mT))
            yield Case("ring_matmul_pair", note, (x, y, draw.ring(ring, *left), draw.ring(ring, *right)))


def listed_cases() -> Iterator[Case]:
    """Rows of y [N, K] by number: unsorted, repeated, none, all, and runs; sizes beside those of tiles and blocks."""
    runs, many = [*range(40, 72), *range(8, 40)], list(range(600))
    layouts: tuple[tuple[int, int, int, list[int]], ...] = (
        (1, 5, 3, [2]), (3, 9, 4, [3, 0, 3]), (1, 67, 30, list(range(29, -1, -1))),
        (6, 33, 170, [169, 0, *range(9, 50)]),
        (1, 40, 80, runs), (70, 530, 21, [20, 1, 1, 7]), (17, 64, 75, runs), (1, 170, 33, [*range(0, 33, 2), 4, 32]),
        (2, 7, 5, []), (1, 0, 5, [1]), (0, 7, 5, [1]), (2, 3, 0, []), (1, 1, 1, [0, 0]), (14, 24, 700, many),
    )  # fmt: skip
    for ring in RINGS:
        for m, width, height, listed in layouts:
            draw, index = Draw(f"listed {m} {width}"), torch.tensor(listed, dtype=torch.int64)
            y, other = draw.ring(ring, height, width), draw.ring(ring, height, width)
            note = f"{ring.bits}-{m}-{height}x{width}-{len(listed)}"
            for op, inner in (("rows", width), ("lines", len(listed))):
                x = draw.ring(ring, m, inner)
                yield Case(f"ring_matmul_{op}", note, (x, y, index))
                yield Case(f"ring_matmul_{op}", note + "-turned", (x, y.mT.contiguous().mT, index))
                yield Case(f"ring_matmul_{op}_pair", note, (x, y, draw.ring(ring, m, inner), other, index))


def conv_cases() -> Iterator[Case]:
    layouts = (
        # x [B, C, H, W], w [O, C / groups, kh, kw], stride, padding, dilation, groups
        ((1, 1, 1, 1), (1, 1, 1, 1), (1, 1), (0, 0), (1, 1), 1),
        ((2, 3, 9, 7), (5, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1),
        ((1, 3, 19, 23), (7, 3, 5, 4), (2, 3), (2, 1), (1, 2), 1),
        ((2, 4, 5, 33), (6, 2, 3, 2), (1, 2), (0, 3), (2, 1), 2),
        ((3, 6, 7, 18), (6, 1, 3, 3), (1, 1), (1, 1), (1, 1), 6),
        ((1, 5, 11, 10), (10, 1, 3, 5), (2, 2), (1, 2), (1, 2), 5),
        ((2, 70, 4, 4), (9, 70, 1, 1), (1, 1), (0, 0), (1, 1), 1),
        ((1, 2, 3, 70), (1, 2, 3, 3), (1, 1), (4, 5), (1, 1), 1),  # windows that see padding only
        ((0, 2, 5, 5), (4, 2, 3, 3), (1, 1), (0, 0), (1, 1), 1),
    )
    for ring in RINGS:
        for left, right, *how in layouts:
            draw = Draw(f"conv {left}")
            x, w = draw.ring(ring, *left), draw.ring(ring, *right)
            note = f"{ring.bits}-{left}-{right}-{how[-1]}".replace(" ", "")
            yield Case("ring_conv2d", note, (x, w, *how))
            yield Case("ring_conv2d", note + "-turned", (x.mT.contiguous().mT, w.mT.contiguous().mT, *how))
            yield Case("ring_conv2d_pair", note, (x, w, draw.ring(ring, *left), draw.ring(ring, *right), *how))


def bit_cases() -> Iterator[Case]:
    for ring in RINGS:
        for n, rows in ((1, ring.bits), (63, 5), (1030, ring.bits)):
            yield Case("transpose_bits", f"{ring.bits}-{n}-{rows}", (Draw("bits").ring(ring, n), rows))
    yield from carry_cases()
    for ring in RINGS:
        for n, kinds in ((1, (True,)), (65, (True, False, True)), (520, (False, False))):
            yield from _inject_cases(ring, n, kinds)


def carry_cases() -> Iterator[Case]:
    """Plans with blocks and groups of every size."""
    for positions, words in ((1, 1), (2, 3), (5, 2), (13, 300), (63, 5)):
        plan, draw = carry_plan(positions), Draw(f"carry {positions}")
        blocks = np.array(plan.blocks)
        s, m = draw.words(positions + 1, words), draw.words(positions + 1, words)
        s[0], m[0], s[-1] = -1, -1, 0
        mono = draw.words(plan.monomial_rows, words)
        note = f"{positions}-{words}"
        yield Case("block_monomials", note, (s, 1, blocks, mono), changes=True)
        count, rows = len(plan.blocks), plan.block_rows
        for first in (True, False):
            yield Case("block_carries", f"{note}-{first}", (m, 1, blocks, mono, first, draw.words(rows, words)), True)
        for level, groups in enumerate(plan.levels):
            lam, b, prod = draw.words(rows, words), draw.words(rows, words), draw.words(plan.product_rows[level], words)
            sizes, note = np.array(groups), f"{positions}-{words}-{level}"
            yield Case("join_products", note, (lam, sizes, count, prod), changes=True)
            for first in (True, False):
                out = draw.words(plan.joined_rows[level], words)
                yield Case("join_carries", f"{note}-{first}", (b, lam, prod, sizes, count, first, out), changes=True)
            rows, count = plan.joined_rows[level], len(groups)


def _inject_cases(ring: Ring, n: int, kinds: tuple[bool, ...]) -> Iterator[Case]:
    draw, weighted, rows = Draw(f"inject {n}"), np.array(kinds), len(kinds)
    bits, extra = draw.words(rows, (n + 63) // 64), rows + sum(kinds)
    note = f"{ring.bits}-{n}"
    lam = draw.ring(ring, n if any(kinds) else 1)
    yield Case("inject_products", note, (bits, lam, weighted, draw.ring(ring, extra, n)), changes=True)
    m, mine, shares = draw.ring(ring, n), draw.ring(ring, n), draw.ring(ring, extra, n)
    for first, w_width, c_width in ((True, 1, n), (False, n, 1)):
        w, c, out = draw.ring(ring, rows, w_width), draw.ring(ring, rows, c_width), draw.ring(ring, n)
        yield Case("inject_terms", f"{note}-{first}", (bits, m, mine, shares, weighted, w, c, first, out), changes=True)


def trunc_cases() -> Iterator[Case]:
    for ring in RINGS:
        for n in (1, 511, 512, 1100):
            for f, width in ((1, 1), (18, 18), (18, 4), (ring.bits - 3, ring.bits - 3), (ring.bits - 3, 1)):
                draw, note = Draw(f"trunc {n} {f} {width}"), f"{ring.bits}-{n}-{f}-{width}"
                a, b, c, d = (draw.ring(ring, n) for _ in range(4))
                fields = [draw.words(ops.packed_words(n, width)) for _ in range(3)]
                yield Case("trunc_helper", note, (a, b, c, d, *fields, f, width))
                yield Case("trunc_open", note, (a, b, *fields[:2], f, width))
                yield Case("trunc_close", note, (a, *fields[:2], b, fields[2], f, width))


def field_cases() -> Iterator[Case]:
    for n in (1, 63, 64, 511, 512, 513, 1100):
        for f in (1, 7, 23, 32, 37, 63):
            draw, note = Draw(f"fields {n} {f}"), f"{n}-{f}"
            yield Case("pack_fields", note, (draw.ring(RING64, n), f))
            yield Case("unpack_fields", note, (draw.words(ops.packed_words(n, f)), n, f))


def gather_cases() -> Iterator[Case]:
    for ring in RINGS:
        for rows, width, picked in ((1, 1, [0]), (7, 1031, [6, 0, 6, 3]), (50, 3, list(range(49, -1, -1))), (3, 5, [])):
            index = torch.tensor(picked, dtype=torch.int64)
            yield Case("gather_rows", f"{ring.bits}-{rows}-{width}", (Draw("rows").ring(ring, rows, width), index))


def stream_cases() -> Iterator[Case]:
    draw = Draw("stream")
    key = draw.ring(RING32, 8)
    for counter, offset, words in (
        (0, 0, 16),
        (1, 2**33 + 5, 32),
        (2**32 - 2, 0, 64),
        (-5, 12, 4000),
        (3 << 32, -1, 48),
    ):
        out = torch.zeros(words, dtype=torch.int32)
        yield Case("chacha20", f"{counter}-{offset}-{words}", (key, torch.tensor([counter]), offset, out), changes=True)


ALL = [
    *matmul_cases(), *listed_cases(), *conv_cases(), *bit_cases(), *trunc_cases(), *field_cases(), *gather_cases(),
    *stream_cases(),
]  # fmt: skip


def expected(case: Case) -> list[Tensor]:
    """What the reference makes of the case."""
    return run(getattr(reference, case.op), case)
