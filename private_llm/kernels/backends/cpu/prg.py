"""Key streams on the CPU, by the vectorised code of OpenSSL (`cryptography`)."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from private_llm.kernels.address import Array

_ZEROS = memoryview(bytes(1 << 20))


class KeyStream:
    """The blocks of one key, of AES in counter mode (16 bytes) or of ChaCha20 (32), numbered as `ops.chacha20` does;
    where one call ends the next one begins at no cost. Not thread-safe.
    """

    __slots__ = ("_at", "_encrypt", "_key", "block")

    def __init__(self, key: bytes) -> None:
        self._key, self._at, self.block = key, -1, 16 if len(key) == 16 else 64

    def _from(self, number: int) -> CipherContext:
        if self.block == 16:
            return Cipher(algorithms.AES(self._key), modes.CTR(number.to_bytes(16, "big"))).encryptor()
        return Cipher(algorithms.ChaCha20(self._key, number.to_bytes(16, "little")), mode=None).encryptor()

    def write(self, number: int, octets: Array, skipped: int = 0) -> None:
        """Overwrite octets [bytes] uint8 with the key stream from block `number` on, without so many bytes of it."""
        if skipped:
            block = np.empty(self.block, dtype=np.uint8)
            self.write(number, block)
            head = min(self.block - skipped, octets.size)
            octets[:head] = block[skipped : skipped + head]
            number, octets = number + 1, octets[head:]
        first = 0
        while first < octets.size:
            if number != self._at or not number % (1 << 32):  # OpenSSL's counter of ChaCha20 has 32 bits
                self._encrypt = self._from(number)
            last = min(first + self.block * ((1 << 32) - number % (1 << 32)), first + len(_ZEROS), octets.size)
            self._encrypt.update_into(_ZEROS[: last - first], octets[first:last].data)
            number += -((first - last) // self.block)
            self._encrypt.update(_ZEROS[: (first - last) % self.block])
            first, self._at = last, number


def chacha20(key: Array, number: int, out: Array) -> None:
    """Overwrite out [words] with the key stream from block `number` on; see `ops.chacha20`."""
    KeyStream(key.astype("<i4").tobytes()).write(number, out.view(np.uint8))
