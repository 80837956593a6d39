"""private-llm: HuggingFace models on secret-shared data."""

from private_llm.config import VERSION, PrivateConfig
from private_llm.errors import (
    ConfigError,
    DomainError,
    PartiesBusy,
    PartyFailed,
    PatchMismatch,
    PlaintextLeak,
    PrivateLLMError,
    ProtocolAbort,
    ShareFileError,
    TransportError,
    UnsupportedOp,
)
from private_llm.sparsity_config import CometConfig
from private_llm.tls_config import TLSConfig

__version__ = VERSION

__all__ = [
    "CometConfig",
    "ConfigError",
    "DomainError",
    "PartiesBusy",
    "PartyFailed",
    "PatchMismatch",
    "PlaintextLeak",
    "PrivateConfig",
    "PrivateLLMError",
    "ProtocolAbort",
    "ShareFileError",
    "TLSConfig",
    "TransportError",
    "UnsupportedOp",
    "__version__",
]
