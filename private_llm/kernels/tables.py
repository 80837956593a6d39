"""Row numbers of the carry kernels as tables, one line per output, for machines that run all outputs at once.

-1 stands for a row that does not exist. A block or group smaller than three is one of three whose
missing part changes nothing: a block gets a lowest bit with m = 1, s = 0 (it generates nothing and lets a carry
pass), a group a highest member with generate 0 and propagate 1.
"""

from __future__ import annotations

from collections.abc import Sequence

NONE = -1


def monomial_factors(low: int, blocks: Sequence[int]) -> list[list[int]]:
    """Per monomial, the three rows of s whose product it is, and no further term."""
    table, bit = [], low
    for size in blocks:
        for subset in range(1, 1 << size):
            chosen = [bit + i for i in range(size) if subset >> i & 1]
            table.append(chosen + [NONE] * (4 - len(chosen)))
        bit += size
    return table


def block_rows(low: int, blocks: Sequence[int]) -> list[list[int]]:
    """Per block: rows of the bits 0..2 in m, then of the monomials 0, 1, 10, 2, 20, 21, 210 of s."""
    table, bit, row = [], low, 0
    for size in blocks:
        missing = 3 - size
        bits = [NONE] * missing + [bit + i for i in range(size)]
        monomials = [NONE] * 7
        for subset in range(1, 1 << size):
            monomials[(subset << missing) - 1] = row + subset - 1
        table.append(bits + monomials)
        bit += size
        row += (1 << size) - 1
    return table


def _members(base: int, size: int, count: int) -> list[int]:
    """Rows of g0, g1, g2, p0, p1, p2 (block 0 has no propagate)."""
    generates = [base + i for i in range(size)] + [NONE] * (3 - size)
    propagates = [count + base + i - 1 if base + i else NONE for i in range(size)] + [NONE] * (3 - size)
    return generates + propagates


def product_factors(groups: Sequence[int], count: int) -> list[list[int]]:
    """Per mask product a b c, or a b c + a d: a, b, c and d."""
    table, base = [], 0
    for j, size in enumerate(groups):
        g0, g1, _, p0, p1, p2 = _members(base, size, count)
        if size == 3:
            table += [[p2, p1, g0, g1], [p2, p1, NONE, NONE], [p2, g0, NONE, NONE], [p1, g0, NONE, NONE]]
            table += [[p2, p0, NONE, NONE], [p1, p0, NONE, NONE], [p2, p1, p0, NONE]] if j else []
        else:
            table += [[p1, g0, NONE, NONE]]
            table += [[p1, p0, NONE, NONE]] if j else []
        base += size
    return table


def join_rows(groups: Sequence[int], count: int) -> list[list[int]]:
    """Per group: its six members, then the products p2p1g0 + p2g1, p2p1, p2g0, p1g0, p2p0, p1p0, p2p1p0."""
    table, base, row = [], 0, 0
    for j, size in enumerate(groups):
        made = [0, 1, 2, 3, 4, 5, 6] if size == 3 else [3, 5]
        products = [NONE] * 7
        for place in made if j else [place for place in made if place < 4]:
            products[place] = row
            row += 1
        table.append(_members(base, size, count) + products)
        base += size
    return table


def extra_rows(weighted: Sequence[bool]) -> list[int]:
    """Per bit row, where its second message row lies (NONE without a weight)."""
    table, row = [], len(weighted)
    for used in weighted:
        table.append(row if used else NONE)
        row += int(used)
    return table
