"""Networks for `walk_deploy.py`: a namespace per organisation joined by a bridge, or loopback addresses."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

SHAPE = ("root", "tbf", "rate", "100mbit", "burst", "32k", "latency", "50ms")
"""What each organisation's link lets through."""


@dataclass
class Network:
    """Where places have their addresses. faults: what can happen to a party here."""

    words: str
    addresses: dict[str, str]
    faults: tuple[str, ...]
    names: dict[str, str] = field(default_factory=dict)
    ports: dict[int, int] = field(default_factory=dict)

    def prefix(self, place: str) -> list[str]:
        """What to put before a command so that it runs at a place."""
        return ["ip", "netns", "exec", self.names[place]] if self.names else []

    def link(self, place: str, *, up: bool) -> None:
        """Plug a place in, or out."""
        _ip("-n", self.names[place], "link", "set", "eth0", "up" if up else "down")

    def operator_port(self, number: int) -> int:
        """A port of a party's own loopback interface; the machine's, without namespaces."""
        if self.names:
            return 9100
        if number not in self.ports:
            with socket.create_server(("127.0.0.1", 0)) as sock:
                self.ports[number] = sock.getsockname()[1]
        return self.ports[number]


def why_no_namespaces() -> str | None:
    """Why this user cannot make network namespaces here; None if they can be made."""
    if os.geteuid() != 0:
        return "not root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"no command {' and '.join(missing)}"
    name = f"pllm{os.getpid()}try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return made.stderr.strip() or "ip netns failed"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


@contextmanager
def namespaces(places: Sequence[str]) -> Iterator[Network]:
    """A namespace for each place, 10.77.0.x, on a bridge in a namespace of its own; nothing stays behind."""
    names = {place: f"pllm{os.getpid()}{place}" for place in places}
    switch = f"pllm{os.getpid()}switch"
    addresses = {place: f"10.77.0.{number + 10}" for number, place in enumerate(places)}
    made: list[str] = []
    try:
        for name in (switch, *names.values()):
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, place in enumerate(places):
            name, port = names[place], f"port{number}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", name, "address", "add", f"{addresses[place]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *SHAPE], check=True, capture_output=True)
        rate = SHAPE[SHAPE.index("rate") + 1]
        words = f"{len(places)} network namespaces, links of {rate}"
        yield Network(words, addresses, ("kill", "unplug"), names)
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def loopback(places: Sequence[str]) -> Iterator[Network]:
    """An address of 127.0.1.x for each place."""
    addresses = {place: f"127.0.1.{number + 10}" for number, place in enumerate(places)}
    yield Network("loopback addresses", addresses, ("kill",))


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
