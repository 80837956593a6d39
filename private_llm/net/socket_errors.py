"""How sockets say that something is not possible now, or not any more."""

from __future__ import annotations

import ssl

BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""There is nothing to read, or no room to write."""


def cause(error: OSError) -> str:
    """An operating system's error in words, without its arguments."""
    return error.strerror or type(error).__name__
