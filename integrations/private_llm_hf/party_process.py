"""A party as a child process: orders on standard input, which stays open as long as the parent lives."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading

from private_llm.config import PrivateConfig
from private_llm.net.hub import connect
from private_llm_hf.party import run_party

READY = b"ready\n"
"""What a child writes to standard output once it has started."""


def main() -> int:
    """Read the order (one JSON line), connect, serve one session."""
    order = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_die_with_parent, name="parent watch", daemon=True).start()
    config = PrivateConfig.from_dict(order["config"])
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    listener = socket.socket(fileno=order["listener"])
    transport = connect(
        config, order["party"], hosts=order["hosts"], token=bytes.fromhex(order["token"]), listener=listener
    )
    reason = run_party(config, order["party"], transport)
    transport.close()
    return 0 if reason is None else 1


def _die_with_parent() -> None:
    """End at once when the parent closes its end, which it also does by dying."""
    while sys.stdin.buffer.read(1):
        pass
    os._exit(0)
