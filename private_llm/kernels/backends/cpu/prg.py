"""ChaCha20 key streams on the CPU, by the vectorised code of OpenSSL (`cryptography`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

Array = np.ndarray[Any, Any]

_ZEROS = bytes(1 << 20)


def chacha20(key: Array, nonce: Array, counter: int, out: Array) -> None:
    """Overwrite out [words] with the key stream from block `counter` on; key [8], nonce [3]; all 32-bit words."""
    start = np.array([counter], dtype="<u4").tobytes() + nonce.astype("<i4").tobytes()
    encrypt = Cipher(algorithms.ChaCha20(key.astype("<i4").tobytes(), start), mode=None).encryptor()
    stream = out.view(np.uint8)
    for first in range(0, stream.size, len(_ZEROS)):
        part = stream[first : first + len(_ZEROS)]
        encrypt.update_into(memoryview(_ZEROS)[: part.size], part.data)
