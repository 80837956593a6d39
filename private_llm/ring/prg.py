"""Pseudorandom streams for shares: AES-128 in counter mode, one key per pair of parties and purpose.

A `Seed` (32 bytes of OS entropy) never leaves the parties that share it. A stream key is
BLAKE2b(key=seed, person="pllm-prg", label), so two labels give independent streams. A stream hands out
consecutive blocks and cannot be rewound: no (key, counter) pair is used twice. Known-answer tests
pin key derivation and stream (tests/ring/test_prg.py).
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from private_llm.errors import ConfigError
from private_llm.ring.ring import Ring

_ZEROS = bytes(1 << 20)


class Seed:
    """32 secret bytes; `repr` never shows them."""

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        if len(raw) != 32:
            raise ConfigError(f"seed: got {len(raw)} bytes; want 32")
        self._raw = bytes(raw)

    @classmethod
    def fresh(cls) -> Seed:
        """A new seed from the operating system's entropy."""
        return cls(secrets.token_bytes(32))

    def derive(self, label: str) -> Seed:
        """An independent seed for `label` (domain separation)."""
        return Seed(hashlib.blake2b(label.encode(), key=self._raw, digest_size=32, person=b"pllm-seed").digest())

    def stream(self, label: str) -> Prg:
        """The stream of this seed for `label`."""
        key = hashlib.blake2b(label.encode(), key=self._raw, digest_size=16, person=b"pllm-prg").digest()
        return Prg(key)

    def raw(self) -> bytes:
        """The bytes, for a key exchange or a share file that only the holder may read."""
        return self._raw

    def __repr__(self) -> str:
        return "Seed(<secret>)"

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("a Seed is not serialised by pickle; use raw() over an authenticated channel")


class Prg:
    """An AES-128-CTR stream that yields ring elements and packed words. Not thread-safe."""

    __slots__ = ("_encrypt",)

    def __init__(self, key: bytes) -> None:
        self._encrypt = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def fill(self, out: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Overwrite `out` (uint8, contiguous) with the next stream bytes, block-aligned per call."""
        n = out.size
        start = 0
        while start < n:
            stop = min(start + len(_ZEROS), n)
            self._encrypt.update_into(memoryview(_ZEROS)[: stop - start], out[start:stop].data)
            start = stop
        if n % 16:
            self._encrypt.update(_ZEROS[: 16 - n % 16])

    def words(self, count: int, device: str | torch.device = "cpu") -> Tensor:
        """`count` uniform 64-bit words as int64 [count]."""
        return self._draw(count, torch.int64, device)

    def elements(self, count: int, ring: Ring, device: str | torch.device = "cpu") -> Tensor:
        """`count` uniform ring elements [count]."""
        return self._draw(count, ring.dtype, device)

    def _draw(self, count: int, dtype: torch.dtype, device: str | torch.device) -> Tensor:
        if str(device) == "meta":
            return torch.empty(count, dtype=dtype, device="meta")
        out = torch.empty(count, dtype=dtype)
        if count:
            self.fill(out.numpy().view(np.uint8))
        return out if str(device) == "cpu" else out.to(device)

    def __repr__(self) -> str:
        return "Prg(<secret>)"
