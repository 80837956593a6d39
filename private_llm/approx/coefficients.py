"""Fitted constants, written by `scripts/fitting/fit_coefficients.py` (do not edit; run the script)."""

from private_llm.approx.chain import Chain, Form, Step
from private_llm.approx.cubic import Cubic

# fmt: off

GELU_ERF = Chain(
    argument=19, error=1.67e-04,
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
            Form(28, -96202752, (376, -55, 789,)),
            Form(31, -272408437, (899, -2424, 895,)),
            18,
        ),
    ),
)
"""t Phi(-t) at t = 2 (z + 1), zero at t = 4."""

GELU_TANH = Chain(
    argument=19, error=1.48e-04,
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
            Form(28, -118759424, (468, -76, 982,)),
            Form(31, -220199929, (737, -1825, 697,)),
            18,
        ),
    ),
)
"""t (1 - tanh(sqrt(2/pi) (t + 0.044715 t^3))) / 2 at t = 2 (z + 1), zero at t = 4."""

SILU = Chain(
    argument=21, error=1.24e-05,
    steps=(
        Step(
            Form(21, 0, (1,)),
            Form(21, 0, (1,)),
            20,
        ),
        Step(
            Form(20, 0, (0, 1,)),
            Form(28, 0, (-144, 256,)),
            20,
        ),
        Step(
            Form(30, -139161556, (646, -314, 773,)),
            Form(30, -851656880, (40, 776, -403,)),
            20,
        ),
        Step(
            Form(30, -393848509, (35, 234, 240, 1168,)),
            Form(30, -668807266, (671, -728, 963, 819,)),
            20,
        ),
        Step(
            Form(29, 30971904, (-13, 19, 131, 0, 0,)),
            Form(31, 1647795833, (2319, -5930, 3055, 128, -11038,)),
            18,
        ),
    ),
)
"""t / (1 + e^t) at t = 8 (z + 1), zero at t = 14."""

LOGISTIC = Chain(
    argument=21, error=4.60e-05,
    steps=(
        Step(
            Form(21, 0, (1,)),
            Form(21, 0, (1,)),
            20,
        ),
        Step(
            Form(20, 0, (0, 1,)),
            Form(28, 0, (84, 256,)),
            20,
        ),
        Step(
            Form(30, 926640218, (-395, -1367, 554,)),
            Form(30, 96694831, (48, 238, 960,)),
            20,
        ),
        Step(
            Form(29, -35651584, (88, 43, -896, 0,)),
            Form(31, 808180844, (66, -322, 3684, -10044,)),
            18,
        ),
    ),
)
"""1 / (1 + e^t) at t = 8 (z + 1), zero at t = 10."""

SOFTPLUS = Chain(
    argument=21, error=4.68e-05,
    steps=(
        Step(
            Form(21, 0, (1,)),
            Form(21, 0, (1,)),
            20,
        ),
        Step(
            Form(20, 0, (0, 1,)),
            Form(28, 0, (29, 256,)),
            20,
        ),
        Step(
            Form(30, 362970388, (-135, -122, 598,)),
            Form(30, 84157602, (55, -24, 764,)),
            20,
        ),
        Step(
            Form(29, -182630144, (287, 490, 6, 0,)),
            Form(31, -240299819, (-74, 448, -2293, 8720,)),
            18,
        ),
    ),
)
"""-log(1 + e^-t) at t = 8 (z + 1), zero at t = 10."""

EXP = Chain(
    argument=21, error=3.91e-05,
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
            Form(29, -27659421, (169, -74, 179,)),
            Form(30, 314138813, (40, 294, 343,)),
            20,
        ),
        Step(
            Form(29, 17307944, (-18, 90, 62, 449,)),
            Form(31, 82602269, (-214, 312, 417, 2831,)),
            26,
        ),
    ),
)
"""e^x at x = 8 (z - 1), -14 <= x <= 1/4."""

RECIPROCAL = Cubic(
    power=-1.0, centre=1.1015625, slack=0.00390625, error=1.13e-05,
    coefficients=(0.907791189, -0.824083335, 0.755249975, -0.687500000),
)

RSQRT = Cubic(
    power=-0.5, centre=1.15, slack=0.0078125, error=1.68e-05,
    coefficients=(0.932489824, -0.405527333, 0.268563734, -0.187500000),
)
