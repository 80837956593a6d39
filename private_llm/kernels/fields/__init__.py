"""Local steps on ring elements and packed fields, each declared once: what it reads, what it writes, and how.

The kernels of CPUs and of GPUs are made of these declarations: `cpu.py`, `triton.py`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class FieldStep:
    """A step that computes for each of n elements on its own.

    reads, writes: names of ring elements and of packed fields; what is read and written is changed in place. packed:
    which are fields. numbers: names of whole numbers that are the same for all elements. lines: assignments, one after
    the other. Every value is cut to the bits of an element, so a shift to the right brings in zeros, and what is packed
    to the width of a field. Lines also know `one`, `top` (bits - 1), `quarter` (2^(bits-2)) and, where f is a number,
    `up` (bits - f). seconds: about what an element takes one thread.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    packed: tuple[str, ...]
    numbers: tuple[str, ...]
    seconds: float
    lines: tuple[str, ...]

    @property
    def operands(self) -> tuple[str, ...]:
        """A kernel's, in its order: what is only read, then what is written."""
        return (*(name for name in self.reads if name not in self.writes), *self.writes)


def _step(reads: str, writes: str, numbers: str, seconds: float, *lines: str) -> FieldStep:
    """reads, writes: names, those of packed fields with [] after them."""
    # in order: a set has another one in each process, and so would the source that a compiled kernel is kept for
    packed = tuple(dict.fromkeys([name[:-2] for name in f"{reads} {writes}".split() if name.endswith("[]")]))
    names = [tuple(each.replace("[]", "").split()) for each in (reads, writes, numbers)]
    return FieldStep(names[0], names[1], packed, names[2], seconds * 1e-9, lines)


STEPS = {
    "pack_fields": _step("values", "words[]", "", 1, "words = values"),
    "unpack_fields": _step("words[]", "values", "", 1, "values = words"),
    "trunc_helper": _step(
        "error g1 g2 z1 rho1[] zeta1[] zeta2[]", "a1 a2 z2 rho2[]", "f", 4,
        "r = error + g1 + g2",
        "z2 = (r >> f) - z1",
        "rho2 = (r >> top) - rho1",
        "a1 = z1 + (zeta1 << up)",
        "a2 = z2 + (zeta2 << up)",
    ),
    "trunc_open": _step(
        "mine theirs rho[] zeta[]", "w packed[]", "f", 3,
        "w = mine + theirs + quarter",
        "packed = zeta + (one - (w >> top)) * rho",
    ),
    "trunc_close": _step(
        "w mine[] theirs[] z zeta[]", "half own", "f", 3,
        "own = z + (zeta << up)",
        "half = (w >> f) + ((mine + theirs) << up) - (quarter >> f) - own",
    ),
    # a checked truncation (protocols/quad/arithmetic.py): what is opened, what party 0 is told, a piece, a part
    "check_opening": _step(
        "first second e g1 g2", "r value", "", 1,
        "r = e + g1 + g2",
        "value = first + second + r + quarter",
    ),
    "check_told": _step(
        "w t1 t2[] t3[] half own", "u high beta[] value", "f", 3,
        "turned = ~w",
        "u = t1 + (t3 << up)",
        "high = (turned >> f) - t1",
        "beta = (turned >> top) - t2",
        "value = half + own + u",
    ),
    "check_piece": _step(
        "e g1 g2 t1 t2[] t3[]", "fields[] u", "f", 3,
        "r = e + g1 + g2",
        "fields = (r >> top) * t2 + t3",
        "u = t1 + (t3 << up)",
    ),
    "check_part": _step(
        "r beta[] theirs[] high a1 a2", "made value", "f", 3,
        "turned = ~r",
        "made = (turned >> f) + (((r >> top) * beta + theirs) << up) - (quarter >> f) - high",
        "value = made + a1 + a2",
    ),
    # of masks modulo 2^(shift + narrow); kept: 2^narrow - 1. zeros, ones: by the upper bit of what is opened
    "wraps": _step(
        "g1 g2 drawn_zeros[] drawn_ones[]", "zeros[] ones[]", "shift narrow kept", 3,
        "h = ((g1 >> shift) & kept) + ((g2 >> shift) & kept)",
        "zeros = (h >> narrow) + ((h >> (narrow - one)) & one) - drawn_zeros",
        "ones = (h >> narrow) - drawn_ones",
    ),
    "widened": _step(
        "opened g piece zeros[] ones[]", "piece", "shift narrow kept first", 3,
        "m = (opened >> shift) & kept",
        "wrap = zeros + (m >> (narrow - one)) * (ones - zeros)",
        "value = (wrap << narrow) - ((g >> shift) & kept) + first * (m - ((one << narrow) >> (one + one)))",
        "piece = piece - value",
    ),
}  # fmt: skip
