"""What each primitive sends and waits for, as formulas of public shapes, and the adder of comparisons that they choose.

The common test suite compares them with the ledger, byte for byte. All parties choose alike, because sizes, bandwidth
and latency are part of what they agreed upon.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from private_llm.config import PrivateConfig
from private_llm.kernels.ops import packed_words
from private_llm.net.ledger import Cost
from private_llm.protocol_facts import may_take_keys
from private_llm.protocols.arithmetic import BitWidths
from private_llm.protocols.carry import carry_plan
from private_llm.protocols.one_step import GIVEN_BITS, PiecesShape, Waves
from private_llm.protocols.share import words_for
from private_llm.ring.comparison_keys import key_words
from private_llm.ring.ring import Ring


class Prices:
    """Bytes by link and online rounds of each primitive: Trio's. Other protocols say what differs.

    Counts are numbers of elements, widths numbers of columns, shifts and ranges numbers of bits; e is the bytes of an
    element, bits are packed into words of 8 bytes. Link (0, 2) carries preprocessing, (1, 2) and (2, 1) the rest.
    """

    def finish(self, ring: Ring, count: int, shift: int, helped: bool) -> Cost:
        """From additive pieces to a share of `count` outputs.

        shift = 0: (helped) e pre, e each way, 1 round. shift = f: e + f bits pre, e + f bits each way, 2 rounds.
        """
        plain, packed = count * ring.bytes, 8 * packed_words(count, shift)
        if shift:
            return Cost({(0, 2): plain + packed, (1, 2): plain + packed, (2, 1): plain + packed}, 2)
        return Cost({(0, 2): plain if helped else 0, (1, 2): plain, (2, 1): plain}, 1)

    def narrow_finish(self, count: int, shift: int, widths: BitWidths, held: bool = False) -> Cost:
        """A division by 2^shift of k bits, of which r are wanted, in a 64-bit ring: r + n bits pre, k + n each way.

        n = max(0, r + shift - k). 2 rounds, 1 without n. held: nothing is opened, one round less.
        """
        wanted, fields = (8 * packed_words(count, bits) for bits in (widths.needed_out, widths.fields(shift)))
        opened = 0 if held else 8 * packed_words(count, widths.valid_in)
        each, rounds = opened + fields, (not held) + (widths.fields(shift) > 0)
        return Cost({(0, 2): wanted + fields, (1, 2): each, (2, 1): each}, rounds)

    def product(self, ring: Ring, count: int, shift: int, widths: BitWidths | None = None) -> Cost:
        """`mul` and `bilinear` with `count` outputs, whatever the sums are over, divided by 2^shift."""
        if widths is not None and shift and ring.bits == 64:
            return self.narrow_finish(count, shift, widths)
        return self.finish(ring, count, shift, helped=True)

    def truncate(self, ring: Ring, count: int, shift: int, widths: BitWidths | None = None) -> Cost:
        """`truncate` of `count` elements by `shift` bits: e + f bits pre, f bits each way, 1 round."""
        if widths is not None and ring.bits == 64:
            return self.narrow_finish(count, shift, widths, held=True)
        if shift == 0:
            return Cost()
        packed = 8 * packed_words(count, shift)
        return Cost({(0, 2): count * ring.bytes + packed, (1, 2): packed, (2, 1): packed}, 1)

    def poly(self, ring: Ring, count: int, degree: int, shift: int) -> Cost:
        """`poly` of `degree` 2 or 3: degree - 1 elements pre, then one finish; 1 round, 2 with a shift."""
        return Cost({(0, 2): (degree - 1) * count * ring.bytes}) + self.finish(ring, count, shift, helped=False)

    def msb(self, count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
        """`msb` with the prefix adder: values of `bits` bits without the `low` lowest, against `thresholds` offsets."""
        plan = carry_plan(bits - 1 - low)
        word = 8 * words_for(count)
        pre, online = plan.helped_rows(thresholds) * word, plan.online_rows * thresholds * word
        return Cost({(0, 2): pre, (1, 2): online, (2, 1): online}, plan.rounds)

    def msb_ripple(self, count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
        """The same with the ripple adder: `bits` mask bits pre, then bits - 1 - low gates one after the other."""
        return Cost({(0, 2): 8 * words_for(count) * bits}) + self.gate(count, thresholds).times(bits - 1 - low)

    def a2b(self, ring: Ring, count: int, bits: int | None = None) -> Cost:
        """`a2b` of `count` elements, `bits` of each (None: all): always the ripple adder."""
        return self.msb_ripple(count, bits or ring.bits)

    def gate(self, count: int, rows: int = 1) -> Cost:
        """`and_` of `rows` bit vectors of `count` elements: 1 bit pre, 1 bit each way, 1 round."""
        word = 8 * words_for(count) * rows
        return Cost({(0, 2): word, (1, 2): word, (2, 1): word}, 1)

    def inject(self, ring: Ring, count: int, rows: int, weighted: int, shift: int, low: int | None = None) -> Cost:
        """`inject` of `rows` bits for `count` elements, `weighted` of them times x: 1 element pre for each, a finish.

        1 round, 2 with a shift. With `low`, fields of so many bits take the places of elements (64-bit ring).
        """
        if low is not None and ring.bits == 64:
            each = 8 * packed_words(count, low)
            return Cost({(0, 2): 8 * packed_words((rows + weighted) * count, low), (1, 2): each, (2, 1): each}, 1)
        return Cost({(0, 2): (rows + weighted) * count * ring.bytes}) + self.finish(ring, count, shift, helped=False)

    def piecewise(self, ring: Ring, count: int, shape: PiecesShape) -> Cost:
        """`piecewise` at `count` elements: keys to both evaluators, shared powers to one, a finish an output.

        A key: 8 key_words (856 bytes for 26 levels and degree 1); 1 round, or 2 for each different shift.
        """
        keys = 8 * count * key_words(shape.levels, shape.words)
        powers = 8 * count * (shape.words + (shape.words > 2))
        total = Cost({(0, 1): keys, (0, 2): keys + powers})
        for shift, outputs, along in shape.finishes:
            more = count * len(along) * ring.bytes
            total += self.finish(ring, count * len(outputs), shift, helped=False) + Cost({(1, 2): more, (2, 1): more})
        return total

    def exponential(self, ring: Ring, count: int, shift: int) -> Cost:
        """`count` exponentials: 4 fields pre, a narrow division (elements without a shift); 2 rounds."""
        if shift and ring.bits == 64:
            fields = Cost({(0, 2): 8 * packed_words(4 * count, GIVEN_BITS)})
            return fields + self.narrow_finish(count, shift, BitWidths(GIVEN_BITS, ring.bits))
        return Cost({(0, 2): 4 * count * ring.bytes}) + self.finish(ring, count, shift, helped=False)

    def relu_minus_waves(self, ring: Ring, count: int, plan: Waves) -> Cost:
        """The waves' shares, one injection's products and fields of wraps pre; what is opened, one finish: 2 rounds."""
        pre = plan.words(count) + 2 * packed_words(count, plan.above)
        opened = 8 * packed_words(count, plan.wide)
        summed = Cost({(0, 2): 8 * pre, (1, 2): opened, (2, 1): opened}, 1)
        return summed + self.inject(ring, count, 1, 1, 0, None if plan.bits >= ring.bits else plan.bits)

    def permutation(self, size: int) -> Cost:
        """`permutation` of `size` elements: from streams that the parties share; nothing is sent."""
        return Cost()

    def shuffle(self, ring: Ring, count: int, undo: bool = False, left: int | None = None) -> Cost:
        """`shuffle` of `count` elements in all (rows times columns), of which `left` are wanted (None: all)."""
        return self.moved(count * ring.bytes, undo, None if left is None else left * ring.bytes)

    def shuffle_bits(self, count: int, rows: int = 1, undo: bool = False) -> Cost:
        """`shuffle_bits` of `rows` vectors of `count` bits, or with `undo` `unshuffle_bits`."""
        return self.moved(8 * words_for(count) * rows, undo, None)

    def moved(self, size: int, undo: bool, left: int | None) -> Cost:
        """Moving `size` bytes: one before and two each way, of which only the first to party 2 is of all bytes where no
        more than `left` are wanted; 2 rounds, 3 to undo.
        """
        end = size if left is None else left
        return Cost({(0, 2): size, (1, 2): size + end, (2, 1): 2 * end}, 3 if undo else 2)

    def open_shuffled(self, count: int, rows: int = 1) -> Cost:
        """`open_shuffled` of `rows` vectors of `count` bits: one each way, and one to party 0; 1 round."""
        size = 8 * words_for(count) * rows
        return Cost({(1, 2): size, (2, 1): size, (1, 0): size}, 1)


trio_prices = Prices()

ROUND_S = 1e-4
"""Computing that one round costs besides the network: a few calls of Python (measured 0.06 to 0.15 ms)."""

BLOCK_S = 6e-9
"""A block of the cipher of comparison keys, on one thread, with what is done with it (measured 5 to 7 ns)."""


@dataclass(frozen=True)
class Adder:
    """How comparisons add: few rounds (prefix), few bytes (ripple), or not at all (keys). `PrivateConfig.adder`.

    With the network it is chosen for: Mbit/s each way, one-way latency in ms. Without one "auto" is the prefix adder.
    """

    kind: Literal["auto", "prefix", "ripple", "keys"] = "auto"
    bandwidth_mbit: float | None = None
    latency_ms: float = 0.05

    @classmethod
    def of(cls, config: PrivateConfig) -> Adder:
        """What a configuration asks for."""
        return cls(config.adder, config.bandwidth_mbit, config.latency_ms)

    def ripples(self, prefix: Callable[[], Cost], ripple: Callable[[], Cost]) -> bool:
        """Whether the ripple adder is the one to use, given what each would cost (asked for only if it matters)."""
        if self.kind != "auto" or self.bandwidth_mbit is None:
            return self.kind == "ripple"
        return self.seconds(ripple(), self.bandwidth_mbit) < self.seconds(prefix(), self.bandwidth_mbit)

    @property
    def may_take_keys(self) -> bool:
        """Whether `takes_keys` may ever say yes."""
        return may_take_keys(self.kind, self.bandwidth_mbit)

    def takes_keys(self, keys: Callable[[], Cost], other: Callable[[], Cost], blocks: int) -> bool:
        """Whether comparison keys are the way to go, by what they and the other way cost, and blocks of the cipher."""
        if self.kind != "auto" or self.bandwidth_mbit is None:
            return self.kind == "keys"
        seconds = self.key_seconds(keys(), blocks)
        return seconds is not None and seconds < self.seconds(other(), self.bandwidth_mbit)

    def key_seconds(self, keys: Cost, blocks: int) -> float | None:
        """How long comparison keys take, by their cost and blocks of the cipher; None without a stated bandwidth."""
        return None if self.bandwidth_mbit is None else self.seconds(keys, self.bandwidth_mbit) + blocks * BLOCK_S

    def seconds(self, cost: Cost, bandwidth_mbit: float) -> float:
        """Rounds, and the busiest direction of the busiest party's connection (preprocessing included)."""
        used: dict[tuple[int, bool], int] = defaultdict(int)
        for (sender, receiver), count in cost.sent.items():
            used[sender, True] += count
            used[receiver, False] += count
        wire = max(used.values(), default=0) * 8 / (bandwidth_mbit * 1e6)
        return wire + cost.rounds * (self.latency_ms * 1e-3 + ROUND_S)
