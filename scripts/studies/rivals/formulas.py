"""Other systems' approximations as formulas on plain numbers: what the private functions are compared with.

`gelu` and `softmax` of a name give what a model computes whose non-linear functions were replaced by those of MPCFormer
(Li et al., ICLR 2023), SecFormer (Luo et al., ACL Findings 2024) or PUMA (Dong et al., arXiv 2307.12533).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

QUAD = (0.5, 0.25, 0.125)
"""MPCFormer's Quad: GELU(x) ~ 0.125 x^2 + 0.25 x + 0.5, from the constant on."""

SHIFT = 5.0
"""c of MPCFormer's 2Quad: (x + c)^2 / sum (x + c)^2."""

FOURIER = (1.25772, -0.0299154, 0.382155, -0.0519123, 0.196033, -0.0624557, 0.118029)
"""As in SecFormer's public code: erf(u) ~ sum_k FOURIER[k - 1] sin(k pi u / 10) for |u| <= 1.7."""

FOURIER_END = 1.7
"""Where SecFormer's erf becomes -1 or 1. Its code has 2.5, where the series is so far off that GELU errs by 0.058."""

PUMA_BREAKS = (-4.0, -1.95, 3.0)
"""PUMA: zero, cubic, sextic, identity. (BumbleBee's version has -5, -1.97 and 3 with other constants.)"""

PUMA_CUBIC = (-0.5054031199708174, -0.42226581151983866, -0.11807612951181953, -0.011034134030615728)
PUMA_SEXTIC = (0.008526321541038084, 0.5, 0.3603292692789629, 0.0, -0.037688200365904236, 0.0, 0.0018067462606141187)
"""Coefficients, constant first, as in SPU and other public implementations."""

PUMA_SQUARES = 5
"""t of PUMA's e^x ~ (1 + x / 2^t)^(2^t)."""

PUMA_BOTTOM = -14.0
"""PUMA's e^x is 0 below."""


def gelu(name: str) -> Callable[[Tensor], Tensor]:
    """GELU as the system `name` computes it. KeyError for another name than these three."""
    return {"mpcformer": quad, "secformer": fourier_gelu, "puma": puma_gelu}[name]


def softmax(name: str) -> Callable[[Tensor], Tensor]:
    """Softmax over the last dimension as `name` computes it; entries of minus infinity get 0. Names as `gelu`."""
    return {"mpcformer": two_quad, "secformer": two_quad, "puma": puma_softmax}[name]


def quad(x: Tensor) -> Tensor:
    """MPCFormer's GELU, x^2 / 8 + x / 4 + 1 / 2. Up to 0.5 off below -2, x^2 / 8 above 4."""
    return QUAD[0] + QUAD[1] * x + QUAD[2] * x * x


def fourier_gelu(x: Tensor) -> Tensor:
    """SecFormer's GELU: x (1 + f(x / sqrt 2)) / 2. It is up to 0.02 off."""
    u = x / math.sqrt(2.0)
    series = torch.zeros_like(u)
    for k, weight in enumerate(FOURIER, start=1):
        series = series + weight * torch.sin(k * math.pi / 10 * u)
    erf = torch.where(u.abs() <= FOURIER_END, series, torch.sign(u))
    return 0.5 * x * (1 + erf)


def puma_gelu(x: Tensor) -> Tensor:
    """PUMA's GELU: 0, a cubic, a sextic, x, between PUMA_BREAKS. It is up to 0.02 off."""
    low, middle, high = PUMA_BREAKS
    inside = x.clamp(low, high)
    cubic, sextic = _horner(inside, PUMA_CUBIC), _horner(inside, PUMA_SEXTIC)
    return torch.where(x < low, torch.zeros_like(x), torch.where(x < middle, cubic, torch.where(x < high, sextic, x)))


def two_quad(x: Tensor) -> Tensor:
    """MPCFormer's and SecFormer's softmax, (x + 5)^2 / sum (x + 5)^2: no approximation of softmax itself."""
    e = (torch.where(_seen(x), x, torch.full_like(x, -SHIFT)) + SHIFT) ** 2
    return e / e.sum(-1, keepdim=True).clamp_min(1e-12)


def puma_softmax(x: Tensor) -> Tensor:
    """PUMA's softmax, (1 + d / 32)^32 over its sum, d = x - max x, 0 for d < -14.

    On rows of 128 normal scores of deviation 3 up to 0.07 off.
    """
    d = (x - x.amax(-1, keepdim=True)).clamp_min(PUMA_BOTTOM)
    e = (1 + d / 2**PUMA_SQUARES) ** (2**PUMA_SQUARES)
    e = torch.where(d > PUMA_BOTTOM, e, torch.zeros_like(e))
    return e / e.sum(-1, keepdim=True)


def _seen(x: Tensor) -> Tensor:
    return x > -1e9


def _horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total
