"""ChaCha20 key streams on the CPU, by the vectorised code of OpenSSL (`cryptography`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

Array = np.ndarray[Any, Any]

_ZEROS = memoryview(bytes(1 << 20))


class KeyStream:
    """The blocks of one key, numbered as `ops.chacha20` does; where one call ends the next one begins at no cost."""

    __slots__ = ("_at", "_encrypt", "_key")

    def __init__(self, key: bytes) -> None:
        self._key, self._at = key, -1

    def write(self, number: int, octets: Array) -> None:
        """Overwrite octets [bytes] uint8 with the key stream from block `number` on."""
        first = 0
        while first < octets.size:
            if number != self._at or not number % (1 << 32):  # OpenSSL's counter has 32 bits
                start = algorithms.ChaCha20(self._key, number.to_bytes(16, "little"))
                self._encrypt = Cipher(start, mode=None).encryptor()
            last = min(first + 64 * ((1 << 32) - number % (1 << 32)), first + len(_ZEROS), octets.size)
            self._encrypt.update_into(_ZEROS[: last - first], octets[first:last].data)
            number += -((first - last) // 64)
            self._encrypt.update(_ZEROS[: (first - last) % 64])
            first, self._at = last, number


def chacha20(key: Array, number: int, out: Array) -> None:
    """Overwrite out [words] with the key stream from block `number` on; see `ops.chacha20`."""
    KeyStream(key.astype("<i4").tobytes()).write(number, out.view(np.uint8))
