"""Fitted sums of waves, written by `scripts/fitting/fit_waves.py` (do not edit; run the script)."""

from private_llm.approx.wave_sums import WaveSum

# fmt: off

SILU = WaveSum(
    top=10.75, factor=13, factor_bits=3, period_log2=5, resolution=3,
    constant=-0.245714914345,
    waves=(
        (-0.280348725027, 0.468012317068),
        (0.115774134422, 0.485859730777),
        (0.266859070485, 0.170723050987),
        (0.134604674505, -0.0398758774722),
        (0.0131678995325, -0.0391714441999),
        (-0.00434780600664, -0.00480182228512),
    ),
    error=0.000133,
)
"""t / (1 + e^t)"""

GELU_ERF = WaveSum(
    top=4.0, factor=1, factor_bits=0, period_log2=3, resolution=3,
    constant=-0.165715178863,
    waves=(
        (-0.0857160954506, 0.3636641813),
        (0.167318479027, 0.198513593737),
        (0.088772692068, -0.0159326000234),
        (-0.00157551495877, -0.0196584608498),
        (-0.00313139292898, 0.000548275871087),
    ),
    error=0.000105,
)
"""t erfc(t / 2^(1/2)) / 2"""

GELU_TANH = WaveSum(
    top=4.0, factor=1, factor_bits=0, period_log2=3, resolution=3,
    constant=-0.169176007878,
    waves=(
        (-0.0851024548782, 0.369685185989),
        (0.171620355482, 0.197923089022),
        (0.0880183878905, -0.0182538138059),
        (-0.00241861405271, -0.0193433155995),
        (-0.00298451662506, 0.000718335978685),
    ),
    error=9.53e-05,
)
"""t (1 - tanh(...)) / 2, the other half of GELU by tanh"""
