"""Fitted constants, written by `scripts/fit_coefficients.py` (do not edit; run the script)."""

from private_llm.approx.chain import Chain, Form, Step
from private_llm.approx.cubic import Cubic

# fmt: off

GELU_ERF = Chain(
    argument=19, error=1.76e-04,
    steps=(
        Step(
            Form(19, 0, (1,)),
            Form(19, 0, (1,)),
            17,
        ),
        Step(
            Form(17, 0, (0, 1,)),
            Form(25, 0, (-122, 256,)),
            17,
        ),
        Step(
            Form(26, -31195136, (122, -18, 256,)),
            Form(30, -105038206, (346, -938, 346,)),
            18,
        ),
    ),
)
"""t Phi(-t) at t = 2 (z + 1), zero at t = 4."""

GELU_TANH = Chain(
    argument=19, error=1.43e-04,
    steps=(
        Step(
            Form(19, 0, (1,)),
            Form(19, 0, (1,)),
            17,
        ),
        Step(
            Form(17, 0, (0, 1,)),
            Form(25, 0, (-122, 256,)),
            17,
        ),
        Step(
            Form(26, -30801920, (122, -21, 256,)),
            Form(30, -106105244, (353, -878, 335,)),
            18,
        ),
    ),
)
"""t (1 - tanh(sqrt(2/pi) (t + 0.044715 t^3))) / 2 at t = 2 (z + 1), zero at t = 4."""

SILU = Chain(
    argument=21, error=1.16e-04,
    steps=(
        Step(
            Form(21, 0, (1,)),
            Form(21, 0, (1,)),
            18,
        ),
        Step(
            Form(18, 0, (0, 1,)),
            Form(27, 0, (-4, 512,)),
            18,
        ),
        Step(
            Form(28, -10886705, (117, -1543, 2048,)),
            Form(28, -76517435, (-29, -599, 334,)),
            18,
        ),
        Step(
            Form(28, -20553728, (16, 195, -628, 0,)),
            Form(31, 104079706, (-1685, 10699, -17503, -59864,)),
            18,
        ),
    ),
)
"""t / (1 + e^t) at t = 8 (z + 1), zero at t = 12."""

LOGISTIC = Chain(
    argument=21, error=4.61e-05,
    steps=(
        Step(
            Form(21, 0, (1,)),
            Form(21, 0, (1,)),
            18,
        ),
        Step(
            Form(18, 0, (0, 1,)),
            Form(27, 0, (42, 512,)),
            18,
        ),
        Step(
            Form(28, 213929853, (-91, -1261, 512,)),
            Form(28, 22319608, (11, 215, 878,)),
            18,
        ),
        Step(
            Form(28, -10515968, (26, 50, -1060, 0,)),
            Form(31, 1374638649, (110, -2397, 25034, -80122,)),
            18,
        ),
    ),
)
"""1 / (1 + e^t) at t = 8 (z + 1), zero at t = 10."""

EXP = Chain(
    argument=21, error=4.41e-05,
    steps=(
        Step(
            Form(21, 0, (1,)),
            Form(21, 0, (1,)),
            20,
        ),
        Step(
            Form(20, 0, (0, 1,)),
            Form(28, 0, (-19, 256,)),
            20,
        ),
        Step(
            Form(29, -19830416, (121, -53, 128,)),
            Form(30, 183028824, (23, 171, 200,)),
            20,
        ),
        Step(
            Form(29, 11470436, (-12, 60, 41, 715,)),
            Form(31, 124821990, (-323, 472, 632, 10241,)),
            26,
        ),
    ),
)
"""e^x at x = 8 (z - 1), -14 <= x <= 1/4."""

RECIPROCAL = Cubic(
    power=-1.0, centre=1.125, slack=0.00390625, error=2.42e-05,
    coefficients=(0.888867613, -0.790174390, 0.712087043, -0.625000000),
)

RSQRT = Cubic(
    power=-0.5, centre=1.15, slack=0.0078125, error=1.68e-05,
    coefficients=(0.932489824, -0.405527333, 0.268563734, -0.187500000),
)
