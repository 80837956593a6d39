"""Masks of inputs: each from a label that is drawn when the mask is needed, so that none comes twice.

A counter would come twice after a snapshot of the client is restored; a label of 16 bytes from the operating system's
entropy at that moment does not, whatever was restored. The clock is part of it: a restored machine whose entropy pool
was restored, too, draws at another time.
"""

import secrets
import time

from torch import Tensor

from private_llm.ring.prg import Seed


def fresh_label() -> str:
    """The label of a mask that nobody has drawn yet."""
    return f"{secrets.token_hex(16)}-{time.time_ns():x}"


def mask(seed: Seed, label: str, rows: int, inputs: int) -> Tensor:
    """The mask of this label, int64 [rows, inputs], uniform. Raises ProtocolAbort in a fork."""
    return seed.first_words(label, rows * inputs).view(rows, inputs)
