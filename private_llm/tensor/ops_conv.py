"""Convolutions: one bilinear form each, so one truncation and the traffic of the output. Public weights: local."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.kernels.forms import Conv2d
from private_llm.kernels.shapes import Pair
from private_llm.tensor.dispatch import TorchArg, implements
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.ops_matmul import ring_weight
from private_llm.tensor.ops_pointwise import plus
from private_llm.tensor.range_check import watch_later
from private_llm.tensor.secret import SecretTensor, same_session


def pair(value: TorchArg) -> Pair:
    """An argument of PyTorch's that is one size for both directions, or one for each, as (height, width)."""
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def _same(kernel: Pair, dilation: Pair) -> tuple[Pair, Pair]:
    """Zeros before and after each dimension for padding="same": where they differ, PyTorch puts more after."""
    total = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
    return (total[0] // 2, total[1] // 2), (total[0] - total[0] // 2, total[1] - total[1] // 2)


def _padded(x: Fixed, weight: Tensor, form: Conv2d, padding: TorchArg) -> tuple[Fixed, Conv2d]:
    """The form with its padding; where that differs on opposite sides, the input gets its zeros here."""
    if not isinstance(padding, str):
        return x, replace(form, padding=pair(padding))
    if padding not in ("same", "valid"):
        raise UnsupportedOp(f"conv2d: got padding {padding!r}; want numbers, 'same' or 'valid'")
    if padding == "valid":
        return x, form
    if form.stride != (1, 1):
        raise UnsupportedOp(f"conv2d: padding='same' with stride {form.stride}; want stride 1")
    before, after = _same((weight.shape[-2], weight.shape[-1]), form.dilation)
    if before == after:
        return x, replace(form, padding=before)
    around = (before[1], after[1], before[0], after[0])
    return x.view(lambda part: F.pad(part, around)), form


def _convolved(x: Fixed, weight: Tensor, form: Conv2d) -> Fixed:
    """x [B, C, H, W] with weight [O, C / groups, kh, kw], truncated to the session's fractional bits."""
    out = x.session.frac
    if isinstance(weight, SecretTensor):
        w = weight.value(full=True)
        return x.with_share(x.proto.bilinear(form, x.share, w.share, x.frac + w.frac - out), out)
    held = ring_weight(x.session, weight, x.share.parts[0].device)
    return x.with_share(x.proto.bilinear_public(form, x.share, held, x.frac), out)


@implements(torch.conv2d, F.conv2d)
def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: TorchArg = 1, padding: TorchArg = 0,
    dilation: TorchArg = 1, groups: int = 1,
) -> SecretTensor:  # fmt: skip
    """Convolution of x [B, C, H, W] or [C, H, W], secret, with weight [O, C / groups, kh, kw], secret or plain.

    Returns [B, O, H', W'] or [O, H', W'] with the session's fractional bits. An output costs a truncating product (2
    rounds, 30.75 bytes in trio with 18 bits) for a secret weight, a truncation (1 round, 14.75) for a plain one. `bias`
    [O] secret, plain or none. Raises UnsupportedOp for a plain x and for paddings that PyTorch refuses, DomainError for
    weights of another session.
    """
    if not isinstance(x, SecretTensor):
        raise UnsupportedOp("conv2d of a plain input with secret weights; share the input (Session input) first")
    if isinstance(weight, SecretTensor):
        same_session(x, weight)
    value = x.to_operand()
    if x.ndim != 4:
        value = value.view(lambda part: part.unsqueeze(0))
    form = Conv2d(stride=pair(stride), dilation=pair(dilation), groups=groups)
    value, form = _padded(value, weight, form, padding)
    made = _convolved(value, weight, form)
    out = SecretTensor(made if x.ndim == 4 else made.view(lambda part: part.squeeze(0)))
    out = out if bias is None else plus(out, bias.view(-1, 1, 1))
    watch_later(out)
    return out


@implements(torch.conv1d, F.conv1d)
def conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: TorchArg = 1, padding: TorchArg = 0,
    dilation: TorchArg = 1, groups: int = 1,
) -> SecretTensor:  # fmt: skip
    """Convolution of x [B, C, L] or [C, L] with weight [O, C / groups, k], as a `conv2d` of images of height 1."""
    if not isinstance(padding, str):
        padding = (0, pair(padding)[1])
    form = (1, pair(stride)[1]), padding, (1, pair(dilation)[1]), groups
    flat = conv2d(x.unsqueeze(-2), weight.unsqueeze(-2), bias, *form)
    return SecretTensor(flat.value(full=True).view(lambda part: part.squeeze(-2)))
