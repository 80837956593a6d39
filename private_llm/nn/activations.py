"""Pointwise non-linear functions on secrets: one record each, which rules, calibration, plans and benchmarks read.

`scripts/fitting/fit_tables.py` reads it, too: a function that tables compute (`FromTables`) needs no more than its
record. What plans say of the modules of transformers is in `private_llm_hf/models/modules.json`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from private_llm.approx import activations as approx
from private_llm.approx.activations import WIDE_TOP, FromTables, wide_exp
from private_llm.approximations import approximations_of
from private_llm.errors import UnsupportedOp
from private_llm.exact.comparisons import SHORTEST, clamp, hardtanh, relu
from private_llm.ranges import REACH
from private_llm.tensor.dispatch import implements
from private_llm.tensor.fixed import READ_BITS, Fixed
from private_llm.tensor.range_check import watch_compared, watch_flat
from private_llm.tensor.secret import SecretTensor

_KEY_ROOM = 7  # bits that sums of 256 arguments may have more than one of them, which fills the range of `relu_bits`


@dataclass(frozen=True, eq=False)
class Activation:
    """One function.

    compute: of a secret, and of the other arguments that PyTorch passes; its errors are its own. ops: PyTorch's
    callables for it. module: its class, for networks that are made of modules. price: bytes an element over all links,
    and rounds, under trio. error, relative: with 18 fractional bits a result r is at most error + relative |r| off, by
    products, waves or comparison keys, for arguments in domain (least, largest). settings: constructor arguments of the
    module, with the values that they may have. example: arguments besides the secret, where PyTorch wants some. wide:
    its products need a 64-bit ring. compared: its arguments are compared, so that calibration notes how large they get;
    where it is not said they cover 2^20. keeps_size: results are no larger than arguments, so that who reads these is
    who reads the results. narrow: of values that are right in their lowest bits it makes results right in as many.
    """

    name: str
    compute: Callable[..., Fixed]
    ops: tuple[object, ...]
    module: type[nn.Module] | None
    price: tuple[float, int]
    error: float = 0.0
    relative: float = 0.0
    domain: tuple[float, float] = (2**10 - 2.0**REACH, 2.0**REACH - 2**10)
    settings: dict[str, tuple[object, ...]] = field(default_factory=dict)
    example: tuple[float, ...] = ()
    wide: bool = False
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
    """e^x for x up to 12, in excess of which a checked session stops and another gives e^12: `wide_exp`, bounded."""
    bounded = clamp(x, high=WIDE_TOP)
    watch_flat(x - bounded, x.frac - 2)  # an excess below 1/4
    return wide_exp(bounded)


def _softplus(x: Fixed, beta: float = 1, threshold: float = 20) -> Fixed:
    """PyTorch's threshold, at least 10, is beyond where softplus is x anyway. Raises UnsupportedOp for others."""
    if beta != 1 or threshold < 10:
        raise UnsupportedOp(f"softplus with beta {beta} and threshold {threshold}; want 1 and at least 10")
    return FromTables("SOFTPLUS")(x)


def _hardsigmoid(x: Fixed) -> Fixed:
    """min(max(x / 6 + 1/2, 0), 1); the factor is public."""
    return (clamp(x, -3.0, 3.0) + 3.0).scale(1 / 6)


ACTIVATIONS = (
    Activation("relu", relu, (F.relu, torch.relu, Tensor.relu), nn.ReLU, (56.1, 5), compared=True, keeps_size=True,
               narrow=True),
    Activation("gelu", approx.gelu, (F.gelu,), nn.GELU, (130.3, 6), 2e-4, settings={"approximate": ("none", "tanh")},
               wide=True, compared=True, keeps_size=True, narrow=True),
    Activation("silu", FromTables("SILU"), (F.silu,), nn.SiLU, (143.8, 6), 2e-4, wide=True, compared=True,
               keeps_size=True, narrow=True),
    Activation("sigmoid", FromTables("LOGISTIC"), (torch.sigmoid, Tensor.sigmoid, F.sigmoid), nn.Sigmoid, (274.5, 13),
               1e-4, wide=True),
    Activation("tanh", approx.precise_tanh, (torch.tanh, Tensor.tanh, F.tanh), nn.Tanh, (972.0, 23), 2e-4,
               domain=(-(2.0**19), 2.0**19), wide=True),
    Activation("relu6", lambda x: clamp(x, 0.0, 6.0), (F.relu6,), nn.ReLU6, (85.3, 5), compared=True),
    Activation("hardtanh", hardtanh, (F.hardtanh,), None, (85.3, 5), compared=True),
    Activation("clamp", _clamp, (torch.clamp, Tensor.clamp, torch.clip, Tensor.clip), None, (85.3, 5), example=(-1, 2)),
    Activation("exp", _exp, (torch.exp, Tensor.exp), None, (232.3, 16), 2.0**-17, 8e-4,
               (2**10 - 2.0**REACH, WIDE_TOP), wide=True),
    Activation("softplus", _softplus, (F.softplus,), None, (242.5, 13), 1e-4, wide=True),
    Activation("hardsigmoid", _hardsigmoid, (F.hardsigmoid,), None, (100.0, 6), 2e-5),
    Activation("hardswish", lambda x: x.mul(_hardsigmoid(x)), (F.hardswish,), None, (130.8, 8), 5e-5, 8e-6),
)  # fmt: skip
"""All of them; scripts/pages/make_functions.py shows them in docs/ranges.md."""

for _each in ACTIVATIONS:
    implements(*_each.ops)(_each.rule)
