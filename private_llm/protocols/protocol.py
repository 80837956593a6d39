"""The interface of every protocol, in ring elements; fixed-point meaning lives above, in `tensor`.

All parties run the same calls in the same order (SPMD). Shapes, shifts, thresholds and coefficients are public; only
`Share`, `BitShare` and `Index` contents are secret. The price of each primitive stands beside it (`prices.Prices`); the
common test suite compares it with the ledger.

`shift=s` divides the exact result by 2^s (floor, plus at most one unit) and requires
|result before division| < 2^(ring bits - 2), which only debug sessions check: beyond, results are garbage. `shift=0`
divides nothing and wraps modulo 2^(ring bits). A shift outside 0 .. ring bits - 3 raises DomainError (plain: below 0).
Shapes that do not broadcast raise torch's RuntimeError.

Bytes are over all links, preprocessing included, in the 64-bit ring at s = 18, of bits for a count that fills whole
words (64 elements); e is the bytes of an element (8 or 4). Dealer's figures are trio's where nothing else is said
(`matmul="remask"`: dealer.py); plain sends nothing.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import add, neg, sub, xor

from torch import Tensor

from private_llm.errors import DomainError, UnsupportedOp
from private_llm.kernels.forms import MATMUL, BilinearForm, Conv2d
from private_llm.net.ledger import Cost
from private_llm.net.transport import CLIENT
from private_llm.protocols.ends import PartyEnd
from private_llm.protocols.one_step import Exponential, Pieces, PiecesShape, Waves
from private_llm.protocols.share import (
    BitShare,
    BitWeights,
    BitWidths,
    Index,
    Moved,
    Permutation,
    Share,
    ShuffledBits,
    moved_bits,
    moved_rows,
    unpacked,
)


class Protocol(PartyEnd):
    """One party's end of a protocol: arithmetic, bits, oblivious access, and the edges of the sharing.

    A protocol has a primitive if a class of it defines one, or if a family in its table does (`registry.Primitives`);
    `primitives` has the names. All others raise UnsupportedOp. Bits are shared bitwise, 64 elements a word
    (`BitShare`); a row of n bits is sent as ceil(n / 64) words. Indices are the client's (`Index`); which rows are read
    shows in no message.
    """

    primitives: frozenset[str] = frozenset()
    """What this end computes in its own way. Callers ask for "local_truncate" (divisions then make use of `widths` in a
    64-bit ring), "piecewise", "exponential" and "relu_minus_waves"; all other primitives are always there here."""

    divides_exactly = False  # whether every division is the floor, never one unit more

    def __init_subclass__(cls) -> None:
        """What a class defines is there."""
        super().__init_subclass__()
        cls.primitives = frozenset(name for name in DECLARED if getattr(cls, name) is not getattr(Protocol, name))

    def take(self, *families: object) -> None:
        """Compute by these objects from now on, by all their methods that this interface has, bound once. Local."""
        for family in families:
            names = [name for name in DECLARED if hasattr(type(family), name)]
            vars(self).update({name: getattr(family, name) for name in names})
            self.primitives |= {*names}

    # -- arithmetic: sums are local; each product costs one finish of its output's size, whatever it sums over ------
    def may_wrap(self) -> AbstractContextManager[None]:
        """Values inside may leave the ring, being multiplied by zero later. Local; for debug sessions."""
        return nullcontext()

    def expect_rows(self, what: str, x: Share, square: float) -> None:
        """State that rows of x [.., width] have sums of squares, in squared ring elements, below `square`. Local.

        Debug sessions alone look: they raise DomainError, with `what` as the name of the value.
        """

    # -- local (no communication) ---------------------------------------------------------------------
    def add(self, x: Share, y: Share) -> Share:
        """x + y, broadcasting. Local."""
        return Share(tuple(map(add, x.parts, y.parts)))

    def sub(self, x: Share, y: Share) -> Share:
        """x - y, broadcasting. Local."""
        return Share(tuple(map(sub, x.parts, y.parts)))

    def neg(self, x: Share) -> Share:
        """-x, in the shape of x. Local."""
        return x.map(neg)

    def mul_public(self, x: Share, c: int | Tensor) -> Share:
        """x times public ring constants (signed ints, or a tensor), broadcasting; nothing is divided. Local."""
        return x.map(lambda part: part * c)

    def add_public(self, x: Share, c: int | Tensor) -> Share:
        """x plus public ring constants, broadcasting; an int is reduced modulo 2^(ring bits). Local."""
        self.lacks("add_public")

    def public(self, c: Tensor) -> Share:
        """A share of public ring elements c (known to everybody), in the shape of c. Local."""
        self.lacks("public")

    # -- products ---------------------------------------------------------------------------------------
    def truncate(self, x: Share, shift: int, widths: BitWidths | None = None) -> Share:
        """floor(x / 2^shift), plus at most one unit, for |x| < 2^(ring bits - 2); the shape of x.

        `shift=0` returns x, local. 1 round. Bytes an element: trio e + 3 s / 8 (14.75), quad 2 e + 5 s / 8 (27.25);
        none under plain, which is exact. With `widths` (see `mul`) trio (r + 3 n) / 8, also for a shift of 0, which
        makes more bits right. Raises DomainError for a shift outside the ring.
        """
        self.lacks("truncate")

    def local_truncate(self, x: Share, shift: int) -> Share:
        """x / 2^shift rounded to an integer that is less than two units away, modulo 2^(b - shift). Local.

        b: how many of the lowest bits of x are right (all of the ring's, but for narrow results). The shape of x; what
        is shared is right in its lowest b - shift bits alone. Raises UnsupportedOp under a protocol without it.
        """
        self.lacks("a local division", "trio or dealer")

    def mul(self, x: Share, y: Share, shift: int = 0, widths: BitWidths | None = None) -> Share:
        """Elementwise product x*y with broadcasting, divided by 2^shift; before a division |x*y| < 2^(ring bits - 2).

        widths: k bits of x*y are right and r bits of the result wanted; those above are unknown. Where the protocol has
        `local_truncate` (trio and dealer, 64-bit ring) it takes 2 k + r + 3 n bits, n = max(0, r + shift - k), and with
        n = 0 one round less, and x*y may be any number modulo 2^k; elsewhere, and without a shift, nothing changes.

        Bytes an output: trio 3 (e + s / 8) (30.75; 24 without shift), quad 5 (e + s / 8) (51.25; 40); 2 rounds, 1
        without shift. Raises DomainError for a shift outside the ring.
        """
        self.lacks("mul")

    def bilinear(
        self, form: BilinearForm, x: Share, y: Share, shift: int = 0, select: Tensor | None = None,
        widths: BitWidths | None = None,
    ) -> Share:  # fmt: skip
        """B(x, y) of a bilinear form, divided by 2^shift; rounds and bytes an output as `mul`, whatever it sums over.

        With `select` (int64, flat positions in the output) only those outputs are made, as a 1-D share; nothing is sent
        for the others. widths: as for `mul`. Raises DomainError for operands that do not fit the form, and as `mul`.
        """
        self.lacks("bilinear")

    def matmul(
        self, x: Share, y: Share, shift: int = 0, select: Tensor | None = None, widths: BitWidths | None = None
    ) -> Share:  # fmt: skip
        """`bilinear` of x [..., M, K] and y [..., K, N] to [..., M, N], rounds and bytes too; protocols define that."""
        return self.bilinear(MATMUL, x, y, shift, select, widths)

    def conv2d(self, x: Share, w: Share, conv: Conv2d, shift: int = 0) -> Share:
        """`bilinear` of x [B, C, H, W], w [O, C / groups, kh, kw], rounds and bytes too; protocols define that."""
        return self.bilinear(conv, x, w, shift)

    def bilinear_public(self, form: BilinearForm, x: Share, c: Tensor, shift: int = 0, left: bool = False) -> Share:
        """B(x, c), or B(c, x) if `left`, for public ring elements c, divided by 2^shift: local but for a truncation.

        The shape of the form's output. That is 1 round and the bytes of `truncate` on the outputs, or nothing if
        `shift` is 0. Errors as `bilinear`.
        """
        made = x.map(lambda part: form.product(c, part) if left else form.product(part, c))
        macs = form.macs(c.shape, x.shape) if left else form.macs(x.shape, c.shape)
        self.ledger.add_macs(macs * len(x.parts))
        return self.truncate(made, shift)

    def poly(self, x: Share, coefficients: Sequence[int], shift: int = 0) -> Share:
        """c0 + c1 x + c2 x^2 (+ c3 x^3) with public ring coefficients (degree 2 or 3), in one step, divided by 2^shift.

        The shape of x. The exact value before division must stay below 2^(ring bits - 2). 2 rounds (1 without shift);
        bytes an element in trio 38.75 for degree 2, 46.75 for degree 3, in quad 67.25 and 83.25. Raises DomainError for
        another degree (plain takes any) and for a shift outside the ring.
        """
        self.lacks("poly")

    # -- comparisons, bits, and the way between bits and numbers -----------------------------------------------
    def msb(self, x: Share, offsets: Sequence[int] = (0,), bits: int | None = None, low: int = 0) -> BitShare:
        """Rows of sign bits: row k is [x + offsets[k] < 0], for x flattened; [len(offsets) rows, x.numel()].

        `bits=b` promises -2^(b-1) <= x + offset < 2^(b-1) and uses a shorter adder; default: full ring. `low=d` leaves
        the d lowest positions out of the adder: where 0 <= x + offset < 2^d the bit may be 1 (and the range starts at
        -2^(b-1) + 2^d). All 64 bits with the prefix adder: 4 rounds, 40.75 bytes an element in trio and 74 in quad; 39
        bits: 4 rounds, 24.1 and 43.5. Trio's ripple adder: 63 rounds, 31.6 bytes. Raises DomainError unless 2 <= b <=
        ring bits and 0 <= d <= b - 2 (trio, quad, dealer).
        """
        self.lacks("msb")

    def inject(
        self, bits: BitShare, x: Share | None, weights: BitWeights, constants: BitWeights, shift: int = 0,
        low: int | None = None,
    ) -> Share:  # fmt: skip
        """sum over rows k of bit_k * (weights[k] * x + constants[k]), divided by 2^shift.

        `x` is flattened to [count]; with `x=None` the weights are ignored (bit to arithmetic). Result is 1-D [count]. 1
        round (2 with a shift). One row without shift, bytes an element: 32 with a weight and 24 without in trio, 56 and
        40 in quad. With `low`, which goes without shift, only the lowest `low` bits of the result are right, and trio
        and dealer send as many of each number (64-bit ring). Raises DomainError unless x has bits.count elements and
        weights and constants are one for each row, and for an impossible `low`.
        """
        self.lacks("inject")

    def takes_keys(
        self, count: int, shape: PiecesShape, other: Callable[..., Cost], *facts: Hashable
    ) -> bool:  # fmt: skip
        """Whether `piecewise` on `count` elements is the way to go, where another way costs other(prices, *facts).

        Local and public. By `PrivateConfig.adder` and the stated network, once for each `other`, which is a function
        of a module, and facts; False where the protocol has no such keys.
        """
        return False

    def key_seconds(self, count: int, shape: PiecesShape) -> float | None:
        """How long `piecewise` on `count` elements takes on the stated network, the cipher's work included.

        Local and public. None where no network is stated, or the protocol has no such keys.
        """
        return None

    def piecewise(self, x: Share, pieces: Pieces) -> list[Share]:
        """Piecewise polynomials of x with common thresholds, in one round: a share of x's shape for each output.

        1 round, or 2 for each different shift above 0. 64-bit ring, degree 1, b bits without the d lowest: 64 (b - 1 -
        d) bytes of keys an element, and some 60 bytes. Errors: only the rounding of a shift. Raises DomainError for
        bits and low as `msb`, and UnsupportedOp without comparison keys (only trio and dealer have them).
        """
        self.lacks("comparison keys", "trio or dealer, or another adder")

    def exponential(self, x: Share, keep: BitShare, plan: Exponential) -> Share:
        """bit_n * e^(x_n / 2^plan.frac), with TOTAL_BITS - plan.shift fractional bits, in the shape of x; 64-bit ring.

        Where the bit is 1, x / 2^plan.frac lies in [TOP - SPAN, TOP), -15 to 1; elsewhere x may be anything. Relative
        error 2^-15, absolute 2^-18 and one unit. 2 rounds; 65.75 bytes an element in trio with 24 fractional bits of
        the result. Raises DomainError in a 32-bit ring and unless keep is one row of as many bits, and UnsupportedOp
        under a protocol without it.
        """
        self.lacks("exponentials in one step", "trio or dealer")

    def relu_minus_waves(self, x: Share, negative: BitShare, angle: Share, plan: Waves) -> Share:
        """(1 - bit_n) x_n less the sum of waves of angle_n, with `plan.frac` fractional bits, in the shape of x.

        Of angles the lowest plan.angle_bits bits count, of x plan.bits, and as many are right. 64-bit ring. Error of
        the sum: 2 units, and what its tables lose (`protocols.waves`). 2 rounds; bytes an element in trio: 4 bits / 8,
        2 wide / 8, and those of the waves' shares and of 2 (bits - narrow) bits. Raises DomainError in a 32-bit ring
        and unless there are one row of bits and as many angles, and UnsupportedOp under a protocol without it.
        """
        self.lacks("sums of waves", "trio or dealer, without exact divisions")

    def xor(self, x: BitShare, y: BitShare) -> BitShare:
        """Bitwise exclusive or x ^ y, of equal rows and count, which nobody checks; as many rows. Local."""
        return BitShare(tuple(map(xor, x.parts, y.parts)), x.count)

    def invert(self, x: BitShare) -> BitShare:
        """Bitwise not, of the rows and count of x. Local."""
        self.lacks("invert")

    def and_(self, x: BitShare, y: BitShare) -> BitShare:
        """Bitwise and x & y, row by row, of equal rows and count: 1 round; 3 bits a gate in trio, 5 in quad.

        Raises TransportError if parties were given different sizes.
        """
        self.lacks("and_")

    def a2b(self, x: Share, bits: int | None = None) -> BitShare:
        """The `bits` lowest bits of x (flattened), default all: [bits rows, x.numel()], row i holds bit i of x.

        A ripple adder, whatever `PrivateConfig.adder` says: bits - 1 rounds (63); 31.6 bytes an element in trio, 55.4
        in quad, for 64 bits. Raises DomainError unless 2 <= bits <= ring bits (trio, quad, dealer).
        """
        self.lacks("a2b")

    # -- rows of a table at indices that no party learns, and secret orders ------------------------------------
    def receive_index(self, count: int, domain: int) -> Index:
        """This party's hold on `count` indices in 0 .. domain-1 that the client shares right now.

        From the client, bytes an index (L = ceil(log2 domain), domain > 1): trio 2 keys of 24 + 16 L to each of three
        parties, quad 4 to each of four; as one-hot rows (dealer, preprocessed calls) 8 domain to each party that
        receives inputs; plain 8. No round is booked.
        """
        self.lacks("receive_index")

    def lookup(self, index: Index, table: Share | Tensor) -> Share:
        """Rows of `table` [domain, D] at the secret indices: [count, D]. A plain table holds public ring elements.

        1 round, whatever the domain; bytes an output in trio 24 for a shared table and 16 for a public one, in quad 40
        and 24. From one-hot rows a shared table costs the same, a public one nothing. Nothing is truncated. Raises
        DomainError for a table of another number of rows than the index's domain (not under plain).
        """
        self.lacks("lookup")

    def permutation(self, size: int, *, reuse: bool = False, blocks: int = 1) -> Permutation:
        """A fresh, uniform permutation of `size` elements that no party knows. Local (dealer: 4 bytes an element).

        What is shuffled by it may be opened to all. reuse: several bit vectors may be opened in this order, which links
        them (`Permutation`). blocks: that many equal runs of elements, each in an order of its own. Raises DomainError
        for a size below 1, or unequal runs.
        """
        if size < 1 or blocks < 1 or size % blocks:
            raise DomainError(f"permutation: got size {size} in {blocks} blocks; want at least 1, in equal blocks")
        return Permutation(size, self._order(size, blocks), reuse)

    def _order(self, size: int, blocks: int) -> tuple[Tensor | None, ...]:
        """This party's sub-permutations of a fresh secret permutation."""
        self.lacks("order")

    def random_bits(self, rows: int, count: int) -> BitShare:
        """Uniform secret bits that no party knows (plain: in the clear): [rows, count]. Local."""
        self.lacks("random_bits")

    def shuffle(self, x: Share, order: Permutation, undo: bool = False, places: Tensor | None = None) -> Share:
        """Rows of x [n, ...] in the secret order, under fresh masks; `undo` puts shuffled rows back. Comet, Protocol 1.

        places: int64 [m], public: the only rows of the result that are wanted, without `undo`. The shape of x, or
        [m, ...]. Bytes a moved element: trio 40, dealer 48, quad 96 (and 64 in all); with places 16 and 32, and 24 and
        16 for each that is wanted. Rounds: trio 2 (3 to undo), dealer 1 (2), quad 3. Raises DomainError unless n is the
        permutation's size, and for other places; in quad UnsupportedOp in preprocessed calls, ProtocolAbort for a lie.
        """
        return Share(self._moved(x.parts, order, moved_rows(x, order, undo, places), undo))

    def shuffle_bits(self, x: BitShare, order: Permutation) -> ShuffledBits:
        """All bit vectors in the same secret order. Rounds as `shuffle`, the bytes of a word as those of an element.

        Raises DomainError unless the vectors have the permutation's size; otherwise as `shuffle`.
        """
        return ShuffledBits(self._moved_bits(x, order, undo=False), order)

    def unshuffle_bits(self, x: ShuffledBits) -> BitShare:
        """The vectors in the order before `shuffle_bits`; rounds and bytes as `shuffle` with `undo`."""
        return self._moved_bits(x.bits, x.order, undo=True)

    def _moved_bits(self, x: BitShare, order: Permutation, undo: bool) -> BitShare:
        moved = self._moved(self._as_elements(x.parts), order, moved_bits(x, order), undo)
        return BitShare(self._as_elements(moved), x.count)

    def _as_elements(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Parts of bits masked as those of elements are, under exclusive or; applied again, parts of bits."""
        return parts

    def _moved(self, parts: tuple[Tensor, ...], order: Permutation, kind: Moved, undo: bool) -> tuple[Tensor, ...]:
        self.lacks("moved")

    def open_shuffled(self, x: ShuffledBits) -> Tensor:
        """The bits in their secret order, to all parties: bool [rows, count].

        What is learned: how many bits are set, and which of two vectors' set bits coincide if they share an order.
        1 round; bits sent for each opened one: trio and dealer 3; quad 4 and 129 bytes, after a `verify` (3 rounds in
        all). Raises ProtocolAbort for a second vector in an order that is not declared for reuse, and for a lie (quad);
        UnsupportedOp in preprocessed calls.
        """
        if self.runs_ahead:
            raise UnsupportedOp(
                "open_shuffled: a party runs ahead of the data and cannot receive what is opened; want calls that "
                "are not preprocessed"
            )
        x.order.spend(x.bits.rows)
        return unpacked(self._opened(x), x.bits.count).bool()

    def _opened(self, x: ShuffledBits) -> Tensor:
        self.lacks("opened")

    # -- the edges of the sharing --------------------------------------------------------------------------------
    def receive_input(self, shape: tuple[int, ...]) -> Share:
        """This party's part of ring elements of `shape` that the client shares right now.

        From the client 8 bytes an element (4 in the 32-bit ring) to each of two parties (trio, dealer), three (quad) or
        one (plain). No round is booked. Raises TransportError if the client sends another shape.
        """
        self.lacks("receive_input")

    def verify(self) -> None:
        """Make sure that no party has deviated so far; openings do it first. Raises ProtocolAbort.

        Semi-honest protocols do nothing. Quad: 35 bytes in all and 2 rounds, whatever was computed.
        """

    def reveal(self, pieces: Sequence[tuple[int, Share]]) -> None:
        """Send each endpoint outside the parties what it needs to open its piece; the parties learn nothing.

        pieces: (number of the endpoint, a share of any shape). It opens them with `protocols.session.opened`. 16 bytes
        an element (8 in the 32-bit ring; plain: half), no round; in quad 64 bytes a piece more, after one `verify` with
        its 2 rounds, which raises ProtocolAbort and sends nothing if a party deviated.
        """
        self.lacks("reveal")

    def reveal_to_client(self, x: Share) -> None:
        """`reveal` of one value to the client: cost and errors as `reveal`."""
        self.reveal([(CLIENT, x)])


DECLARED = tuple(
    name for name, value in vars(Protocol).items() if callable(value) and not name.startswith("__") and name != "take"
)
"""What is a primitive, and the steps that this interface leaves to protocols."""
