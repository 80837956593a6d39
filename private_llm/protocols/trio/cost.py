"""What every primitive of Trio sends and waits for, as formulas of public shapes.

The common suite compares them with the ledger, byte for byte. Links: (0, 2) carries all preprocessing;
(1, 2) and (2, 1) the online phase. `e` = bytes of a ring element, packed(n, f) = 8 ceil(n f / 64),
w(n) = 8 ceil(n / 64).
"""

from __future__ import annotations

from private_llm.circuits.carry import carry_plan
from private_llm.kernels.ops import packed_words
from private_llm.net.ledger import Cost
from private_llm.net.transport import CLIENT
from private_llm.protocols.arithmetic import BitWidths
from private_llm.protocols.exponential import GIVEN_BITS
from private_llm.protocols.piecewise import PiecesShape
from private_llm.protocols.share import words_for
from private_llm.protocols.waves import Waves
from private_llm.ring.comparison_keys import key_words
from private_llm.ring.dpf import key_words as index_words
from private_llm.ring.ring import Ring


def finish(ring: Ring, count: int, shift: int, helped: bool) -> Cost:
    """From additive pieces to a share of `count` outputs.

    shift = 0: (helped) e pre, e each way, 1 round. shift = f: e + f bits pre, e + f bits each way, 2 rounds.
    """
    plain, packed = count * ring.bytes, 8 * packed_words(count, shift)
    if shift:
        return Cost({(0, 2): plain + packed, (1, 2): plain + packed, (2, 1): plain + packed}, 2)
    return Cost({(0, 2): plain if helped else 0, (1, 2): plain, (2, 1): plain}, 1)


def narrow_finish(ring: Ring, count: int, shift: int, widths: BitWidths, held: bool = False) -> Cost:
    """A division by 2^shift of k bits, of which r are wanted, in a 64-bit ring: r + n bits pre, k + n each way.

    n = max(0, r + shift - k). 2 rounds, 1 without n. held: nothing is opened, one round less.
    """
    wanted, fields = (8 * packed_words(count, bits) for bits in (widths.needed_out, widths.fields(shift)))
    opened = 0 if held else 8 * packed_words(count, widths.valid_in)
    each, rounds = opened + fields, (not held) + (widths.fields(shift) > 0)
    return Cost({(0, 2): wanted + fields, (1, 2): each, (2, 1): each}, rounds)


def product(ring: Ring, count: int, shift: int, widths: BitWidths | None = None) -> Cost:
    """`mul` and `matmul` with `count` outputs, whatever the inner size."""
    if widths is not None and shift and ring.bits == 64:
        return narrow_finish(ring, count, shift, widths)
    return finish(ring, count, shift, helped=True)


def truncate(ring: Ring, count: int, shift: int, widths: BitWidths | None = None) -> Cost:
    """Truncation of a held value: e + f bits pre, f bits each way, 1 round."""
    if widths is not None and ring.bits == 64:
        return narrow_finish(ring, count, shift, widths, held=True)
    if shift == 0:
        return Cost()
    packed = 8 * packed_words(count, shift)
    return Cost({(0, 2): count * ring.bytes + packed, (1, 2): packed, (2, 1): packed}, 1)


def poly(ring: Ring, count: int, degree: int, shift: int) -> Cost:
    """One-step polynomial: degree - 1 elements pre, then one finish; 1 round, 2 with a shift."""
    return Cost({(0, 2): (degree - 1) * count * ring.bytes}) + finish(ring, count, shift, helped=False)


