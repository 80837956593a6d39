"""Network namespaces of this machine whose links Linux slows down: one for each party and for the client, at a switch.

Speed is `tc tbf`, delay is `tc netem`, which some kernels lack. Needs Linux, root (or the right to make network
namespaces), `ip` and `tc` (iproute2), `unshare` (util-linux). Nothing outside the namespaces is changed, and they go
away with the context.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

CLIENT_HOST = 200
"""The client's number among the namespaces; parties have 0, 1, 2, ..."""
_BURST_KB = 512
_LONGEST_QUEUE = 100_000
"""Packets that a delayed link may hold: 20 ms at 10 Gbit/s are 17,000 of 1500 bytes."""


def missing_rights() -> str:
    """Why namespaces cannot be made here, or an empty string."""
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"the program '{tool}' is not installed (iproute2 and util-linux have them)"
    refused = _refused(shaped("lo", 1000.0))
    if refused:
        return f"this user may not make or shape network namespaces ({refused}); run it as root"
    return ""


def can_delay() -> bool:
    """Whether this kernel has netem."""
    return not _refused(shaped("lo", 1000.0, 1.0))


def _refused(command: str) -> str:
    """What the system says against a command of `tc` in a namespace made for it; empty if nothing."""
    tried = subprocess.run(
        ["unshare", "-n", "sh", "-c", f"ip link set lo up && {command}"], capture_output=True, text=True, check=False
    )
    return (tried.stderr.strip() or f"status {tried.returncode}") if tried.returncode else ""


def shaped(device: str, rate: float, latency_ms: float = 0.0, burst_kb: int = _BURST_KB) -> str:
    """The shell command that limits (Mbit/s), and delays (ms), what leaves a device.

    burst_kb: what a silent link may send at once; netem has no such bucket.
    """
    if latency_ms:
        return f"tc qdisc add dev {device} root netem delay {latency_ms:g}ms rate {rate:g}mbit limit {_LONGEST_QUEUE}"
    return f"tc qdisc add dev {device} root tbf rate {rate:g}mbit burst {burst_kb}kb latency 200ms"


@contextmanager
def switch(parties: int, rate: float, latency_ms: float = 0.0, burst_kb: int = _BURST_KB) -> Iterator[dict[int, str]]:
    """Namespaces joined by a bridge, one per endpoint (the client's number is CLIENT_HOST): their names.

    rate: Mbit/s in each direction of every endpoint's link; 0: as fast as the machine. latency_ms: what a party sends
    arrives so much later. burst_kb: as for `shaped`.
    """
    tag = f"pllm{os.getpid()}"
    names = {number: f"{tag}-{number}" for number in [*range(parties), CLIENT_HOST]}
    with ExitStack() as stack:
        hub = f"{tag}-hub"
        for name in (hub, *names.values()):
            _run(f"ip netns add {name}")
            stack.callback(_run, f"ip netns del {name}")
        _run(f"ip -n {hub} link add bridge type bridge && ip -n {hub} link set bridge up")
        for number, name in names.items():
            port = f"port{number}"
            _run(f"ip -n {hub} link add {port} type veth peer name eth0 netns {name}")
            _run(f"ip -n {hub} link set {port} master bridge up && ip -n {name} link set eth0 up")
            _run(f"ip -n {name} link set lo up && ip -n {name} addr add {address(number)}/24 dev eth0")
            if rate:  # what a machine receives is what leaves its port at the switch
                delay = 0.0 if number == CLIENT_HOST else latency_ms
                _run(f"ip netns exec {hub} {shaped(port, rate, 0.0, burst_kb)}")
                _run(f"ip netns exec {name} {shaped('eth0', rate, delay, burst_kb)}")
        yield names


def address(number: int) -> str:
    """Of an endpoint in its namespace."""
    return f"10.77.0.{number + 1}"


def _run(command: str) -> None:
    subprocess.run(command, shell=True, check=True)
