"""Secret tensors of a cleartext session: what the rules of the op table are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.net.local import LocalMesh
from private_llm.protocols.plain import CheckedPlain, Plain
from private_llm.protocols.session import Session
from private_llm.protocols.share import cleartext
from private_llm.ring.ring import Ring
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor


def plain_session(**settings: object) -> Session:
    """A session of the cleartext reference protocol, alone."""
    config = PrivateConfig(protocol="plain", insecure=True, **settings)  # type: ignore[arg-type]
    protocol = CheckedPlain if config.debug_ranges else Plain
    return Session(config, protocol(0, LocalMesh(1).transport(0), Ring(config.ring)))


def fixed(session: Session, values: Tensor, frac: int | None = None) -> Fixed:
    """Real values as a secret with `frac` fractional bits (default: the session's)."""
    frac = session.frac if frac is None else frac
    return Fixed(session, cleartext(session.ring.encode(values, frac), session.config.debug_ranges), frac)


def secret(session: Session, values: Tensor, frac: int | None = None) -> SecretTensor:
    """The same as a tensor."""
    return SecretTensor(fixed(session, values, frac))


def opened(x: Tensor | Fixed) -> Tensor:
    """The real values of a secret of a cleartext session."""
    value = x.value(masked=True) if isinstance(x, SecretTensor) else x
    if not isinstance(value, Fixed):
        raise TypeError(f"not a secret: {type(x).__name__}")
    return value.session.ring.decode(value.share.parts[0], value.frac)


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Reproducible normal values on the grid of 2^-10, so that sums and powers of two stay exact."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return (values * 1024).round() / 1024
