"""Pointwise rules: sums, products, casts, masks, complex numbers. Only secret products and late truncations send."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from private_llm.errors import PlaintextLeak, UnsupportedOp
from private_llm.tensor.dispatch import TorchArg, implements, op_name
from private_llm.tensor.fixed import Fixed, module_bits
from private_llm.tensor.range_check import watch
from private_llm.tensor.scale import aligned, encoded, times_public, times_scalar
from private_llm.tensor.secret import SecretTensor, same_session

AnyOperand = SecretTensor | Tensor | float | int

MINUS_INFINITY = -1e9  # public addends at or below this stand for minus infinity (masks use finfo.min or -inf)


def _secret(x: object, op: str) -> SecretTensor:
    if not isinstance(x, SecretTensor):
        raise PlaintextLeak(f"{op} would write a secret into a plain tensor; use the out-of-place form")
    return x


def plus(x: SecretTensor, y: AnyOperand, narrow: bool = False) -> SecretTensor:
    """x + y for a secret x, broadcasting; a public y may hold minus infinities (additive mask, 2-D or more).

    narrow: as for `aligned`.

    Cost as `add`. Raises UnsupportedOp for a y of booleans, DomainError for a y that the ring cannot hold.
    """
    if isinstance(y, SecretTensor):
        a, b = aligned(x, y, narrow)
        return _like(SecretTensor(a + b), x, y)
    if isinstance(y, Tensor):
        return _like(_plus_public(x, y, narrow), x)
    return SecretTensor(_roomy(x, abs(y)) + y) if y else x.duplicate()


def _roomy(x: SecretTensor, largest: float) -> Fixed:
    """x as it is if a public addend of this size fits with its fractional bits, else without surplus bits."""
    value = x.value(full=True)
    return value if largest * 2.0**value.frac < 2.0 ** (value.session.ring.value_bits - 1) else x.to_operand()


def _like(made: SecretTensor, *sources: SecretTensor) -> SecretTensor:
    """A sum with a coarse value is coarse."""
    made.coarse = any(source.coarse for source in sources)
    return made


def _plus_public(x: SecretTensor, y: Tensor, narrow: bool) -> SecretTensor:
    if y.dtype == torch.bool:
        raise UnsupportedOp("a mask of booleans added to a secret; an additive mask has 0 and minus infinity")
    if x.hidden is not None and y.is_floating_point():  # a second mask on top of the first
        more = y <= MINUS_INFINITY
        if not bool(y.masked_fill(more, 0.0).any()):
            return x.masked(more.expand(x.shape))
    hidden = None
    if y.is_floating_point() and y.dim() > 1 and y.numel() and bool(y.min() <= MINUS_INFINITY):
        hidden = y <= MINUS_INFINITY
        y = y.masked_fill(hidden, 0.0)
    surplus = y.numel() > 0 and x.value().frac > x.session.frac
    value = _roomy(x, float(y.abs().max())) if surplus else x.value() if narrow else x.value(full=True)
    out = SecretTensor(value.with_share(value.proto.add_public(value.share, encoded(value, y, value.frac))))
    return out if hidden is None else out.masked(hidden.expand(out.shape))


@implements(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)
def add(x: AnyOperand, y: AnyOperand, *, alpha: float = 1) -> SecretTensor:
    """Sum x + alpha * y, broadcasting. Local where both have the same fractional bits, or at most 6 surplus bits.

    Else one truncation (1 round) of each operand that has more than the session's; beside a coarse secret, of the finer
    one. Raises PlaintextLeak if neither is secret.
    """
    if not isinstance(x, SecretTensor):
        x, y = y, x
        if alpha != 1:
            x, alpha = mul(x, alpha), 1
    if alpha != 1:
        y = mul(y, alpha) if isinstance(y, SecretTensor) else y * alpha
    return plus(_secret(x, "add"), y)


@implements(torch.sub, torch.subtract, Tensor.sub, Tensor.__sub__)
def sub(x: AnyOperand, y: AnyOperand, *, alpha: float = 1) -> SecretTensor:
    """Difference x - alpha * y; cost as `add`."""
    if alpha != 1:
        y = mul(y, alpha) if isinstance(y, SecretTensor) else y * alpha
    if isinstance(x, SecretTensor) and isinstance(y, SecretTensor):
        a, b = aligned(x, y)
        return _like(SecretTensor(a - b), x, y)
    return plus(x, -y) if isinstance(x, SecretTensor) else plus(neg(_secret(y, "sub")), x)


implements(torch.rsub, Tensor.__rsub__)(lambda x, y: sub(y, x))


@implements(torch.neg, Tensor.neg, Tensor.__neg__, torch.negative, Tensor.negative)
def neg(x: SecretTensor) -> SecretTensor:
    """-x; local."""
    return SecretTensor(-x.value())


@implements(torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.multiply)
def mul(x: AnyOperand, y: AnyOperand) -> SecretTensor:
    """Product x*y, broadcasting. Two secrets: one truncating product.

    That is 2 rounds and 30.75 bytes an output in trio (64-bit ring, 18 bits), less where calibration knows the size of
    the product and of what reads it (`Fixed.mul`). With public values: local, the result
    carries up to 16 bits more until an operation truncates them; an operand that carries such bits is truncated first
    (1 round). A 32-bit ring truncates after a public tensor of real numbers. Raises PlaintextLeak if neither is secret.
    """
    if isinstance(x, SecretTensor) and isinstance(y, SecretTensor):
        same_session(x, y)
        session = x.session
        followed = x.shape == y.shape and x.dim() > 1  # by calibration, which knows who reads such products alone
        bits = module_bits(session, x.numel())
        frac = bits.read_frac if followed else session.frac
        product = x.to_operand(narrow=True).mul(
            y.to_operand(narrow=True), frac, bits.output, bits.width(frac) if followed else None
        )
        watch(product if product.share.parts[0].dim() else product.view(lambda part: part.reshape(1)))
        return SecretTensor(product)
    if not isinstance(x, SecretTensor):
        x, y = y, x
    secret = _secret(x, "mul")
    if secret.hidden is not None and (not isinstance(y, Tensor) or y.numel() == 1) and float(y) > 0:
        return mul(secret.shown(), y).masked(secret.hidden)  # minus infinity stays what it is
    return SecretTensor(times_public(secret, y) if isinstance(y, Tensor) else times_scalar(secret, float(y)))


@implements(torch.div, torch.true_divide, torch.divide, Tensor.div, Tensor.__truediv__, Tensor.true_divide)
def div(x: AnyOperand, y: AnyOperand, *, rounding_mode: str | None = None) -> SecretTensor:
    """Secret / public: `mul` by 1 / y. Raises UnsupportedOp for a secret y and for a rounding mode."""
    if isinstance(y, SecretTensor) or rounding_mode is not None:
        raise UnsupportedOp("division by a secret, or with rounding, has no private rule; add one in nn/ops_norm.py")
    return mul(x, 1.0 / y)


implements(torch.square, Tensor.square)(lambda x: mul(x, x))


@implements(torch.pow, Tensor.pow, Tensor.__pow__)
def power(x: AnyOperand, exponent: AnyOperand) -> SecretTensor:
    """Powers 1 (local), 2, 3 of a secret: exponent - 1 products of 2 rounds. Raises UnsupportedOp for others."""
    if isinstance(x, SecretTensor) and exponent in (1, 2, 3):
        return x if exponent == 1 else mul(x, x) if exponent == 2 else mul(mul(x, x), x)
    raise UnsupportedOp(f"pow with exponent {exponent!r} has no private rule; want a secret to the power 1, 2 or 3")


def _in_place(rule: Callable[..., SecretTensor], *ops: object) -> None:
    """A rule that rebinds. Raises PlaintextLeak for a plain x, UnsupportedOp where x has views or changes its shape."""

    def write(x: Tensor, *args: TorchArg, **settings: TorchArg) -> SecretTensor:
        return _secret(x, f"{rule.__name__}_").rebind(rule(x, *args, **settings))

    implements(*ops)(write)


_in_place(add, Tensor.add_, Tensor.__iadd__)
_in_place(sub, Tensor.sub_, Tensor.__isub__)
_in_place(mul, Tensor.mul_, Tensor.__imul__)
_in_place(div, Tensor.div_, Tensor.__itruediv__)


# -- masks --------------------------------------------------------------------------------------------------
@implements(torch.where, Tensor.where)
def where(condition: Tensor, x: AnyOperand, y: AnyOperand) -> SecretTensor:
    """Selection by a public condition; -inf hides. Local but for `add`. Raises UnsupportedOp for a secret condition."""
    if isinstance(condition, SecretTensor):
        if isinstance(x, SecretTensor) or not isinstance(x, Tensor) or x.dtype != torch.bool:
            raise UnsupportedOp("where with a secret condition has no private rule; compare with Fixed.less_than")
        condition, x = x, condition  # Tensor.where(self, condition, other)
    if isinstance(x, SecretTensor) and not isinstance(y, Tensor) and y <= MINUS_INFINITY:
        return masked_fill(x, ~condition, float(y))
    if isinstance(y, SecretTensor) and not isinstance(x, Tensor) and x <= MINUS_INFINITY:
        return masked_fill(y, condition, float(x))
    return add(_kept(x, condition), _kept(y, ~condition))


def _kept(x: AnyOperand, condition: Tensor) -> AnyOperand:
    """x where the condition holds, 0 elsewhere."""
    if isinstance(x, SecretTensor):
        return SecretTensor(times_public(x, condition)) if condition.numel() > 1 else mul(x, float(condition))
    return torch.where(condition, torch.as_tensor(x, dtype=torch.float32), 0.0)


@implements(torch.masked_fill, Tensor.masked_fill)
def masked_fill(x: SecretTensor, mask: Tensor, value: float) -> SecretTensor:
    """By a public mask; values of -1e9 or less hide entries from a softmax. Local. UnsupportedOp: a secret mask."""
    if isinstance(mask, SecretTensor):
        raise UnsupportedOp("masked_fill with a secret mask has no private rule")
    if value <= MINUS_INFINITY:
        return x.masked(mask.expand(x.shape))
    kept = SecretTensor(times_public(x, ~mask))
    return kept if value == 0 else plus(kept, mask.to(torch.float32) * value)


# -- casts: the outer dtype is all there is to change --------------------------------------------------------------
def _device_of(args: tuple[TorchArg, ...], kwargs: dict[str, TorchArg]) -> torch.device | None:
    for wish in (*args, *kwargs.values()):
        if isinstance(wish, torch.dtype) and not wish.is_floating_point:
            raise UnsupportedOp(f"cast of a secret tensor to {wish}; secrets are real numbers")
        if isinstance(wish, (torch.device, str)):
            return torch.device(wish)
        if isinstance(wish, Tensor) and not isinstance(wish, bool):
            return wish.device
    return None


@implements(Tensor.to)
def to(x: SecretTensor, *args: TorchArg, **kwargs: TorchArg) -> SecretTensor:
    """Floating casts change nothing; a device moves the shares. Raises UnsupportedOp for other dtypes."""
    kwargs = {k: v for k, v in kwargs.items() if k in ("device", "dtype", "other")}
    device = _device_of(args, kwargs)
    if device is None or device == x.device or device.type == "meta":
        return x
    return x.viewed(lambda part: part.to(device))


@implements(Tensor.type)
def cast_type(x: SecretTensor, dtype: TorchArg = None, **_: object) -> TorchArg:
    """The name of the outer type, or a floating cast (which changes nothing)."""
    return "torch.FloatTensor" if dtype is None else to(x, dtype) if isinstance(dtype, torch.dtype) else x


@implements(Tensor.cuda)
def cuda(x: SecretTensor, device: TorchArg = None, *_: object, **__: object) -> SecretTensor:
    """Shares to a GPU."""
    return to(x, torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda"))


implements(Tensor.cpu)(lambda x, *_, **__: to(x, torch.device("cpu")))
implements(torch.clone, Tensor.clone)(lambda x, **_: x.duplicate())  # shares are never written to: no copy
implements(
    Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type_as, Tensor.contiguous, Tensor.resolve_conj,
    Tensor.resolve_neg,
)(lambda x, *_, **__: x)  # fmt: skip


@implements(torch.nn.functional.dropout, torch.dropout, torch.nn.functional.dropout2d)
def dropout(x: SecretTensor, p: float = 0.5, training: bool = True, inplace: bool = False, **kw: bool) -> SecretTensor:
    """The identity of inference. Raises UnsupportedOp in training mode with p > 0."""
    if (training or kw.get("train")) and p > 0:
        raise UnsupportedOp("dropout in training mode on a secret tensor; call model.eval() first")
    return x


@implements(torch.zeros_like)
def zeros_like(x: SecretTensor, **_: object) -> Tensor:
    """Public zeros [x.shape], which may be added to secrets; writing a secret into them raises PlaintextLeak."""
    return torch.zeros(x.shape, device=x.device)


@implements(torch.ones_like, torch.empty_like, torch.full_like)
def like(x: SecretTensor, *_: object, **__: object) -> NoReturn:
    """Raises UnsupportedOp: a plain tensor in the shape of a secret invites writing the secret into it."""
    raise UnsupportedOp("ones_like/empty_like/full_like of a secret; make a public tensor from x.shape and x.device")


# -- complex numbers as pairs of secrets, as far as rotary embeddings need them -----------------------------------
class SecretComplex:
    """Secret pairs [.., 2] that stand for complex numbers [..]; no tensor, so that nothing else can be done to it."""

    __slots__ = ("device", "pairs", "shape")

    def __init__(self, pairs: Tensor) -> None:
        self.pairs, self.shape, self.device = pairs, pairs.shape[:-1], pairs.device

    def __mul__(self, other: Tensor) -> SecretComplex:
        """Times public complex numbers: as four products by public tensors, local. Raises UnsupportedOp for others."""
        if isinstance(other, SecretTensor) or not isinstance(other, Tensor) or not other.is_complex():
            raise UnsupportedOp("secret complex numbers can only be multiplied by public complex tensors")
        real, imaginary = self.pairs.unbind(-1)
        turned = (
            sub(mul(real, other.real), mul(imaginary, other.imag)),
            add(mul(real, other.imag), mul(imaginary, other.real)),
        )
        return SecretComplex(torch.stack(turned, -1))

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(
        cls, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (), kwargs: TorchArg = None
    ) -> TorchArg:
        """Products, and the way back to pairs; everything else raises."""
        if func is torch.view_as_real:
            return args[0].pairs
        if func in (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__):
            one, other = args
            return one * other if isinstance(one, SecretComplex) else other * one
        raise UnsupportedOp(f"{op_name(func)} of secret complex numbers has no private rule")


@implements(torch.view_as_complex)
def view_as_complex(x: SecretTensor) -> SecretComplex:
    """Pairs [.., 2] as complex numbers. Local. Raises UnsupportedOp for a last dimension that is no pair."""
    if x.shape[-1] != 2:
        raise UnsupportedOp(f"view_as_complex of a secret of shape {tuple(x.shape)}; want pairs in the last dimension")
    return SecretComplex(x)
