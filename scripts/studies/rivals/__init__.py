"""GELU and softmax of MPCFormer, SecFormer and PUMA, as a plug-in of `PrivateConfig.approximations`.

    PYTHONPATH=scripts/studies python scripts/bench/run.py --plugin rivals gelu softmax --approximations puma
    PrivateConfig(approximations="mpcformer", plugins=("rivals",))

None of the systems says how to compute SiLU: PUMA's LLaMA runs on its framework's own sigmoid, the others have no model
with it. MPCFormer and PUMA compute LayerNorm exactly; for SecFormer's see `secformer`. This library's are used.
"""

from functools import partial

from private_llm.approximations import Approximations, register_approximations
from rivals.emulation import emulated
from rivals.mpcformer import quad, two_quad, two_quad_ragged
from rivals.puma import puma_gelu, puma_softmax, puma_softmax_ragged
from rivals.secformer import fourier_gelu, goldschmidt

_SQUARED = 12
"""Bits of magnitude of what MPCFormer's GELU squares."""

register_approximations(Approximations(
    "mpcformer", quad, two_quad, two_quad_ragged, partial(emulated, "mpcformer"), distilled="GELU and softmax",
    squares=True, gelu_bits=_SQUARED,
))  # fmt: skip
register_approximations(Approximations(
    "secformer", fourier_gelu, partial(two_quad, inverse=goldschmidt), partial(two_quad_ragged, inverse=goldschmidt),
    partial(emulated, "secformer"), distilled="softmax", squares=True,
))  # fmt: skip
register_approximations(Approximations("puma", puma_gelu, puma_softmax, puma_softmax_ragged, partial(emulated, "puma")))
