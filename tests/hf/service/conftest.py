"""Party services as threads of the test's process, over real sockets with mutual TLS."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from private_llm_hf import (
    AutoPrivateModel,
    AutoPrivateModelForCausalLM,
    AutoPrivateModelForSeq2SeqLM,
    PrivateConfig,
)
from private_llm_hf.api import share_checkpoint
from private_llm_hf.checkpoint.share_files import share_path
from private_llm_hf.service.party_service import PartyService
from private_llm_hf.service.settings import BatchFacts, Observer, ServiceSettings

from private_llm.kv_cache.policies.policy import KEEP_ALL, CachePolicy
from private_llm.net.addresses import hosts_of, open_listeners
from private_llm.net.authority import make_certificates
from private_llm.net.transport import CLIENT
from private_llm.tls_config import TLSConfig
from tests.hf import tiny


class Watch(Observer):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.passes: list[BatchFacts] = []
        self.ended: list[str | None] = []
        self.downs: list[tuple[str, bool]] = []
        self.awaited: list[tuple[str | None, str, float]] = []

    def batch_done(self, facts: BatchFacts) -> None:
        self.passes.append(facts)

    def session_ended(self, session: str, user: str, seconds: float, reason: str | None) -> None:
        self.ended.append(reason)

    def links_down(self, reason: str, orderly: bool = False) -> None:
        self.downs.append((reason, orderly))

    def links_awaited(self, who: str | None, reason: str, seconds: float) -> None:
        self.awaited.append((who, reason, seconds))


class Running:
    """The services of all parties, each in a thread, and how clients reach them."""

    def __init__(
        self, config: PrivateConfig, folder: Path, shares: dict[str, Path], users: tuple[str, ...], **limits: Any
    ) -> None:
        certificates = make_certificates(folder / "certs", config.parties, users=users)
        listeners = open_listeners(config.parties)
        config = dataclasses.replace(config, party_mode="remote", hosts=hosts_of(listeners))
        self.configs = [dataclasses.replace(config, tls=certificates[party]) for party in range(config.parties)]
        places = {user: folder / "certs" / f"client-{user}" for user in users}
        own = {u: TLSConfig(str(p / "client.pem"), str(p / "client.key"), str(p / "ca.pem")) for u, p in places.items()}
        self.clients = {user: dataclasses.replace(config, tls=tls) for user, tls in own.items()}
        self.client = self.clients[users[0]] if users else dataclasses.replace(config, tls=certificates[CLIENT])
        self.shares, self.limits = shares, limits
        self.watches = [Watch() for _ in range(config.parties)]
        self.services: list[PartyService] = [None] * config.parties  # type: ignore[list-item]
        self.threads: list[threading.Thread] = [None] * config.parties  # type: ignore[list-item]
        for party in range(config.parties):
            self.start(party, listeners[party])

    def start(self, party: int, listener: socket.socket | None = None) -> None:
        settings = ServiceSettings({name: share_path(at, party) for name, at in self.shares.items()}, **self.limits)
        service = PartyService(self.configs[party], party, settings, self.watches[party], listener)
        self.services[party] = service
        self.threads[party] = threading.Thread(target=service.run, daemon=True)
        self.threads[party].start()

    def stop(self, party: int) -> None:
        """End one party now, whatever its sessions do."""
        service = self.services[party]
        object.__setattr__(service.settings, "drain_s", 0.0)
        service.drain()
        self.threads[party].join(30)
        assert not self.threads[party].is_alive()

    def model(self, user: str | None = None, name: str = "llama") -> Any:
        config = self.client if user is None else self.clients[user]
        auto = KINDS.get(name, AutoPrivateModelForCausalLM)
        return auto.from_pretrained(str(self.shares[name] / "client"), config)

    def close(self) -> None:
        for service in self.services:
            object.__setattr__(service.settings, "drain_s", 0.0)
            service.drain()
        for thread in self.threads:
            thread.join(30)


Start = Callable[..., Running]
KINDS: dict[str, Any] = {"bert": AutoPrivateModel, "t5": AutoPrivateModelForSeq2SeqLM}


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.build("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shares(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    made: dict[tuple[str, str], Path] = {}

    def of(protocol: str, name: str) -> Path:
        key = (protocol, name)
        if key not in made:
            folder = tiny_folder
            if name != "llama":
                folder = tmp_path_factory.mktemp(name)
                tiny.build(name).save_pretrained(folder)
            made[key] = tmp_path_factory.mktemp(f"shares-{protocol}-{name}")
            share_checkpoint(
                str(folder), made[key], PrivateConfig(protocol=protocol), KINDS.get(name, AutoPrivateModelForCausalLM)
            )
        return made[key]

    return of


@pytest.fixture
def start(tmp_path: Path, shares: Callable[[str, str], Path]) -> Iterator[Start]:
    running: list[Running] = []

    def begin(
        protocol: str = "trio", users: tuple[str, ...] = (), timeout_s: float = 10.0,
        models: tuple[str, ...] = ("llama",), idle_s: float | None = 1800.0, adder: Any = "auto",
        kv_cache: CachePolicy = KEEP_ALL, **limits: Any,
    ) -> Running:  # fmt: skip
        wait = limits.pop("busy_wait_s", 20.0)
        config = PrivateConfig(
            protocol=protocol, timeout_s=timeout_s, busy_wait_s=wait, idle_s=idle_s, adder=adder, kv_cache=kv_cache
        )  # fmt: skip
        folders = {name: shares(protocol, name) for name in models}
        running.append(Running(config, tmp_path / str(len(running)), folders, users, **limits))
        return running[-1]

    yield begin
    for each in running:
        each.close()


def eventually(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether it becomes true."""
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.02)
    return true()
