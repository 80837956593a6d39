"""What a user chooses: one frozen, checked configuration; an unknown key is an error."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from private_llm.errors import ConfigError

VERSION = "0.1.0"
"""Version of the library; parties with different versions refuse each other."""

_CHOICES: dict[str, tuple[object, ...]] = {
    "protocol": ("trio", "quad", "dealer", "plain"),
    "ring": (64, 32),
    "weights": ("secret", "public"),
    "reveal": ("logits", "token"),
    "adder": ("auto", "prefix", "ripple"),
    "truncation": ("unit", "exact"),
    "matmul": ("masked", "remask"),
    "party_mode": ("auto", "threads", "processes", "remote", "distributed"),
}

_AGREED = (
    "protocol", "ring", "frac_bits", "weights", "reveal", "adder", "bandwidth_mbit", "latency_ms", "relu_bits",
    "relu_low", "truncation", "matmul",
)  # fmt: skip
"""What all parties must agree upon: these settings change the order or the meaning of messages."""


@dataclass(frozen=True)
class TLSConfig:
    """Paths of this endpoint's certificate and key and of the CA that signed all endpoints (mutual TLS 1.3).

    The certificate's common name must be the endpoint's name (`party0`, `party1`, ..., `client`).
    """

    certificate: str
    key: str
    ca: str


@dataclass(frozen=True)
class PrivateConfig:
    """How a model is run privately.

    protocol: "trio" (three parties, semi-honest, honest majority), "quad" (four parties, one of them malicious: abort),
    "dealer" (two parties and a dealer of random numbers, party 0), or "plain" (no secrecy; needs insecure=True).
    ring: bits of the ring, 64 or 32. frac_bits: fractional bits of activations and weights.
    weights: "secret" (shared by the model owner) or "public" (an open-weight model; linear layers get local).
    reveal: "logits" (the client opens logits) or "token" (the client opens only the arg max).
    adder: circuit of comparisons: "prefix" (few rounds), "ripple" (fewest bytes), "auto" (for each comparison
    the one that is faster on a network of `bandwidth_mbit` per party and `latency_ms`; "prefix" without a bandwidth).
    relu_bits: key bits of ReLU: its inputs stay below 2^(relu_bits-1-frac_bits) in magnitude (None: 2^20, or the
    whole ring). relu_low: lowest bits that ReLU ignores: inputs from 0 to 2^(relu_low-frac_bits) may become 0.
    truncation: "unit" (at most one unit in the last place too high) or "exact" (floor, by one more comparison).
    matmul: "masked" (output-sized traffic), or for "dealer" also "remask" (both operands masked anew each time, the
    classical way).
    party_mode: "threads" or "processes" on this machine, "remote" (addresses in `hosts`), "distributed" (one
    process per party under torchrun or Accelerate's launcher, the client last), or "auto".
    trusted_network: let "distributed" span machines although torch.distributed does not encrypt.
    hosts: "host:port" of each party for party_mode="remote". tls: certificates of this endpoint.
    allow_plain_loopback: permit unencrypted sockets, on loopback addresses only.
    timeout_s: seconds of silence after which a party counts as dead.
    debug_ranges: check that no value leaves the safe range (opens nothing to the parties' network; plain only).
    insecure: must be True for protocol="plain".
    """

    protocol: Literal["trio", "quad", "dealer", "plain"] = "trio"
    ring: Literal[64, 32] = 64
    frac_bits: int = 18
    weights: Literal["secret", "public"] = "secret"
    reveal: Literal["logits", "token"] = "logits"
    adder: Literal["auto", "prefix", "ripple"] = "auto"
    bandwidth_mbit: float | None = None
    latency_ms: float = 0.05
    relu_bits: int | None = None
    relu_low: int = 0
    truncation: Literal["unit", "exact"] = "unit"
    matmul: Literal["masked", "remask"] = "masked"
    party_mode: Literal["auto", "threads", "processes", "remote", "distributed"] = "auto"
    hosts: tuple[str, ...] = ()
    tls: TLSConfig | None = None
    allow_plain_loopback: bool = False
    trusted_network: bool = False
    timeout_s: float = 120.0
    debug_ranges: bool = False
    insecure: bool = False

    def __post_init__(self) -> None:
        for key, allowed in _CHOICES.items():
            if getattr(self, key) not in allowed:
                raise ConfigError(f"{key}: got {getattr(self, key)!r}; want one of {', '.join(map(repr, allowed))}")
        top = 20 if self.ring == 64 else 13
        if not 4 <= self.frac_bits <= top:
            raise ConfigError(f"frac_bits: got {self.frac_bits}; want 4 to {top} in a {self.ring}-bit ring")
        if self.protocol == "plain" and not self.insecure:
            raise ConfigError("protocol 'plain' hides nothing; pass insecure=True to use it for tests")
        if self.debug_ranges and self.protocol != "plain":
            raise ConfigError("debug_ranges reads values, so it needs protocol='plain' (and insecure=True)")
        if self.matmul == "remask" and self.protocol != "dealer":
            raise ConfigError("matmul='remask' is a way of protocol='dealer'; the others mask each operand once")
        if (self.bandwidth_mbit is not None and not self.bandwidth_mbit > 0) or not self.latency_ms >= 0:
            raise ConfigError(
                f"bandwidth_mbit, latency_ms: got {self.bandwidth_mbit!r}, {self.latency_ms!r}; want a positive and a "
                "non-negative number"
            )
        if self.relu_bits is not None and not self.frac_bits < self.relu_bits <= self.ring:
            raise ConfigError(
                f"relu_bits: got {self.relu_bits}; want more than frac_bits ({self.frac_bits}), at most {self.ring}"
            )
        if not 0 <= self.relu_low < self.frac_bits:
            raise ConfigError(f"relu_low: got {self.relu_low}; want 0 or more, below frac_bits ({self.frac_bits})")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s: got {self.timeout_s!r}; want a positive number of seconds")
        if self.party_mode == "remote" and len(self.hosts) != self.parties:
            raise ConfigError(f"hosts: got {len(self.hosts)} addresses; want {self.parties} for {self.protocol!r}")

    @property
    def parties(self) -> int:
        """Number of computing parties."""
        return {"trio": 3, "quad": 4, "dealer": 3, "plain": 1}[self.protocol]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PrivateConfig:
        """Build from a mapping (for instance JSON); unknown keys raise ConfigError."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown key(s) {', '.join(unknown)}; known keys: {', '.join(sorted(known))}")
        values = dict(values)
        if isinstance(values.get("tls"), dict):
            values["tls"] = TLSConfig(**values["tls"])
        if "hosts" in values:
            values["hosts"] = tuple(values["hosts"])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The inverse of `from_dict`."""
        return dataclasses.asdict(self)

    def agreement(self) -> bytes:
        """Digest of everything all parties must agree upon, with the library's version."""
        shared = {key: getattr(self, key) for key in _AGREED}
        return hashlib.sha256(json.dumps([VERSION, shared], sort_keys=True).encode()).digest()
