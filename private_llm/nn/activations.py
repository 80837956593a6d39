"""Pointwise non-linear functions on secrets: one record each, which rules, calibration and vision read.

Two files make a smooth activation: its approximation in `approx/activations.py` (formula, domain, error, cost, tables)
and its record here. What is said of the modules of transformers in a plan is in `private_llm_hf/models/modules.json`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from private_llm.approx import activations as approx
from private_llm.approx.activations import WIDE_TOP, wide_exp
from private_llm.approximations import approximations_of
from private_llm.errors import UnsupportedOp
from private_llm.exact.comparisons import SHORTEST, clamp, hardtanh, relu
from private_llm.ranges import REACH
from private_llm.tensor.dispatch import implements
from private_llm.tensor.fixed import READ_BITS, Fixed
from private_llm.tensor.range_check import watch_compared, watch_flat
from private_llm.tensor.secret import SecretTensor

_KEY_ROOM = 7
"""Bits that sums of 256 arguments may have more than one of them: values fill the range that `relu_bits` states."""


@dataclass(frozen=True, eq=False)
class Activation:
    """One function.

    compute: of a secret, and of the other arguments that PyTorch passes; domain, error, cost and errors are its own.
    ops: PyTorch's callables for it. module: its class, for networks that are made of modules. settings: constructor
    arguments of the module, with the values that they may have. compared: its arguments are compared, so that
    calibration notes how large they get; where it is not said they cover 2^20. keeps_size: results are no larger than
    arguments, so that who reads these is who reads the results. narrow: it makes of values that are right in their
    lowest bits results that are right in as many.
    """

    name: str
    compute: Callable[..., Fixed]
    ops: tuple[object, ...]
    module: type[nn.Module] | None = None
    settings: dict[str, tuple[object, ...]] = field(default_factory=dict)
    compared: bool = False
    keeps_size: bool = False
    narrow: bool = False

    def rule(self, x: Tensor, *args: object, inplace: bool = False, **settings: object) -> SecretTensor:
        """The rule of `ops`: x secret, of any shape; in place it rebinds x. Raises UnsupportedOp for a plain x."""
        made = SecretTensor(self.compute(self._checked(x), *args, **settings))
        return x.rebind(made) if inplace and isinstance(x, SecretTensor) else made

    def _checked(self, x: Tensor) -> Fixed:
        """The argument, with as many bits as are read; owes a check of its range."""
        if not isinstance(x, SecretTensor):
            raise UnsupportedOp(f"{self.name}: the rule needs a secret input")
        known, config = x.session.exponent("compare"), x.session.config
        most = REACH if known is None else max(known, SHORTEST)
        if self.name == "relu" and config.relu_bits is not None:  # calibration has made sure that single entries fit
            most = min(most, config.relu_bits - 1 - config.frac_bits + _KEY_ROOM)
        if self.name == "gelu" and (other := approximations_of(config.approximations)) is not None:
            most = most if other.gelu_bits is None else min(most, other.gelu_bits)
        watch_compared(x, x.session.frac + most, rows=known is not None)
        return x.to_operand(narrow=True, least=READ_BITS) if self.narrow else x.to_fixed()


def _clamp(x: Fixed, min: float | None = None, max: float | None = None) -> Fixed:
    """min(max(x, low), high) with one bound or two. Raises UnsupportedOp for bounds that are tensors."""
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        raise UnsupportedOp("clamp: the rule needs bounds that are public numbers")
    return clamp(x, min, max)


def _exp(x: Fixed) -> Fixed:
    """e^x for x up to 12, in excess of which a checked session stops and another gives e^12.

    `wide_exp`, and one comparison and one injection more, for the bound.
    """
    bounded = clamp(x, high=WIDE_TOP)
    watch_flat(x - bounded, x.frac - 2)  # an excess below 1/4
    return wide_exp(bounded)


def _softplus(x: Fixed, beta: float = 1, threshold: float = 20) -> Fixed:
    """PyTorch's threshold, at least 10, is beyond where softplus is x anyway. Raises UnsupportedOp for others."""
    if beta != 1 or threshold < 10:
        raise UnsupportedOp(f"softplus with beta {beta} and threshold {threshold}; want 1 and at least 10")
    return approx.softplus(x)


def _hardsigmoid(x: Fixed) -> Fixed:
    """min(max(x / 6 + 1/2, 0), 1); the factor is public."""
    return (clamp(x, -3.0, 3.0) + 3.0).scale(1 / 6)


ACTIVATIONS = (
    Activation("relu", relu, (F.relu, torch.relu, Tensor.relu), nn.ReLU, compared=True, keeps_size=True, narrow=True),
    Activation("gelu", approx.gelu, (F.gelu,), nn.GELU, {"approximate": ("none", "tanh")}, compared=True,
               keeps_size=True, narrow=True),
    Activation("silu", approx.silu, (F.silu,), nn.SiLU, compared=True, keeps_size=True, narrow=True),
    Activation("sigmoid", approx.sigmoid, (torch.sigmoid, Tensor.sigmoid, F.sigmoid), nn.Sigmoid),
    Activation("tanh", approx.precise_tanh, (torch.tanh, Tensor.tanh, F.tanh), nn.Tanh),
    Activation("relu6", lambda x: clamp(x, 0.0, 6.0), (F.relu6,), nn.ReLU6, compared=True),
    Activation("hardtanh", hardtanh, (F.hardtanh,), compared=True),
    Activation("clamp", _clamp, (torch.clamp, Tensor.clamp, torch.clip, Tensor.clip)),
    Activation("exp", _exp, (torch.exp, Tensor.exp)),
    Activation("softplus", _softplus, (F.softplus,)),
    Activation("hardsigmoid", _hardsigmoid, (F.hardsigmoid,)),
    Activation("hardswish", lambda x: x.mul(_hardsigmoid(x)), (F.hardswish,)),
)  # fmt: skip
"""All of them, for |x| < 2^20 - 2^10 but where their functions say otherwise."""

for _each in ACTIVATIONS:
    implements(*_each.ops)(_each.rule)
