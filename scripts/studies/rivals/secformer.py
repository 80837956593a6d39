"""SecFormer's functions (Luo et al., ACL Findings 2024): GELU by a Fourier series, 2Quad by Goldschmidt division.

    GELU(x) ~ x (1 + f(x / sqrt 2)) / 2, f the sine series of `formulas.FOURIER` up to 1.7, -1 or 1 beyond

SecFormer gets sines from one opening of x plus a mask whose sines and cosines its dealer has shared. There is no such
material here; x f(x / sqrt 2) / 2 is an even function, so this file computes the same function of x^2 as a polynomial
of degree 4, by three products. It is 9e-5 from the series, which is 0.02 from GELU.

    1. [x < -2.404], [x < 2.404] by one coarse comparison
    2. v = (x / 2)^2, w = v (v + a), q = w (b w + c v + d) = x f(x / sqrt 2) / 2      three products
    3. [inside] (x / 2 + q) + [above] x                                                two injections

Division: y = mean / 128 lies in (0, 2); r = 1; thirteen times m = 2 - y, y = y m, r = r m; then r = 128 / mean.
SecFormer's LayerNorm takes the root in the same way (eight steps of three products and two rounds each); this library's
takes 15 to 17 rounds in all and is used instead. Its SiLU: none is given, so this library's.
"""

from private_llm.approx.chain import Chain, Form, Step, evaluate
from private_llm.exact.comparisons import coarse_bits
from private_llm.tensor.fixed import Fixed
from rivals.formulas import FOURIER_END

FACTORS = (-4.191255881, -0.04020302, -0.054099898, -0.377829375)
"""root, b, c, d: least squares at 2000 Chebyshev nodes of [0, 2.42], factored at the real root (tests refit it)."""

END = FOURIER_END * 2.0**0.5
"""Beyond it the result is x or 0."""


def _chain() -> Chain:
    root, b, c, d = FACTORS
    return Chain(
        argument=19,
        error=9e-5,
        steps=(
            Step(Form(19, 0, (1,)), Form(19, 0, (1,)), 20),
            Step(Form(20, 0, (0, 1)), Form(20, round(root * 2**20), (0, 1)), 20),
            Step(
                Form(20, 0, (0, 0, 1)),
                Form(38, round(d * 2**38), (0, round(c * 2**18), round(b * 2**18))),
                19,
            ),
        ),
    )


HALF_X_ERF = _chain()
"""x f(x / sqrt 2) / 2 at z = x / 2, |x| <= 2.42."""

CENTRE = 7
"""Bits of the mean that is scaled to 1."""
STEPS = 13
"""As in SecFormer's code: reaches 2^-18 from y = 1/655 on."""
BITS = 24
"""Fractional bits of y and r: 13 steps multiply up to 655."""


def fourier_gelu(x: Fixed) -> Fixed:
    """SecFormer's GELU of x (any shape), for |x| < 2^20 - 2^10; 64-bit ring only, else DomainError.

    Absolute error 2e-4 from its formula and 0.02 from GELU; the formula jumps by 0.026 at +-2.404, where up to 2^-6
    above either side may be taken. Exactly x or 0 beyond 2.42. 198 bytes an element, 12 rounds.
    """
    rows = coarse_bits(x, [-END, END])
    half = x.with_share(x.share, x.frac + 1)
    with x.proto.may_wrap():  # far from the middle the polynomial is garbage, which a bit takes away
        inside = evaluate(HALF_X_ERF, half.rescale(HALF_X_ERF.argument), frac=x.frac + 1) + half
        chosen = inside.select(x.proto.xor(rows.row(0), rows.row(1)), [1], [0.0], frac=x.frac)
    return chosen + x.select(x.proto.invert(rows.row(1)), [1], [0.0])


def goldschmidt(mean: Fixed) -> Fixed:
    """1 / mean for 0.2 <= mean < 255, any shape: SecFormer's division, with 24 + 7 fractional bits.

    Relative error 2e-4 (3e-5 measured). 27 rounds, 800 bytes a row.
    """
    y = mean.with_share(mean.share, mean.frac + CENTRE).rescale(BITS)
    m = 2.0 - y
    r = m
    y = y.mul(m, frac=BITS)
    for _ in range(STEPS - 2):
        m = 2.0 - y
        both = y.stack(r).mul(m.stack(m), frac=BITS)
        y, r = both.view(lambda part: part[0]), both.view(lambda part: part[1])
    r = r.mul(2.0 - y, frac=BITS)
    return r.with_share(r.share, BITS + CENTRE)
