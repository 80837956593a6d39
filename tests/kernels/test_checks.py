"""The steps of a checked truncation equal their compositions of plain kernels, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from private_llm.kernels import ops
from private_llm.kernels.ops import packed_words
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring
from tests.kernels import reference

cases = pytest.mark.parametrize(
    ("bits", "n", "f"),
    [(64, 1, 1), (64, 511, 18), (64, 1537, 13), (64, 600, 61), (32, 1, 12), (32, 1025, 12), (32, 9, 29)],
)


def drawn(bits: int, n: int, f: int, elements: int, fields: int) -> tuple[list[Tensor], list[Tensor]]:
    """Uniform ring elements, with extremes, and uniform fields whose unused bits are zero."""
    prg, ring = Seed(bytes(range(32))).stream("cases"), Ring(bits)
    rows = [prg.elements(n, ring) for _ in range(elements)]
    rows[0][: min(n, 2)] = torch.tensor([-1, 0])[: min(n, 2)].to(ring.dtype)
    words = [prg.words(packed_words(n, f)) for _ in range(fields)]
    for each in words:
        if n * f % 64:
            each[-1] &= (1 << (n * f % 64)) - 1
    return rows, words


def equal(made: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    return len(made) == len(wanted) and all(torch.equal(*pair) for pair in zip(made, wanted, strict=True))


def less(r: Tensor) -> Tensor:
    """~r less the 2^(bits-2) that `trunc_open` adds."""
    return ~r - (1 << (r.element_size() * 8 - 2))


@cases
def test_what_party_0_is_told(bits: int, n: int, f: int) -> None:
    (w, t1, half, own), (t2, t3) = drawn(bits, n, f, 4, 2)
    none, no_fields = torch.zeros_like(w), torch.zeros_like(t2)
    u, _, high, beta = reference.trunc_helper(~w, none, none, t1, t2, t3, no_fields, f, f)
    assert equal(ops.field_step("check_told", (w, t1, t2, t3, half, own), (f,), f), (u, high, beta, half + own + u))


@cases
def test_the_piece_of_party_3(bits: int, n: int, f: int) -> None:
    (e, g1, g2, t1), (t2, t3) = drawn(bits, n, f, 4, 2)
    r = e + g1 + g2
    w, fields = reference.trunc_open(less(r), torch.zeros_like(r), t2, t3, f, f)
    u = reference.trunc_close(w, fields, torch.zeros_like(t2), t1, t3, f, f)[1]
    assert equal(ops.field_step("check_piece", (e, g1, g2, t1, t2, t3), (f,), f), (fields, u))


@cases
def test_the_part_of_party_0(bits: int, n: int, f: int) -> None:
    (r, high, a1, a2), (beta, theirs) = drawn(bits, n, f, 4, 2)
    none = torch.zeros_like(beta)
    w, fields = reference.trunc_open(less(r), torch.zeros_like(r), beta, none, f, f)
    made = reference.trunc_close(w, fields, theirs, high, none, f, f)[0]
    assert equal(ops.field_step("check_part", (r, beta, theirs, high, a1, a2), (f,), f), (made, made + a1 + a2))


@pytest.mark.parametrize("bits", [64, 32])
def test_the_opening(bits: int) -> None:
    (first, second, e, g1, g2), _ = drawn(bits, 77, 1, 5, 0)
    r, value = ops.field_step("check_opening", (first, second, e, g1, g2), (), 0)
    assert torch.equal(r, e + g1 + g2)
    assert torch.equal(value, first + second + r + (1 << (bits - 2)))


def test_meta_tensors_give_shapes() -> None:
    row, fields = torch.empty(100, dtype=torch.int32, device="meta"), torch.empty(19, dtype=torch.int64, device="meta")
    given = {
        "check_told": (row, row, fields, fields, row, row), "check_piece": (row, row, row, row, fields, fields),
        "check_part": (row, fields, fields, row, row, row),
    }  # fmt: skip
    made = [each for name, operands in given.items() for each in ops.field_step(name, operands, (12,), 12)]
    made += ops.field_step("check_opening", (row,) * 5, (), 0)
    assert all(each.is_meta for each in made)
    assert {tuple(each.shape) for each in made} == {(100,), (19,)}
