"""GELU and softmax under each value of `PrivateConfig.approximations`; SiLU and norms are this library's under all.

None of the systems says how to compute SiLU: PUMA's LLaMA runs on its framework's own sigmoid, the others have no model
with it. MPCFormer and PUMA compute LayerNorm exactly; for SecFormer's see `secformer`.
"""

from __future__ import annotations

from torch import Tensor

from private_llm.approx import gelu as own
from private_llm.approx.mpcformer import quad, two_quad, two_quad_ragged
from private_llm.approx.puma import puma_exp, puma_gelu
from private_llm.approx.secformer import fourier_gelu, goldschmidt
from private_llm.approx.softmax import softmax as own_softmax
from private_llm.approx.softmax import softmax_ragged as own_ragged
from private_llm.exact.ragged_rows import Rows
from private_llm.tensor.fixed import Fixed

_GELUS = {"mpcformer": quad, "secformer": fourier_gelu, "puma": puma_gelu}


def gelu(x: Fixed, approximate: str = "none") -> Fixed:
    """GELU of x (any shape) as the session's configuration wants it; cost and domain are those of the function.

    The others have one formula for both spellings. Raises UnsupportedOp for another spelling, with "ours".
    """
    function = _GELUS.get(x.session.config.approximations)
    return own.gelu(x, approximate) if function is None else function(x)


def softmax(x: Fixed, sink: Fixed | None = None, present: Tensor | None = None) -> Fixed:
    """Softmax over the last dimension as the session's configuration wants it; else as `approx.softmax.softmax`.

    present: for this library's own alone.
    """
    name = x.session.config.approximations
    if name == "puma":
        return own_softmax(x, sink, exponential=puma_exp, coarse=False)
    if name == "secformer":
        return two_quad(x, sink, inverse=goldschmidt)
    return two_quad(x, sink) if name == "mpcformer" else own_softmax(x, sink, present=present)


def softmax_ragged(x: Fixed, rows: Rows, sink: Fixed | None = None) -> Fixed:
    """The same for each row of the flat x; else as `approx.softmax.softmax_ragged`."""
    name = x.session.config.approximations
    if name == "puma":
        return own_ragged(x, rows, sink, exponential=puma_exp, coarse=False)
    if name == "secformer":
        return two_quad_ragged(x, rows, sink, inverse=goldschmidt)
    return two_quad_ragged(x, rows, sink) if name == "mpcformer" else own_ragged(x, rows, sink)