def msb(count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
    """Sign bits of `count` elements against `thresholds` offsets in a range of `bits` bits (prefix adder)."""
    plan = carry_plan(bits - 1 - low)
    word = 8 * words_for(count)
    online = plan.online_rows * thresholds * word
    return Cost(
        {(0, 2): (plan.monomial_rows + 1 + plan.products * thresholds) * word, (1, 2): online, (2, 1): online},
        plan.rounds,
    )


def piecewise(ring: Ring, count: int, shape: PiecesShape) -> Cost:
    """Piecewise polynomials at `count` elements: keys to both evaluators, shared powers to one, a finish an output.

    A key: 8 key_words (856 bytes for 26 levels and degree 1); 1 round, or 2 for each different shift.
    """
    keys = 8 * count * key_words(shape.levels, shape.words)
    powers = 8 * count * (shape.words + (shape.words > 2))
    total = Cost({(0, 1): keys, (0, 2): keys + powers})
    for shift, outputs, along in shape.finishes:
        more = count * len(along) * ring.bytes
        total += finish(ring, count * len(outputs), shift, helped=False) + Cost({(1, 2): more, (2, 1): more})
    return total


def exponential(ring: Ring, count: int, shift: int) -> Cost:
    """`count` exponentials, or zeros by a bit: 4 fields pre, a narrow division (elements without a shift); 2 rounds."""
    if shift and ring.bits == 64:
        fields = Cost({(0, 2): 8 * packed_words(4 * count, GIVEN_BITS)})
        return fields + narrow_finish(ring, count, shift, BitWidths(GIVEN_BITS, ring.bits))
    return Cost({(0, 2): 4 * count * ring.bytes}) + finish(ring, count, shift, helped=False)


def relu_minus_waves(ring: Ring, count: int, plan: Waves) -> Cost:
    """The waves' shares, one injection's products and fields of wraps pre; what is opened, one finish: 2 rounds."""
    pre = plan.words(count) + 2 * packed_words(count, plan.above)
    opened = 8 * packed_words(count, plan.wide)
    summed = Cost({(0, 2): 8 * pre, (1, 2): opened, (2, 1): opened}, 1)
    return summed + inject(ring, count, 1, 1, 0, None if plan.bits >= ring.bits else plan.bits)


def gate(count: int, rows: int = 1) -> Cost:
    """One AND of `rows` bit vectors: 1 bit pre, 1 bit each way, 1 round."""
    word = 8 * words_for(count) * rows
    return Cost({(0, 2): word, (1, 2): word, (2, 1): word}, 1)


def msb_ripple(count: int, bits: int, thresholds: int = 1, low: int = 0) -> Cost:
    """The ripple adder: `bits` mask bits pre, then bits - 1 - low gates one after the other."""
    return Cost({(0, 2): 8 * words_for(count) * bits}) + gate(count, thresholds).times(bits - 1 - low)


def a2b(ring: Ring, count: int, bits: int | None = None) -> Cost:
    """All bits, or the lowest: the mask bits pre, then a ripple of bits - 1 gates."""
    return msb_ripple(count, bits or ring.bits)


def inject(ring: Ring, count: int, rows: int, weighted: int, shift: int, low: int | None = None) -> Cost:
    """sum of bit_k (w_k x + c_k): 1 element pre per row and per weighted row, then one finish.

    1 round, 2 with a shift. With `low`, fields of so many bits take the places of elements (64-bit ring).
    """
    if low is not None and ring.bits == 64:
        each = 8 * packed_words(count, low)
        return Cost({(0, 2): 8 * packed_words((rows + weighted) * count, low), (1, 2): each, (2, 1): each}, 1)
    return Cost({(0, 2): (rows + weighted) * count * ring.bytes}) + finish(ring, count, shift, helped=False)


def input_from_client(ring: Ring, count: int) -> Cost:
    """The client sends one element to each evaluator."""
    return Cost({(CLIENT, 1): count * ring.bytes, (CLIENT, 2): count * ring.bytes})


def reveal_to_client(ring: Ring, count: int) -> Cost:
    """Each evaluator sends one element to the client."""
    return Cost({(1, CLIENT): count * ring.bytes, (2, CLIENT): count * ring.bytes})


def index_from_client(ring: Ring, count: int, domain: int) -> Cost:
    """Two point-function keys for each party, 8 key_words(domain) bytes each."""
    return Cost({(CLIENT, party): 2 * 8 * count * index_words(domain) for party in range(3)})


def lookup(ring: Ring, count: int, width: int, public: bool = False) -> Cost:
    """Rows of a table at secret indices: one finish (3 e an output, 2 e if public), however long the table is."""
    return finish(ring, count * width, 0, helped=not public)


def permutation(size: int) -> Cost:
    """A secret permutation: from streams that the parties share; nothing is sent."""
    return Cost()


def shuffle(ring: Ring, count: int, hidden: bool = True, undo: bool = False, left: int | None = None) -> Cost:
    """Moving `count` elements: one before and one each way, 2 rounds; hidden: one each way more.

    left: of a hidden order, so many are wanted: both ways back, and what is more, are of these alone. Undoing a hidden
    one takes 3 rounds.
    """
    return _moved(count * ring.bytes, hidden, undo, None if left is None else left * ring.bytes)


def shuffle_bits(count: int, rows: int = 1, hidden: bool = True, undo: bool = False) -> Cost:
    """Moving bit vectors of `count` bits, in words, or back with `undo`."""
    return _moved(8 * words_for(count) * rows, hidden, undo)


def _moved(size: int, hidden: bool, undo: bool, left: int | None = None) -> Cost:
    end = size if left is None else left
    there, back = (size + end, 2 * end) if hidden else (size, size)
    return Cost({(0, 2): size, (1, 2): there, (2, 1): back}, 3 if hidden and undo else 2)


def open_shuffled(count: int, rows: int = 1, hidden: bool = True) -> Cost:
    """Opening shuffled bits: one bit each way, and one to party 0 if it may know; 1 round."""
    size = 8 * words_for(count) * rows
    return Cost({(1, 2): size, (2, 1): size, (1, 0): size if hidden else 0}, 1)
