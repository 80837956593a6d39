"""Complex numbers as pairs of secrets, as far as rotary embeddings need them: made, turned by public ones, unmade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from private_llm.errors import UnsupportedOp
from private_llm.tensor.dispatch import TorchArg, implements, op_name
from private_llm.tensor.ops_index import stack
from private_llm.tensor.ops_pointwise import add, mul, sub
from private_llm.tensor.secret import SecretTensor


class SecretComplex:
    """Secret pairs [.., 2] that stand for complex numbers [..]; no tensor, so that nothing else can be done to it."""

    __slots__ = ("_pairs",)

    def __init__(self, pairs: SecretTensor) -> None:
        self._pairs = pairs

    @property
    def pairs(self) -> SecretTensor:
        """Real and imaginary parts, [.., 2]."""
        return self._pairs

    @property
    def shape(self) -> torch.Size:
        """Public shape."""
        return self._pairs.shape[:-1]

    @property
    def device(self) -> torch.device:
        """Where public operands should live."""
        return self._pairs.device

    def __mul__(self, other: Tensor) -> SecretComplex:
        """Times public complex numbers: as four products by public tensors, local. Raises UnsupportedOp for others."""
        if isinstance(other, SecretTensor) or not isinstance(other, Tensor) or not other.is_complex():
            raise UnsupportedOp("secret complex numbers can only be multiplied by public complex tensors")
        real, imaginary = self._pairs[..., 0], self._pairs[..., 1]
        turned = (
            sub(mul(real, other.real), mul(imaginary, other.imag)),
            add(mul(real, other.imag), mul(imaginary, other.real)),
        )
        return SecretComplex(stack(turned, -1))

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(
        cls,
        func: TorchArg,
        types: Sequence[type],
        args: Sequence[TorchArg] = (),
        kwargs: Mapping[str, TorchArg] | None = None,
    ) -> TorchArg:
        """Products, and the way back to pairs; everything else is refused."""
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
