"""Norms: `F.layer_norm`, `F.rms_norm` and `F.batch_norm` on secrets."""

from collections.abc import Sequence

import torch
from torch import Tensor

from private_llm.approx import norms
from private_llm.errors import UnsupportedOp
from private_llm.protocols.session import Session
from private_llm.tensor.dispatch import implements
from private_llm.tensor.fixed import Fixed, fewest_frac
from private_llm.tensor.range_check import watch
from private_llm.tensor.secret import SecretTensor


def gain(weight: Tensor | None, offset: float = 0.0) -> Fixed | Tensor | None:
    """A norm's weight [width] + offset: secret, public, none; more than the session's bits get truncated (1 round)."""
    if isinstance(weight, SecretTensor):
        return weight.to_fixed() + offset if offset else weight.to_fixed()
    if weight is None:
        return None
    return weight.detach() + offset if offset else weight.detach()


def _measured(
    x: SecretTensor, weight: Tensor | None, eps: float, centred: bool = False
) -> tuple[Fixed, int, int | None]:
    """A norm's input, and what is known: mean squares of rows below 2^square, weights below 2^gain (of none, 0).

    Where calibration found that all rows can do with fewer fractional bits, so that one sum of squares is enough, the
    entries are cut to those. Products of a residual sum then leave no more, so this happens once at most.
    """
    value = x.value(full=True) if x.value(full=True).frac <= x.session.frac else x.to_fixed()
    width, known = x.shape[-1], x.session.exponent("square")
    gain = 0 if weight is None else x.session.exponent("gain")
    square = norms.WIDEST if known is None else min(known, norms.WIDEST)
    frac = x.session.exponent("frac")
    if frac is not None and frac < value.frac:
        value = x.coarsen(frac)
    # One sum holds rows of a norm below 2^31 in ring elements of its bits, two hold entries of 2^20.
    bits = max(norms.squared_bits(value.frac, width, square, gain), value.frac)
    if norms.lines_of(value, eps, square, centred) is not None:
        bits = norms.line_bits(value.frac, width, square)
    elif centred:
        bits = max(bits, norms.deviation_bits(value.frac, width, square))
    more = bits - value.frac
    watch(value, 30 - more if norms.one_sum(value.frac, width, square) else norms.LARGEST + 1 + value.frac)
    return value, square, gain


def _frac(session: Session, count: int, *vectors: Tensor | None) -> int:
    """Fractional bits of a norm's `count` results: fewer without weights, as where linear layers have taken them.

    A linear layer drops what its factors have too much, for each of its outputs. Norms that never had weights are
    rounded alike, to 2^-16, whoever reads them.
    """
    return fewest_frac(session, count) if all(each is None for each in vectors) else session.frac


def rms_norm_rule(x: SecretTensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> SecretTensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension; `approx.norms.rms_norm`, at its cost.

    Calibration may cut x to fewer fractional bits first (1 round), for good.
    """
    value, square, bound = _measured(x, weight, eps)
    made = norms.rms_norm(
        value, gain(weight, offset), eps, _frac(x.session, x.numel(), weight), square=square, gain=bound
    )
    return SecretTensor(made)


def _last_only(x: SecretTensor, normalized_shape: Sequence[int], name: str) -> None:
    if len(normalized_shape) != 1 or normalized_shape[0] != x.shape[-1]:
        raise UnsupportedOp(f"{name} over {tuple(normalized_shape)}; want the last dimension ({x.shape[-1]})")


@implements(torch.nn.functional.layer_norm, torch.layer_norm)
def layer_norm_rule(
    x: SecretTensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: object,
) -> SecretTensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, by `approx.norms.layer_norm`.

    Calibration may cut x to fewer fractional bits first (1 round), for good. Raises UnsupportedOp for other dimensions.
    """
    _last_only(x, normalized_shape, "layer_norm")
    value, square, bound = _measured(x, weight, eps, centred=True)
    frac = _frac(x.session, x.numel(), weight, bias)
    made = norms.layer_norm(value, gain(weight), gain(bias), eps, frac, square=square, gain=bound)
    return SecretTensor(made)


@implements(torch.nn.functional.rms_norm, torch.rms_norm)
def rms_norm_function(
    x: SecretTensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> SecretTensor:
    """x / sqrt(mean(x^2) + eps) * weight, as `rms_norm_rule`. Raises UnsupportedOp unless over the last dimension."""
    _last_only(x, normalized_shape, "rms_norm")
    return rms_norm_rule(x, weight, torch.finfo(torch.float32).eps if eps is None else eps)


@implements(torch.nn.functional.batch_norm, torch.batch_norm)
def batch_norm(
    x: SecretTensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """(x - mean) / sqrt(var + eps) * weight + bias per channel (dimension 1), by running statistics.

    Local with a public or no weight; a secret one costs a product an element (2 rounds, and one for each truncation of
    surplus bits). `patch()` folds the norm into the layer before it, which costs nothing. Mean, weight and bias may be
    secret, the variance is public. Raises UnsupportedOp for a secret one and for the batch's own statistics.
    """
    if training or running_mean is None or running_var is None:
        raise UnsupportedOp("batch_norm by the batch's own statistics; call model.eval() on a norm that tracks them")
    if isinstance(running_var, SecretTensor):
        raise UnsupportedOp(
            "batch_norm with a secret variance; fold the norm before sharing, as patch() does: "
            "factor = weight / sqrt(var + eps), then x * factor + (bias - mean * factor)"
        )
    factor: Tensor = torch.rsqrt(running_var.detach().to(torch.float64) + eps)
    gain = factor if weight is None else weight * factor
    shift = running_mean * -gain if bias is None else bias - running_mean * gain
    shape = (-1, *[1] * (x.ndim - 2))
    return x * gain.reshape(shape) + shift.reshape(shape)
