"""Parties as child processes of this one, over loopback sockets; they end when this process does.

A child gets its order (one line of JSON) on standard input, which stays open as long as the parent lives. What it runs
is named as "module:function" and called as function(config, party, transport, **extra); any result but None
is a reason for which it failed.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from private_llm.config import PrivateConfig
from private_llm.errors import PartyFailed
from private_llm.net.hub import connect, hosts_of, open_listeners
from private_llm.net.sockets import SocketTransport
from private_llm.net.transport import CLIENT

_CHILD = "import sys; from private_llm.net.children import main; sys.exit(main())"
_READY = b"ready\n"
"""What a child writes to standard output once it has started."""
_EXIT_S = 5.0
"""Seconds a child may take to end before it is killed."""


def start_children(
    config: PrivateConfig, entry: str, extra: Mapping[str, Any]
) -> tuple[SocketTransport, Callable[[], None]]:
    """Start all parties; the client's transport to them, and a function that ends them (idempotent).

    extra must be JSON. Raises PartyFailed for a child that does not start.
    """
    listeners = open_listeners(config.parties)
    hosts = hosts_of(listeners)
    token = secrets.token_bytes(32)
    children: list[subprocess.Popen[bytes]] = []
    order = {
        "config": config.to_dict(),
        "hosts": hosts,
        "token": token.hex(),
        "entry": entry,
        "extra": dict(extra),
    }
    try:
        for number, listener in enumerate(listeners):
            children.append(_spawn(config, {**order, "party": number, "listener": listener.fileno()}))
            listener.close()
        for number, child in enumerate(children):
            if child.stdout is None or child.stdout.readline() != _READY:
                raise PartyFailed(f"party {number} did not start; its own message is on standard error")
        transport = connect(config, CLIENT, hosts=hosts, token=token)
    except BaseException:
        _end(children)
        raise

    def stop() -> None:
        _end(children)
        transport.close()

    return transport, stop


def _spawn(config: PrivateConfig, order: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // config.parties)
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # an interrupt at the terminal is the parent's to handle
        pass_fds=[order["listener"]],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": str(threads),
        },
    )
    if child.stdin is not None:
        child.stdin.write(json.dumps(order).encode() + b"\n")
        child.stdin.flush()
    return child


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.stdin is not None:
            child.stdin.close()
    for child in children:
        try:
            child.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


# -- in the child ---------------------------------------------------------------------------------------------
def main() -> int:
    """Read the order, connect, run."""
    order = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_die_with_parent, name="parent watch", daemon=True).start()
    config = PrivateConfig.from_dict(order["config"])
    module, _, name = order["entry"].partition(":")
    run = getattr(importlib.import_module(module), name)
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()
    listener = socket.socket(fileno=order["listener"])
    transport = connect(
        config, order["party"], hosts=order["hosts"], token=bytes.fromhex(order["token"]), listener=listener
    )
    reason = run(config, order["party"], transport, **order["extra"])
    transport.close()
    return 0 if reason is None else 1


def _die_with_parent() -> None:
    """End at once when the parent closes its end, which it also does by dying."""
    while os.read(0, 1):  # not through sys.stdin, whose lock would be held when this process ends first
        pass
    os._exit(0)
