"""The rings Z/2^32 and Z/2^64 as two's complement torch integers, and fixed point on top of them.

A real value v is held as round(v * 2^frac) mod 2^bits. Additions and products of torch integers wrap
modulo 2^bits by themselves, so ring arithmetic is plain torch arithmetic.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from private_llm.errors import ConfigError, DomainError


@dataclass(frozen=True)
class Ring:
    """Z/2^bits held in a signed torch dtype of the same width. Raises ConfigError for bits other than 32 and 64."""

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (32, 64):
            raise ConfigError(f"ring: got {self.bits} bits; want 32 or 64")

    @cached_property
    def dtype(self) -> torch.dtype:
        """The torch dtype that holds one ring element."""
        return torch.int64 if self.bits == 64 else torch.int32

    @cached_property
    def bytes(self) -> int:
        """Bytes of one ring element: 8 or 4."""
        return self.bits // 8

    @cached_property
    def value_bits(self) -> int:
        """Bits of magnitude a value may use before truncation: |z| < 2^(bits-2) (wrap-free truncation)."""
        return self.bits - 2

    def constant(self, value: int) -> int:
        """`value` reduced to the signed range of the ring, -2^(bits-1) to 2^(bits-1) - 1."""
        half = 1 << (self.bits - 1)
        return (value + half) % (1 << self.bits) - half

    def encode(self, values: Tensor, frac: int) -> Tensor:
        """Real values to ring elements of their shape with `frac` fractional bits, rounded to nearest (ties to even).

        Raises DomainError for NaN, infinities, or |v| * 2^frac >= 2^(bits-2). Meta tensors are not looked at.
        """
        if values.device.type == "meta":
            return torch.empty(values.shape, dtype=self.dtype, device="meta")
        scaled = (values.detach() if values.requires_grad else values).to(torch.float64) * float(1 << frac)
        limit = float(2 ** (self.bits - 2))
        if scaled.numel() and not float(scaled.abs().max()) < limit:  # NaN if one of them is
            if bad := int((~torch.isfinite(scaled)).sum()):
                raise DomainError(
                    f"{bad} of {values.numel()} values are NaN or infinite; want finite numbers "
                    "(replace them before sharing)"
                )
            raise DomainError(
                f"a value exceeds the ring: |v| must stay below {limit / (1 << frac):g} with {frac} "
                f"fractional bits in a {self.bits}-bit ring (scale the tensor, or lower frac_bits)"
            )
        return scaled.round().to(self.dtype)

    def decode(self, elements: Tensor, frac: int) -> Tensor:
        """Ring elements with `frac` fractional bits to float64 values of their shape (exact up to 2^53 in size)."""
        return elements.to(torch.float64) / float(1 << frac)


RING64 = Ring(64)
RING32 = Ring(32)
