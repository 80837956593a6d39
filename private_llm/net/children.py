"""Parties as processes of this machine, over sockets of its own; they end when this process does.

One child imports what the parties run, which takes seconds, and forks into all of them. They share code only: keys,
sockets and shares are made afterwards, in each. The child gets its orders (one line of JSON) on standard input, which
stays open as long as the parent lives. What the parties run is named as "module:function" and called as
function(config, party, transport, **extra); any result but None is a reason for which it failed.

A server that is killed is started again, at the same address, while others go on; one that ends by itself has a reason.
"""

import contextlib
import importlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from private_llm.config import PrivateConfig
from private_llm.errors import PartyFailed, undoing
from private_llm.forks import Origin
from private_llm.importing import python_like_this
from private_llm.kernels.compile_note import NOTE
from private_llm.kernels.parallel import threads_per_node, usable_cores
from private_llm.net.addresses import hosts_of, open_named_listeners
from private_llm.net.rendezvous import connect
from private_llm.net.sockets import SocketTransport
from private_llm.net.transport import CLIENT

_CHILD = "from private_llm.net.children import main; main()"
_READY = b"ready\n"  # what each party writes to standard output once it has started
_EXIT_S = 5.0  # seconds the parties may take to end before they are killed
_STARTS = 20  # how often a server is started at most: one that is killed each time may have too little memory
_PAUSE_S = 0.2

RunParty = Callable[..., str | None]


def start_children(
    config: PrivateConfig, entry: str, extra: Mapping[str, Any]
) -> tuple[SocketTransport, Callable[[], None]]:
    """Start all parties; the client's transport and a function that ends them. Raises PartyFailed. extra: JSON."""
    listeners = open_named_listeners(config.endpoints)
    hosts, token = hosts_of(listeners), secrets.token_bytes(32)
    end = start_servers(config, entry, extra, listeners, hosts, token.hex())
    with undoing(end):
        transport = connect(config, CLIENT, hosts=hosts, token=token)

    def stop() -> None:
        end()
        transport.close()  # nothing in a fork, either

    return transport, stop


def start_servers(
    config: PrivateConfig, entry: str, extra: Mapping[str, Any], listeners: Sequence[socket.socket],
    hosts: Sequence[str] = (), token: str | None = None,
) -> Callable[[], None]:  # fmt: skip
    """Start all parties as servers at these sockets; a function that ends them (idempotent; nothing in a fork).

    What is named runs as function(config, party, listener, **extra), where extra must be JSON. A server that is killed
    is started again. With a token they are no servers, but connect at `hosts`, as `start_children` says.
    The listeners are closed here. Raises PartyFailed if the parties do not start.
    """
    order = {
        "config": config.to_dict(),
        "hosts": hosts,
        "token": token,
        "entry": entry,
        "extra": dict(extra),
        "listeners": [listener.fileno() for listener in listeners],
    }
    child, origin = _spawn(config, listeners), Origin()
    with undoing(lambda: _end(child)):
        _hand_over(child, order, len(listeners))
    for listener in listeners:
        listener.close()

    def stop() -> None:
        if origin.here:
            _end(child)

    return stop


def _spawn(config: PrivateConfig, listeners: Sequence[socket.socket]) -> subprocess.Popen[bytes]:
    threads = max(1, usable_cores() // config.endpoints)
    if config.protocol == "cascade" and config.plan is not None:
        threads = threads_per_node(config.plan.alpha)
    command, environment = python_like_this(_CHILD)
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # an interrupt at the terminal is the parent's to handle
        pass_fds=[listener.fileno() for listener in listeners],
        env={**environment, "OMP_NUM_THREADS": str(threads)},
    )


def _hand_over(child: subprocess.Popen[bytes], order: Mapping[str, Any], parties: int) -> None:
    """Write the order, and wait until every party has started."""
    if child.stdin is None or child.stdout is None:
        raise PartyFailed("the parties' process has no pipes")
    started = 0
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(order).encode() + b"\n")
        child.stdin.flush()
        started = sum(child.stdout.readline() == _READY for _ in range(parties))
    if started < parties:
        raise PartyFailed("the parties' process did not start; its own message is on standard error")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Close the pipe, which ends all parties; kill them if they do not end."""
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
    try:
        child.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # its own session holds itself and the parties it forked
        child.wait()
    if child.stdout is not None:
        child.stdout.close()


# -- in the child ---------------------------------------------------------------------------------------------
def main() -> NoReturn:
    """Read the order, import, fork one party for each listener, wait for all, and exit (0 if all ended well).

    Servers that are killed are forked again: this process has imported only, and still has their listeners.
    """
    order = json.loads(sys.stdin.buffer.readline())
    module, _, name = order["entry"].partition(":")
    run: RunParty = getattr(importlib.import_module(module), name)
    config = PrivateConfig.from_dict(order["config"])  # a protocol that only the parent registered ends all here
    again = order["token"] is None
    starts = [0] * len(order["listeners"])
    parties: dict[int, int] = {}
    failed = False

    def start(number: int) -> None:
        starts[number] += 1
        process = os.fork()
        if process == 0:
            os._exit(_be_party(config, order, number, run))
        parties[process] = number

    for number in range(len(starts)):
        start(number)
    while parties:
        process, status = os.wait()
        number = parties.pop(process)
        if again and os.WIFSIGNALED(status) and starts[number] < _STARTS:
            time.sleep(_PAUSE_S)
            start(number)
        else:
            failed = failed or status != 0
    os._exit(int(failed))  # at once: an orderly end of the interpreter takes seconds and has nothing to do


def _be_party(config: PrivateConfig, order: Mapping[str, Any], number: int, run: RunParty) -> int:
    """Connect and run one party; 0 if it ended well."""
    threading.Thread(target=_die_with_parent, name="parent watch", daemon=True).start()
    if number:  # all of them compile the same kernels, and write to one terminal
        NOTE.take(None)
    NOTE.of_client = True
    for other, descriptor in enumerate(order["listeners"]):
        if other != number:
            os.close(descriptor)
    os.write(sys.stdout.fileno(), _READY)
    listener = socket.socket(fileno=order["listeners"][number])
    try:
        if order["token"] is None:
            return int(run(config, number, listener, **order["extra"]) is not None)
        transport = connect(
            config, number, hosts=order["hosts"], token=bytes.fromhex(order["token"]), listener=listener
        )
        reason = run(config, number, transport, **order["extra"])
        transport.close()
    finally:
        sys.stderr.flush()
    return int(reason is not None)


def _die_with_parent() -> None:
    """End at once when the parent closes its end, which it also does by dying."""
    while os.read(0, 1):  # not through sys.stdin, whose lock would be held when this process ends first
        pass
    os._exit(0)
