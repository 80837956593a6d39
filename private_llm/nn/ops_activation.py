"""Pointwise non-linear functions on secrets, by the approximations of `approx`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from private_llm.approx.activations import gelu, precise_tanh, sigmoid, silu, softplus
from private_llm.approx.exp import WIDE_TOP, wide_exp
from private_llm.approximations import approximations_of
from private_llm.errors import UnsupportedOp
from private_llm.exact.comparisons import SHORTEST, clamp, relu
from private_llm.ranges import REACH
from private_llm.tensor.dispatch import implements
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.range_check import watch_compared, watch_flat
from private_llm.tensor.secret import SecretTensor

_KEY_ROOM = 7
"""Bits that sums of 256 arguments may have more than one of them: values fill the range that `relu_bits` states."""


_NARROW = {"relu", "silu", "gelu"}
"""What makes of values that are right in their lowest bits results that are right in as many."""


def _settled(x: Tensor, name: str) -> Fixed:
    if not isinstance(x, SecretTensor):
        raise UnsupportedOp(f"{name}: the rule needs a secret input")
    known, config = x.session.exponent("compare"), x.session.config
    most = REACH if known is None else max(known, SHORTEST)
    if name == "relu" and config.relu_bits is not None:  # calibration has made sure that single entries fit
        most = min(most, config.relu_bits - 1 - config.frac_bits + _KEY_ROOM)
    other = approximations_of(config.approximations)
    if name == "gelu" and other is not None and other.gelu_bits is not None:
        most = min(most, other.gelu_bits)
    watch_compared(x, x.session.frac + most, rows=known is not None)
    return x.to_activation_operand() if name in _NARROW else x.to_fixed()


def _register(function: Callable[[Fixed], Fixed], *ops: object) -> None:
    def rule(x: Tensor, inplace: bool = False) -> SecretTensor:
        made = SecretTensor(function(_settled(x, function.__name__)))
        return x.rebind(made) if inplace and isinstance(x, SecretTensor) else made

    rule.__name__ = function.__name__
    implements(*ops)(rule)


_register(relu, F.relu, torch.relu, Tensor.relu)
_register(silu, F.silu)
_register(sigmoid, torch.sigmoid, Tensor.sigmoid, F.sigmoid)
_register(precise_tanh, torch.tanh, Tensor.tanh, F.tanh)


@implements(F.hardtanh)
def hardtanh_rule(x: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> SecretTensor:
    """min(max(x, min_val), max_val) for |x| < 2^20 - 2^10; `exact.comparisons.clamp`, at its cost.

    In place it rebinds x. Raises UnsupportedOp for a plain x, DomainError for min_val > max_val.
    """
    made = SecretTensor(clamp(_settled(x, "hardtanh"), min_val, max_val))
    return x.rebind(made) if inplace and isinstance(x, SecretTensor) else made


@implements(torch.clamp, Tensor.clamp, torch.clip, Tensor.clip)
def clamp_rule(x: Tensor, min: float | None = None, max: float | None = None) -> SecretTensor:
    """min(max(x, low), high) with one bound or two, for |x| < 2^20 - 2^10; `exact.comparisons.clamp`, at its cost.

    Raises UnsupportedOp for a plain x and for bounds that are tensors, DomainError without a bound.
    """
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        raise UnsupportedOp("clamp: the rule needs bounds that are public numbers")
    return SecretTensor(clamp(_settled(x, "clamp"), min, max))


@implements(F.relu6)
def relu6_rule(x: Tensor, inplace: bool = False) -> SecretTensor:
    """min(max(x, 0), 6), as `hardtanh_rule`."""
    return hardtanh_rule(x, 0.0, 6.0, inplace)


@implements(torch.exp, Tensor.exp)
def exp_rule(x: Tensor) -> SecretTensor:
    """e^x for x up to 12, in excess of which a checked session stops and another gives e^12: `approx.exp.wide_exp`.

    One comparison and one injection more, for the bound. Raises UnsupportedOp for a plain x.
    """
    value = _settled(x, "exp")
    bounded = clamp(value, high=WIDE_TOP)
    watch_flat(value - bounded, value.frac - 2)  # an excess below 1/4
    return SecretTensor(wide_exp(bounded))


@implements(F.softplus)
def softplus_rule(x: Tensor, beta: float = 1, threshold: float = 20) -> SecretTensor:
    """log(1 + e^x): `approx.softplus`. PyTorch's threshold, at least 10, is beyond where it is x anyway.

    Raises UnsupportedOp for a plain x, another beta or a lower threshold.
    """
    if beta != 1 or threshold < 10:
        raise UnsupportedOp(f"softplus with beta {beta} and threshold {threshold}; want 1 and at least 10")
    return SecretTensor(softplus(_settled(x, "softplus")))


@implements(F.hardsigmoid)
def hardsigmoid_rule(x: Tensor, inplace: bool = False) -> SecretTensor:
    """min(max(x / 6 + 1/2, 0), 1), as `hardtanh_rule`; the factor is public."""
    made = SecretTensor(_ramp(_settled(x, "hardsigmoid")))
    return x.rebind(made) if inplace and isinstance(x, SecretTensor) else made


@implements(F.hardswish)
def hardswish_rule(x: Tensor, inplace: bool = False) -> SecretTensor:
    """x hardsigmoid(x): its cost and a product. Errors as `hardtanh_rule`."""
    value = _settled(x, "hardswish")
    made = SecretTensor(value.mul(_ramp(value)))
    return x.rebind(made) if inplace and isinstance(x, SecretTensor) else made


def _ramp(x: Fixed) -> Fixed:
    return (clamp(x, -3.0, 3.0) + 3.0).scale(1 / 6)


@implements(F.gelu)
def gelu_rule(x: Tensor, approximate: str = "none") -> SecretTensor:
    """GELU in the erf ("none") or tanh spelling: `approx.activations.gelu`.

    Raises UnsupportedOp for a plain x or another spelling.
    """
    return SecretTensor(gelu(_settled(x, "gelu"), approximate))
