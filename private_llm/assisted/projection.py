"""The client's check of a product that servers computed: secret random sums of its outputs (Freivalds).

For each weight W [outputs, inputs] the client draws secret lines P of whole numbers below 2^25, and computes P W once,
when it sees the public weight. A product y is right only if P y = (P W) x modulo 2^64. If y is wrong by e, some entry
of e is not zero; it is below 2^40 (y and W x are below 2^39), so it is 2^t times an odd number with t < 40. Whatever
the other numbers of a line are, the one that meets that entry is determined modulo 2^(64 - t), so there is at most one
for which the line overlooks e: probability 2^-25 at most, and 2^-50 for `LINES` lines. That an answer passed or failed
tells a server nothing that it could use: but for that probability the outcome follows from its own e alone, and after
one that failed the session ends, and with it P.

With 8-bit weights products are below 2^31 and t < 32: the same holds, for modulo 2^32 in place of 2^40.

The answer of one server alone is known modulo 2^40 only, where a line overlooks 2^39 every second time. The client
looks at it when a product is wrong, to find whose part is: `NAMING` lines overlook such errors once in 256 times.
"""

import torch
from torch import Tensor

from private_llm.assisted.fixed_point import centred, element_bytes
from private_llm.kernels import ops
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring

LINES, NAMING = 2, 8
"""Random sums that every product is checked by, and those that find which server computed wrongly."""
_BITS = 25
_AT_ONCE = 1 << 22
"""Elements of a weight that are widened to 64 bits at a time."""


class Projection:
    """The check of one weight; `repr` shows none of it.

    sums: int64 [NAMING, outputs], secret. folded: their products with the weight, int64 [NAMING, inputs].
    """

    def __init__(self, lines: Tensor, seed: Seed) -> None:
        """lines: int16 or int8 [outputs, inputs]. seed: fresh, for this weight alone."""
        outputs, inputs = lines.shape
        self._size = element_bytes(lines)
        drawn = seed.stream("projection").elements(NAMING * outputs, Ring(64))
        self.sums = drawn.view(NAMING, outputs) & ((1 << _BITS) - 1)
        self.folded = torch.zeros(NAMING, inputs, dtype=torch.int64)
        size = max(1, _AT_ONCE // inputs)
        for some, part in zip(self.sums.split(size, dim=1), lines.split(size), strict=True):
            self.folded += ops.ring_matmul(some.contiguous(), part.long())
        self.checked = self.sums[:LINES], self.folded[:LINES]
        """The lines that every product is checked by."""

    def holds_modulo(self, x: Tensor, y: Tensor) -> bool:
        """Whether y = W x modulo 2^40 (or 2^32), for the answer of one server, int64 [M, inputs] and [M, outputs]."""
        difference = ops.ring_matmul(y, self.sums.mT) - ops.ring_matmul(x, self.folded.mT)
        return not bool(centred(difference, self._size).any())
