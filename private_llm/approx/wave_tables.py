"""Fitted sums of waves, written by `scripts/fit_waves.py` (do not edit; run the script)."""

from private_llm.approx.wave_sums import WaveSum

# fmt: off

SILU = WaveSum(
    top=11.25, factor=13, factor_bits=3, period_log2=5, resolution=2,
    constant=-0.290358261493,
    waves=(
        (-0.287536499, 0.549499682112),
        (0.177386987542, 0.496765877269),
        (0.276973413129, 0.132812172886),
        (0.116328111155, -0.0464013892644),
        (0.0103292311671, -0.0328029901885),
        (-0.00304905886989, -0.00413075981613),
    ),
    error=7.47e-05,
)
"""t / (1 + e^t)"""

GELU_ERF = WaveSum(
    top=4.0, factor=1, factor_bits=0, period_log2=3, resolution=3,
    constant=-0.153889751274,
    waves=(
        (-0.0856444687239, 0.342456743809),
        (0.152163823094, 0.198409547588),
        (0.0886880818201, -0.00757066821512),
        (0.00172746379048, -0.0196163795593),
        (-0.00312189739067, -0.000217056318029),
    ),
    error=8.06e-05,
)
"""t erfc(t / 2^(1/2)) / 2"""

GELU_TANH = WaveSum(
    top=4.0, factor=1, factor_bits=0, period_log2=3, resolution=3,
    constant=-0.159043543951,
    waves=(
        (-0.0851479684835, 0.351518739105),
        (0.15864971856, 0.19798870036),
        (0.088076626493, -0.0111089452461),
        (0.000395493658883, -0.0193773003714),
        (-0.00299719127054, 6.90923910736e-05),
    ),
    error=7.1e-05,
)
"""t (1 - tanh(...)) / 2, the other half of GELU by tanh"""
