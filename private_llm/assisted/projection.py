"""The client's check of a product that servers computed: secret random sums of its outputs (Freivalds).

For each weight W [outputs, inputs] the client draws a secret matrix P of 40 lines of bits, and computes P W once, when
it sees the public weight. A product y is right only if P y = (P W) x. All are whole numbers, and both sides stay below
2^63, so the comparison modulo 2^64 is one of whole numbers. If y is wrong by e, some entry of e is not zero, and for
any choice of the other bits a line of P hides it for at most one of two values of that entry's bit: P e = 0 has
probability at most 2^-40. That an answer passed or failed tells a server nothing that it could use: the outcome follows
from its own e alone, and after one that failed the session ends, and with it P.
"""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.assisted.fixed_point import centred
from private_llm.kernels import ops
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring

LINES = 40
"""Random sums a weight: a wrong answer passes with probability 2^-40."""


class Projection:
    """The check of one weight; `repr` shows none of it."""

    def __init__(self, lines: Tensor, seed: Seed) -> None:
        """lines: int16 [outputs, inputs]. seed: fresh, for this weight alone."""
        drawn = seed.stream("projection").elements(LINES * len(lines), Ring(64))
        self._bits = (drawn.view(LINES, -1) & 1).to(torch.int16)
        self._folded = ops.narrow_matmul(self._bits.long(), lines.mT.contiguous())

    def holds(self, x: Tensor, y: Tensor) -> bool:
        """Whether y = W x, whole numbers [M, inputs] and [M, outputs] below 2^40; wrong with probability 2^-40."""
        return bool((self._sums(y) == ops.ring_matmul(x, self._folded.mT)).all())

    def holds_modulo(self, x: Tensor, y: Tensor) -> bool:
        """The same modulo 2^40, for the answer of one server."""
        return not bool(centred(self._sums(y) - ops.ring_matmul(x, self._folded.mT)).any())

    def _sums(self, y: Tensor) -> Tensor:
        return ops.narrow_matmul(y, self._bits)
