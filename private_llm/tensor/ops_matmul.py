"""Matrix products: one truncation each. Secret x secret is one protocol call, secret x plain a local product."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from private_llm.errors import PlaintextLeak, UnsupportedOp
from private_llm.kernels.forms import MATMUL
from private_llm.protocols.session import Session
from private_llm.tensor.dispatch import implements
from private_llm.tensor.fixed import Fixed, module_bits
from private_llm.tensor.ops_pointwise import AnyOperand, mul, plus
from private_llm.tensor.range_check import watch
from private_llm.tensor.secret import SecretTensor, same_session


def ring_weight(session: Session, weight: Tensor, device: torch.device) -> Tensor:
    """A public weight as ring elements of `frac` bits, made once. Raises DomainError for what the ring cannot hold."""
    key = (session.ring.bits, session.frac, device)
    held: dict[object, Tensor] = weight.__dict__.setdefault("_private_ring", {})
    if key not in held:
        elements = session.ring.encode(weight, session.frac).to(device)
        held[key] = elements.mT.contiguous().mT if elements.dim() in (2, 3) else elements
    return held[key]


def layer_product(x: Fixed, y: Fixed, frac: int | None) -> Fixed:
    """x @ y, truncated to `frac` fractional bits: 2 rounds, 30.75 bytes an output in trio (64-bit ring, 18 bits).

    Less where calibration knows the size of the running layer's results and of what reads them, and fewer bits then.
    """
    factor, other = x.share.parts[0], y.share.parts[0]
    bits = module_bits(x.session, factor.numel() // max(1, factor.shape[-1]) * other.shape[-1])
    frac = bits.read_frac if frac is None else frac
    return x.matmul(y, frac=frac, below=bits.output, width=bits.width(frac))


def product_public(x: Fixed, y: Tensor, left: bool = False, frac: int | None = None) -> Fixed:
    """x @ y (or y @ x), y ring elements of `frac` bits: 1 round, 14.75 bytes an output in trio (64 bits, shift 18)."""
    out, x = x.session.frac if frac is None else frac, x.restore_high_bits()
    shift = x.frac + x.session.frac - out
    return x.with_share(x.proto.bilinear_public(MATMUL, x.share, y, shift, left), out)


@implements(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)
def matmul(x: Tensor, y: Tensor) -> SecretTensor:
    """x @ y; at least one of them secret; shapes as torch.matmul. The result has the session's fractional bits.

    Two secrets: 2 rounds, 30.75 bytes an output in trio (64-bit ring, 18 bits); one: as `product_public`. Raises
    DomainError for secrets of two sessions and a plain operand too large, PlaintextLeak if neither is secret.
    """
    if isinstance(x, SecretTensor) and isinstance(y, SecretTensor):
        same_session(x, y)
        return SecretTensor(x.to_operand().matmul(y.to_operand()))
    if isinstance(x, SecretTensor):
        value = x.to_operand()
        return SecretTensor(product_public(value, _ring_operand(value, y)))
    if not isinstance(y, SecretTensor):
        raise PlaintextLeak("matmul of two plain tensors reached the private table")
    value = y.to_operand()
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


implements(Tensor.__rmatmul__)(lambda x, y: matmul(y, x))


@implements(torch.nn.functional.linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> SecretTensor:
    """x @ weight.T + bias, [.., N]: x [.., K] secret; weight [N, K] and bias [N] each secret or plain.
    Secret weight: 2 rounds, 30.75 bytes an output in trio (64-bit ring, 18 bits); plain: 1 round, 14.75. Calibration
    may take bits off the result. Raises UnsupportedOp for a plain x, DomainError for another session's weights.
    """
    if not isinstance(x, SecretTensor):
        raise UnsupportedOp("linear of a plain input with secret weights; share the input (Session input) first")
    if isinstance(weight, SecretTensor):
        same_session(x, weight)
        held = weight.value(full=True)
        return linear_by(x, held.frac, lambda value, frac: layer_product(value, held.view(Tensor.t), frac), bias)

    def public(value: Fixed, frac: int | None) -> Fixed:
        elements = ring_weight(x.session, weight, value.share.parts[0].device)
        return product_public(value, elements.t(), frac=frac)

    return linear_by(x, x.session.frac, public, bias)


def linears(x: Tensor, weight: Tensor) -> SecretTensor:
    """As many linear layers at once: x [n, M, K] secret, weight [n, N, K] secret or plain, to [n, M, N].

    Cost and errors as `linear`. Raises UnsupportedOp for a plain x, DomainError for another session's weights.
    """
    if not isinstance(x, SecretTensor):
        raise UnsupportedOp("linear layers of a plain input; share the input (Session input) first")
    if isinstance(weight, SecretTensor):
        same_session(x, weight)
        held = weight.value(full=True)
        return linear_by(x, held.frac, lambda value, frac: layer_product(value, held.view(_turned), frac), None)

    def public(value: Fixed, frac: int | None) -> Fixed:
        return product_public(value, ring_weight(x.session, weight, value.share.parts[0].device).mT, frac=frac)

    return linear_by(x, x.session.frac, public, None)


def _turned(part: Tensor) -> Tensor:
    return part.mT


def linear_by(
    x: SecretTensor, weight_frac: int, made: Callable[[Fixed, int | None], Fixed], bias: Tensor | None,
    rows: Callable[[Tensor], Tensor] | None = None,
) -> SecretTensor:  # fmt: skip
    """A linear layer whose product `made` makes from x and the fractional bits that calibration wants, plus the bias.

    weight_frac: fractional bits of the weight. bias: broadcasts to the product. rows: makes rows of a result that holds
    chosen outputs of all of them in one dimension. The result's rows are watched.
    """
    bits = module_bits(x.session)
    out = SecretTensor(made(_in_range(x.to_operand(narrow=True), weight_frac, bits.output), bits.frac))
    out.coarse = bits.frac is not None and bits.frac < x.session.frac
    out = out if bias is None else plus(out, bias, narrow=True)  # the calibrated size is that of the sum
    watch(out.value() if rows is None else out.value().view(rows))
    return out


def _in_range(x: Fixed, weight: int, output: int | None) -> Fixed:
    """x with as many fractional bits as results below 2^output leave room for; weight: those it has."""
    ring = x.session.ring
    return x if output is None or ring.bits < 64 else x.rescale(min(x.frac, ring.value_bits - 1 - weight - output))


@implements(torch.addmm, Tensor.addmm)
def addmm(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> SecretTensor:
    """beta * bias + alpha * x @ y (GPT-2's Conv1D); x [M, K], y [K, N], bias broadcasts. Cost as `linear`."""
    if isinstance(x, SecretTensor) and isinstance(y, SecretTensor):
        same_session(x, y)
        value, held = x.to_operand(narrow=True), y.value(full=True)
        made = SecretTensor(layer_product(_in_range(value, held.frac, module_bits(x.session).output), held, None))
    else:
        made = matmul(x, y)
    out = _combined(bias, made, beta, alpha, narrow=True)
    watch(out.value())
    return out


@implements(torch.baddbmm, Tensor.baddbmm)
def baddbmm(bias: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> SecretTensor:
    """beta * bias + alpha * batch1 @ batch2, [B, M, N]; `bias` may be public (Bloom's alibi). Cost as `matmul`."""
    scaled = batch1 if alpha == 1 else mul(batch1, alpha)
    return _combined(bias, matmul(scaled, batch2), beta, 1)


def _combined(
    bias: AnyOperand, made: SecretTensor, beta: float, alpha: float, narrow: bool = False
) -> SecretTensor:  # fmt: skip
    made = made if alpha == 1 else mul(made, alpha)
    if beta == 0:
        return made
    if beta != 1:
        bias = mul(bias, beta) if isinstance(bias, SecretTensor) else bias * beta
    return plus(made, bias, narrow)
