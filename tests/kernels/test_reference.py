"""The reference against what its results mean: Python's integers, carries of real additions, published vectors."""

from __future__ import annotations

import itertools

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from private_llm.kernels.ops import packed_words
from private_llm.protocols.carry import carry_plan
from private_llm.ring.ring import Ring
from tests.kernels import reference
from tests.kernels.cases import RINGS, Draw


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: str(ring.bits))
def test_products_are_those_of_integers_modulo_the_ring(ring: Ring) -> None:
    draw = Draw("integers")
    x, y = draw.ring(ring, 3, 7), draw.ring(ring, 7, 2)
    made = reference.ring_matmul(x, y).tolist()
    for m, n in itertools.product(range(3), range(2)):
        exact = sum(int(x[m, k]) * int(y[k, n]) for k in range(7))
        assert made[m][n] == ring.constant(exact)


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: str(ring.bits))
def test_row_r_holds_bit_r_of_every_element(ring: Ring) -> None:
    x = Draw("rows").ring(ring, 70)
    rows = reference.transpose_bits(x, ring.bits)
    assert rows.shape == (ring.bits, 2)
    for r, i in itertools.product(range(ring.bits), range(128)):
        bit = int(x[i]) >> r & 1 if i < 70 else 0
        assert int(rows[r, i // 64]) >> (i % 64) & 1 == bit


def _lane(rows: Tensor, lane: int) -> int:
    """The number whose bits are lane `lane` of the rows."""
    return sum((int(row[lane // 64]) >> (lane % 64) & 1) << r for r, row in enumerate(rows))


@pytest.mark.parametrize("positions", [1, 2, 3, 8, 13])
def test_both_evaluators_together_hold_the_carry_of_the_sum(positions: int) -> None:
    """Blocks, then every level of joins, on shares: the last generate is the carry out of m + s."""
    plan, draw = carry_plan(positions), Draw(f"sum {positions}")
    m, s = draw.words(positions, 1), draw.words(positions, 1)
    s[:, 0] ^= (s[:, 0] ^ ~m[:, 0]) & 0xFFFF  # in 16 lanes every position lets the carry pass
    shares = [draw.words(plan.monomial_rows, 1)]
    shares.append(shares[0].clone())
    reference.block_monomials(s, 0, plan.blocks, shares[1])
    held = [torch.zeros(plan.block_rows, 1, dtype=torch.int64) for _ in range(2)]
    for who in range(2):
        reference.block_carries(m, 0, plan.blocks, shares[who], who == 0, held[who])
    count = len(plan.blocks)
    for level, groups in enumerate(plan.levels):
        lam = [draw.words(held[0].shape[0], 1) for _ in range(2)]
        masked = held[0] ^ held[1] ^ lam[0] ^ lam[1]
        prod = [draw.words(plan.product_rows[level], 1)]
        prod.append(prod[0].clone())
        reference.join_products(lam[0] ^ lam[1], groups, count, prod[1])
        held = [torch.zeros(plan.joined_rows[level], 1, dtype=torch.int64) for _ in range(2)]
        for who in range(2):
            reference.join_carries(masked, lam[who], prod[who], groups, count, who == 0, held[who])
        count = len(groups)
    carry = held[0][0] ^ held[1][0]
    for lane in range(64):
        assert int(carry[0]) >> lane & 1 == (_lane(m, lane) + _lane(s, lane)) >> positions


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: str(ring.bits))
def test_injected_bits_choose_terms(ring: Ring) -> None:
    n, draw = 70, Draw("choose")
    public, s = draw.words(2, 2), draw.words(2, 2)
    m, lam = draw.ring(ring, n), draw.ring(ring, n)
    lam1 = draw.ring(ring, n)
    shares = [draw.ring(ring, 3, n)]
    shares.append(shares[0].clone())
    weighted = (True, False)
    reference.inject_products(s, lam, weighted, shares[1])
    w, c = draw.ring(ring, 2, 1), draw.ring(ring, 2, n)
    total = torch.zeros(n, dtype=ring.dtype)
    for who, mine in enumerate((lam1, lam - lam1)):
        out = torch.zeros(n, dtype=ring.dtype)
        reference.inject_terms(public, m, mine, shares[who], weighted, w, c, who == 0, out)
        total += out
    for i in range(n):
        bits = [(int(public[k, i // 64]) ^ int(s[k, i // 64])) >> (i % 64) & 1 for k in range(2)]
        x = int(m[i]) - int(lam[i])
        exact = bits[0] * (int(w[0, 0]) * x + int(c[0, i])) + bits[1] * int(c[1, i])
        assert int(total[i]) == ring.constant(exact)


@pytest.mark.parametrize(("count", "f"), [(3, 18), (512, 5), (700, 23), (1024, 61)])
def test_fields_lie_where_the_layout_says(count: int, f: int) -> None:
    """Element j < 512 of a full block is bits (j // 8) f .. of the stream of words j % 8, j % 8 + 8, ...; the rest
    follows back to back."""
    words = Draw("layout").words(packed_words(count, f))
    made = reference._fields(words, count, f)
    unsigned = [int(word) % 2**64 for word in words]
    full = count // 512 * 512
    for i in range(count):
        if i < full:
            first, lane, place = i // 512 * 8 * f, i % 8, i % 512 // 8
            stream = unsigned[first + lane : first + 8 * f : 8]
        else:
            stream, place = unsigned[full // 64 * f :], i - full
        number = sum(word << (64 * k) for k, word in enumerate(stream))
        assert int(made[i]) == number >> (place * f) & ((1 << f) - 1)
    packed = reference._packed(made, f)
    assert torch.equal(reference._fields(packed, count, f), made)


@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: str(ring.bits))
@pytest.mark.parametrize(("f", "width"), [(1, 1), (13, 13), (13, 4), (13, 1)])
def test_truncation_is_off_by_at_most_one_unit(ring: Ring, f: int, width: int) -> None:
    """The three parties' steps on z, |z| < 2^(bits-2): the result opens to floor(z / 2^f) or a neighbour.

    With fields of fewer bits than are dropped, it does so in its lowest bits - f + width bits.
    """
    n, draw = 600, Draw(f"shift {f}")
    z = draw.ring(ring, n) >> 2
    error, g1, g2, z1, piece = (draw.ring(ring, n) for _ in range(5))
    rho1, zeta1, zeta2 = (draw.words(packed_words(n, width)) for _ in range(3))
    a1, a2, z2, rho2 = reference.trunc_helper(error, g1, g2, z1, rho1, zeta1, zeta2, f, width)
    mine, theirs = piece + g1, z + error - piece + g2
    w1, fields1 = reference.trunc_open(mine, theirs, rho1, zeta1, f, width)
    w2, fields2 = reference.trunc_open(theirs, mine, rho2, zeta2, f, width)
    half1, own1 = reference.trunc_close(w1, fields1, fields2, z1, zeta1, f, width)
    half2, own2 = reference.trunc_close(w2, fields2, fields1, z2, zeta2, f, width)
    assert torch.equal(own1, a1)
    assert torch.equal(own2, a2)
    assert torch.equal(half1 - a2, half2 - a1)
    off = ((half1 - a2 - (z >> f)) << (f - width)) >> (f - width)
    assert set(off.tolist()) <= {-1, 0, 1}


def chacha20(key: bytes, number: int, blocks: int) -> bytes:
    out = torch.zeros(16 * blocks, dtype=torch.int32)
    reference.chacha20(torch.frombuffer(bytearray(key), dtype=torch.int32), torch.tensor([number - 7]), 7, out)
    return out.numpy().tobytes()


def test_chacha20_blocks_of_rfc_8439() -> None:
    """RFC 8439, appendix A.1, test vectors 3 and 4."""
    made = chacha20(bytes(31) + b"\1", 1, 1)
    assert made.hex() == (
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"
    )
    made = chacha20(b"\0\xff" + bytes(30), 2, 1)
    assert made.hex() == (
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096"
    )


def test_chacha20_is_that_of_another_implementation() -> None:
    """Whose first word of nonce is the upper half of a block's number."""
    key = bytes(range(7, 39))
    for number, blocks in ((5, 9), ((3 << 32) + 1, 2), ((1 << 33) - 2, 2)):
        start = algorithms.ChaCha20(key, number.to_bytes(16, "little"))
        assert chacha20(key, number, blocks) == Cipher(start, mode=None).encryptor().update(bytes(64 * blocks))
    assert chacha20(key, (1 << 32) - 1, 2) == chacha20(key, (1 << 32) - 1, 1) + chacha20(key, 1 << 32, 1)
