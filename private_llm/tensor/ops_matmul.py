"""Matrix products: one truncation each. Secret x secret is one protocol call, secret x plain a local product."""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.errors import PlaintextLeak, UnsupportedOp
from private_llm.kernels.ops import ring_matmul
from private_llm.protocols.session import Session
from private_llm.tensor.dispatch import TorchArg, implements
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.ops_pointwise import Operand, mul, plus
from private_llm.tensor.scale import same_session
from private_llm.tensor.secret import SecretTensor


def ring_weight(session: Session, weight: Tensor, device: torch.device) -> Tensor:
    """Ring elements of a public weight; encoded once."""
    key = (session.ring.bits, session.frac, device)
    held: dict[object, Tensor] = weight.__dict__.setdefault("_private_ring", {})
    if key not in held:
        elements = session.ring.encode(weight, session.frac).to(device)
        held[key] = elements.transpose(-1, -2).contiguous().transpose(-1, -2) if elements.dim() > 1 else elements
    return held[key]


def product(x: Fixed, y: Fixed) -> Fixed:
    """torch.matmul of two secrets, truncated to the session's fractional bits."""
    return x.matmul(y)


def product_public(x: Fixed, y: Tensor, left: bool = False) -> Fixed:
    """x @ y (or y @ x) for ring elements y with the session's fractional bits: local, then one truncation."""
    share = x.share.map(lambda part: ring_matmul(y, part) if left else ring_matmul(part, y))
    inner = x.shape[-2] if left else x.shape[-1]
    x.proto.ledger.add_macs(share.numel() * inner * len(share.parts))
    return x.with_share(share, x.frac + x.session.frac).at(x.session.frac)


@implements(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)
def matmul(x: Tensor, y: Tensor) -> SecretTensor:
    """x @ y; at least one of them secret."""
    if isinstance(x, SecretTensor) and isinstance(y, SecretTensor):
        same_session(x, y)
        return SecretTensor(product(x.operand, y.operand))
    if isinstance(x, SecretTensor):
        value = x.operand
        return SecretTensor(product_public(value, _ring_operand(value, y)))
    if not isinstance(y, SecretTensor):
        raise PlaintextLeak("matmul of two plain tensors reached the private table")
    value = y.operand
    return SecretTensor(product_public(value, _ring_operand(value, x), left=True))


def _ring_operand(x: Fixed, y: Tensor) -> Tensor:
    """Ring elements of a public operand; a parameter, or a parameter's transpose (`weight.T`), is encoded once."""
    device = x.share.parts[0].device
    base = y._base
    if base is not None and base.dim() == 2 and base.t().shape == y.shape and base.t().stride() == y.stride():
        return ring_weight(x.session, base, device).t()
    if isinstance(y, torch.nn.Parameter):
        return ring_weight(x.session, y, device)
    return x.session.ring.encode(y, x.session.frac).to(device)


@implements(Tensor.__rmatmul__)
def rmatmul(x: Tensor, y: Tensor) -> SecretTensor:
    """Y @ x."""
    return matmul(y, x)


@implements(torch.nn.functional.linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> SecretTensor:
    """x @ weight.T + bias: x [.., K], weight [N, K], bias [N], each secret or plain (at least one secret)."""
    if not isinstance(x, SecretTensor):
        raise UnsupportedOp("linear of a plain input with secret weights; share the input (Session input) first")
    value = x.operand
    if isinstance(weight, SecretTensor):
        same_session(x, weight)
        out = SecretTensor(product(value, weight.operand.view(Tensor.t)))
    else:
        out = SecretTensor(product_public(value, ring_weight(x.session, weight, value.share.parts[0].device).t()))
    return out if bias is None else plus(out, bias)


@implements(torch.addmm, Tensor.addmm)
def addmm(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> SecretTensor:
    """Beta * bias + alpha * x @ y (GPT-2's Conv1D)."""
    return _combined(bias, matmul(x, y), beta, alpha)


@implements(torch.baddbmm, Tensor.baddbmm)
def baddbmm(bias: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> SecretTensor:
    """Beta * bias + alpha * batch1 @ batch2; `bias` may be public (Bloom's alibi)."""
    scaled = batch1 if alpha == 1 else mul(batch1, alpha)
    return _combined(bias, matmul(scaled, batch2), beta, 1)


def _combined(bias: Operand, made: SecretTensor, beta: float, alpha: float) -> SecretTensor:
    made = made if alpha == 1 else mul(made, alpha)
    if beta == 0:
        return made
    if beta != 1:
        bias = mul(bias, beta) if isinstance(bias, SecretTensor) else bias * beta
    return plus(made, bias)


# -- convolution ---------------------------------------------------------------------------------------------
def _pair(value: TorchArg) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


@implements(torch.conv2d, torch.nn.functional.conv2d)
def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: TorchArg = 1, padding: TorchArg = 0,
    dilation: TorchArg = 1, groups: int = 1,
) -> SecretTensor:  # fmt: skip
    """Convolution as one matrix product of windows [B, groups, positions, K] with the kernel [groups, K, O]."""
    if not isinstance(x, SecretTensor) or _pair(dilation) != (1, 1) or isinstance(padding, str):
        raise UnsupportedOp("conv2d needs a secret input, dilation 1 and numeric padding; rules: tensor/ops_matmul.py")
    outputs, depth, height, width = weight.shape
    (down, right), (pad_h, pad_w) = _pair(stride), _pair(padding)

    def windows(part: Tensor) -> Tensor:
        if pad_h or pad_w:
            part = torch.nn.functional.pad(part, (pad_w, pad_w, pad_h, pad_h))
        cut = part.unfold(2, height, down).unfold(3, width, right)  # [B, C, h, w, kh, kw]
        batch, _, rows, columns = cut.shape[:4]
        cut = cut.reshape(batch, groups, depth, rows, columns, height * width).permute(0, 1, 3, 4, 2, 5)
        return cut.reshape(batch, groups, rows * columns, depth * height * width)

    def kernel(part: Tensor) -> Tensor:
        return part.reshape(groups, outputs // groups, depth * height * width).transpose(-1, -2)

    cut = x.operand.view(windows)
    if isinstance(weight, SecretTensor):
        same_session(x, weight)
        made = product(cut, weight.operand.view(kernel))
    else:
        held = ring_weight(x.session, weight, cut.share.parts[0].device)
        made = product_public(cut, kernel(held))
    rows = (x.shape[2] + 2 * pad_h - height) // down + 1
    shape = (x.shape[0], outputs, rows, -1)
    out = SecretTensor(made.view(lambda part: part.transpose(-1, -2).reshape(shape)))
    return out if bias is None else plus(out, bias.view(1, -1, 1, 1))
