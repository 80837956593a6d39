"""A party's files for tests, and a service that only pretends."""

from __future__ import annotations

import socket
import threading
from importlib import resources
from pathlib import Path

from private_llm_hf.service.settings import Observer
from private_llm_hosting.settings import PartySettings, read_settings

MODEL = str(resources.files("private_llm_hf").joinpath("demo_model"))


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def write_settings(folder: Path, more: str = "", *, head: str = "", tls: bool = True, party: int = 1) -> Path:
    """A settings file for party `party` of three on free loopback ports."""
    *ports, operator = free_ports(4)
    hosts = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    text = f'party = {party}\nclients = 5\nhosts = [{hosts}]\n{head}\n[models]\ndemo = "shares"\n'
    if tls:
        text += f'[tls]\ncertificate = "tls/party{party}.pem"\nkey = "tls/party{party}.key"\nca = "tls/ca.pem"\n'
    else:
        text += "[computation]\nallow_plain_loopback = true\n"
    text += f'[operator]\naddress = "127.0.0.1:{operator}"\n{more}'
    path = folder / "party.toml"
    path.write_text(text)
    return path


def settings(folder: Path, more: str = "", **keywords: object) -> PartySettings:
    return read_settings(write_settings(folder, more, **keywords), {})  # type: ignore[arg-type]


class FakeService:
    """Ready at once; serves until it is drained."""

    def __init__(self, config: object, number: int, settings: object, observer: Observer) -> None:
        self.observer, self.ready, self._ended = observer, False, threading.Event()

    def run(self) -> None:
        self.ready = True
        self.observer.links_up()
        self._ended.wait(30)

    def drain(self) -> None:
        self.observer.draining()
        self._ended.set()
