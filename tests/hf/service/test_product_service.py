"""Several clients of the servers of "assisted": side by side, leaving, lying, flooding; and servers that die."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig, patch
from private_llm_hf.checkpoint.weights import Collector
from private_llm_hf.client.launch import start_parties
from private_llm_hf.client.product_servers import ProductServers
from private_llm_hf.party import product_server
from private_llm_hf.party.product_server import ProductServer
from private_llm_hf.service.product_service import ProductService
from private_llm_hf.service.settings import ServiceSettings
from private_llm_hf.wire.assisted import HEADER, REQUEST, LoadLines, TellWeights, UseLines
from private_llm_hf.wire.commands import TellCosts
from torch import Tensor

from private_llm.assisted.fixed_point import IntegerWeight
from private_llm.errors import ConfigError, PartiesBusy, PartyFailed, PrivateLLMError, TransportError
from private_llm.net.addresses import hosts_of, open_listeners
from private_llm.net.authority import make_certificates
from private_llm.net.transport import CLIENT
from private_llm.tls_config import TLSConfig
from tests.hf import tiny
from tests.hf.service.conftest import Watch, eventually

USERS = ("alice", "bob")


class Servers:
    """Both, each in a thread, and how users reach them."""

    def __init__(
        self, folder: Path, checkpoint: Path | None, clients: int, timeout_s: float, like: Servers | None = None,
        **limits: Any,
    ) -> None:  # fmt: skip
        """like: servers with whose certificates these ones identify themselves."""
        self.certificates = make_certificates(folder / "certs", 2, users=USERS) if like is None else like.certificates
        listeners = open_listeners(2)
        config = PrivateConfig(
            protocol="assisted", party_mode="remote", hosts=hosts_of(listeners), timeout_s=timeout_s, busy_wait_s=0.2
        )
        self.own = [replace(config, tls=self.certificates[number]) for number in range(2)]
        self.users = {}
        for user in USERS:
            place = folder / "certs" / f"client-{user}"
            self.users[user] = replace(
                config, tls=TLSConfig(*(str(place / name) for name in ("client.pem", "client.key", "ca.pem")))
            )
        self._checkpoint, self._settings = checkpoint, ServiceSettings(sessions=clients, drain_s=0.0, **limits)
        self.watches = [Watch(), Watch()]
        self.services: dict[int, ProductService] = {}
        self._threads: dict[int, threading.Thread] = {}
        for number in range(2):
            self.start(number, listeners[number])

    def start(self, number: int, listener: Any = None) -> None:
        checkpoint = None if self._checkpoint is None else str(self._checkpoint)
        made = ProductService(self.own[number], number, self._settings, self.watches[number], checkpoint, listener)
        self.services[number], self._threads[number] = made, threading.Thread(target=made.run, daemon=True)
        self._threads[number].start()

    def stop(self, number: int) -> None:
        self.services[number].drain()
        self._threads[number].join(30)
        assert not self._threads[number].is_alive()

    def model(self, source: Any, user: str = "alice") -> Any:
        if isinstance(source, Path):
            return AutoPrivateModelForCausalLM.from_pretrained(str(source), self.users[user])
        return patch(source, self.users[user])

    def held(self) -> list[int]:
        return [sum(service._memory._held.values()) for service in self.services.values()]

    def ended(self, what: str) -> bool:
        return eventually(lambda: any(what in str(reason) for watch in self.watches for reason in watch.ended))


Serve = Callable[..., Servers]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    made: list[Servers] = []

    def start(checkpoint: Path | None = None, clients: int = 4, timeout_s: float = 20.0, **limits: Any) -> Servers:
        made.append(Servers(tmp_path, checkpoint, clients, timeout_s, **limits))
        return made[-1]

    yield start
    for servers in made:
        for number in range(2):
            servers.stop(number)


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny.build("llama")


def ids_of(seed: int) -> Tensor:
    return torch.randint(3, 90, (1, 6), generator=torch.Generator().manual_seed(seed))


def text(model: Any, seed: int, new: int = 6) -> list[int]:
    found: list[int] = model.generate(ids_of(seed), max_new_tokens=new, do_sample=False).tolist()
    return found


def test_users_and_sessions_at_the_same_time_get_their_own_texts(serve: Serve, plain: Any, tiny_folder: Path) -> None:
    """Servers that read the checkpoint, and sessions of a model that share what is in memory at the client."""
    servers = serve(tiny_folder)
    with servers.model(tiny_folder) as one, servers.model(tiny_folder, "bob") as other, one.open_session() as beside:
        assert beside.parties is not one.parties
        assert beside.model.embed_tokens.weight is one.model.embed_tokens.weight
        assert beside.model.layers[0] is not one.model.layers[0]
        assert beside.parties._masks.raw() != one.parties._masks.raw()
        models = [one, other, beside]
        with ThreadPoolExecutor(3) as threads:
            jobs = [threads.submit(text, models[at % 3], at) for at in range(9)]
            assert [job.result() for job in jobs] == [text(plain, at) for at in range(9)]
        assert one.cost().rounds == other.cost().rounds > 0
        assert servers.held() == [0, 0]


def test_who_goes_or_sends_garbage_ends_its_own_session_alone(serve: Serve, plain: Any) -> None:
    """Weights of clients; those who went leave no memory."""
    servers = serve()
    with servers.model(plain) as model:
        before = servers.held()
        assert min(before) > 0
        garbage: list[Callable[[ProductServers], None]] = [
            lambda each: each.transport.send_bytes(1, REQUEST, HEADER.pack(999, 1)),
            lambda each: each.transport.send_bytes(0, REQUEST, bytes(300)),
            lambda each: each.transport.send_bytes(1, "garbage", bytes(30)),
            lambda each: each.tell(UseLines("a", "0" * 64)),
            lambda each: each.tell(LoadLines("a", 1 << 22, 1 << 22)),
            lambda each: [pair._sock.sendall(bytes(4096)) for pair in each.transport._out.values()],
            lambda each: [pair._sock.close() for pair in each.transport._out.values()],
        ]
        texts = []
        with ThreadPoolExecutor(1) as threads:
            works = threads.submit(lambda: texts.extend(text(model, seed) for seed in range(3)))
            for send in garbage:
                other: Any = start_parties(servers.users["bob"])
                send(other)
                with pytest.raises(PrivateLLMError):
                    other.costs()
                other.close()
            works.result()
        assert texts == [text(plain, seed) for seed in range(3)]
        assert eventually(lambda: all(len(service._sessions) == 1 for service in servers.services.values()))
        assert servers.held() == before
    assert eventually(lambda: servers.held() == [0, 0])


def test_memory_is_bounded_over_all_clients(serve: Serve, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with patch(plain, PrivateConfig(protocol="assisted")) as model:
        size = sum(2 * len(w.factors) * w.lines.shape[1] for w, _ in model.parties._weights)
    servers = serve()
    for service in servers.services.values():
        service._memory.most = int(2.9 * size)
    with servers.model(plain) as model:
        with pytest.raises((PartyFailed, TransportError), match="half of that of one user"):
            servers.model(plain)
        with servers.model(plain, "bob") as other:
            assert text(other, 3) == text(plain, 3)
            monkeypatch.setattr(product_server, "_MOST_CHARACTERS", 5000)
            third: Any = start_parties(servers.users["bob"])
            with pytest.raises((PartyFailed, TransportError), match="characters of names"):
                load_with_long_names(third)
        assert text(model, 3) == text(plain, 3)


def load_with_long_names(servers: Any) -> None:
    for name in ("n" * 4096, "m" * 4096):
        servers.load(IntegerWeight.of(torch.ones(1, 1)), name)
    servers.costs()


def test_servers_of_many_clients_take_smaller_products(
    serve: Serve, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_server, "memory_bytes", lambda: 4 * 48 * 1024)
    monkeypatch.setattr(product_server, "_LEAST_ELEMENTS", 256)
    with pytest.raises(ConfigError, match="got 5; the memory of this machine suffices for 4"):
        product_server.ServerMemory(torch.device("cpu"), 5)
    servers = serve(clients=2)
    for service in servers.services.values():
        service._memory.most = 1 << 30
    with servers.model(plain) as model, torch.no_grad():
        assert model.parties.most_elements == 512
        model(ids_of(1))
        assert text(model, 1) == text(plain, 1)
        asked = model.parties.exchanges
        model.parties.transport.send_bytes(1, REQUEST, HEADER.pack(0, 9) + bytes(9 * 64 * 5))
        with pytest.raises((PartyFailed, TransportError), match=r"request.* at most|fewer at a time"):
            model.cost()
        assert asked > model.config.num_hidden_layers * 4 + 1


def test_who_reads_nothing_or_only_asks_holds_up_nobody(serve: Serve, plain: Any, tiny_folder: Path) -> None:
    servers = serve(tiny_folder, timeout_s=2.0)
    with servers.model(tiny_folder) as model:
        deaf: Any = start_parties(servers.users["bob"])
        deaf.tell(TellCosts(False))
        sending = threading.Thread(target=_flood, args=(deaf,), daemon=True)
        sending.start()
        for seed in range(3):
            assert text(model, seed) == text(plain, seed)
        assert all(len(service._sessions) == 2 for service in servers.services.values())
        assert max(link.link._out[CLIENT]._queued for s in servers.services.values() for link in s._sessions) < 1 << 20
        deaf.transport.abort("enough")
        sending.join(20)


def test_another_checkpoint_is_told_before_weights_are_read(
    serve: Serve, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By shapes; at the first unlike weight, if all shapes are there; and never of the same weights in other files."""
    read: list[str] = []
    take = Collector.take

    def counted(self: Collector, name: str, tensor: Tensor) -> None:
        read.append(name)
        take(self, name, tensor)

    rounded = tiny.build("llama").bfloat16()
    rounded.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    rounded.float().save_pretrained(tmp_path / "whole")
    tiny.build("llama", intermediate_size=48).save_pretrained(tmp_path / "narrow")
    tiny.build("llama", seed=3).save_pretrained(tmp_path / "unlike")
    servers = serve(tmp_path / "whole")
    monkeypatch.setattr(Collector, "take", counted)
    with servers.model(tmp_path / "sharded") as model:
        assert model.parties.stored
        whole = len(read)
        read.clear()
        shape = r"none of them 64 x 48 as this model's of 'model\.layers\.\d\.mlp\.down_proj'; want the same checkpoint"
        with pytest.raises(ConfigError, match=f"party 0 holds the weights of 'whole', {shape}"):
            servers.model(tmp_path / "narrow")
        assert read == []
        with pytest.raises(ConfigError, match="party 0 holds the weights of 'whole', and other ones than this model's"):
            servers.model(tmp_path / "unlike")
        assert len(read) < whole / 2
        for number in range(2):
            servers.stop(number)
        servers._checkpoint = tmp_path / "unlike"
        servers.start(0)
        servers.start(1)
        read.clear()
        with pytest.raises(ConfigError, match=r"party 0 holds .*'unlike', and other ones than this model was"):
            model.open_session()
        assert read == []


def _flood(servers: Any) -> None:
    with contextlib.suppress(PrivateLLMError):
        for _ in range(20000):
            servers.tell(TellWeights())


def test_a_server_that_computes_long_says_so(serve: Serve, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ProductServer.product

    def slow(self: ProductServer, *given: Tensor) -> Tensor:
        if not slept:
            slept.append(time.sleep(2.5))
        return original(self, *given)

    slept: list[None] = []
    servers = serve(timeout_s=2.0)
    monkeypatch.setattr(ProductServer, "product", slow)
    with servers.model(plain) as model, torch.no_grad():
        model(ids_of(1))
        assert slept


def test_places_are_bounded_and_a_full_server_says_so(serve: Serve, tiny_folder: Path) -> None:
    servers = serve(tiny_folder, clients=2, sessions_per_user=1)
    with servers.model(tiny_folder) as model:
        with pytest.raises(PartiesBusy, match="user 'alice' has 1 sessions already"):
            model.open_session()
        with servers.model(tiny_folder, "bob"):
            pass


@pytest.mark.parametrize("reads", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_model_goes_on_after_a_server_came_back(serve: Serve, plain: Any, tiny_folder: Path, reads: bool) -> None:
    """Cached states stay; the key of masks is another. Servers without a checkpoint get the weights again."""
    servers = serve(tiny_folder if reads else None)
    with servers.model(tiny_folder) as model, torch.no_grad():
        keys = {model.parties._masks.raw()}
        ids = ids_of(1)
        past = model(ids, use_cache=True).past_key_values
        beside = model.open_session()
        for number in range(2):
            servers.stop(number)
            with pytest.raises(PrivateLLMError):
                model(ids)
            with pytest.raises(PrivateLLMError):  # nobody is there
                start_parties(replace(servers.users["alice"], timeout_s=0.5))
            servers.start(number)
            model.reconnect()
            assert model.parties.stored is reads
            keys.add(model.parties._masks.raw())
            assert text(model, 1) == text(plain, 1)
        assert len(keys) == 3
        following = torch.tensor([[7]])
        cached = plain(ids, use_cache=True).past_key_values
        got, want = (m(following, past_key_values=c).logits for m, c in ((model, past), (plain, cached)))
        assert float((got - want).abs().max()) < 1e-3
        with pytest.raises(PrivateLLMError):
            beside(ids)
        beside.reconnect()
        assert text(beside, 2) == text(plain, 2)
        beside.close()


def test_weights_that_are_gone_or_have_changed_are_not_sent_again(serve: Serve) -> None:
    servers = serve()
    source = tiny.build("llama")
    with servers.model(source) as model:
        with torch.no_grad():
            source.lm_head.weight[0, 0] += 1
        with pytest.raises(ConfigError, match="weights have changed"):
            model.reconnect()
        with torch.no_grad():
            source.lm_head.weight[0, 0] -= 1
        del source
        with pytest.raises(ConfigError, match="plaintext model is gone"):
            model.reconnect()


def test_sessions_share_the_cores(serve: Serve, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no product waits for pieces of another's in the pool that all have."""
    seen: list[int] = []
    product = ProductServer.product

    def spy(self: ProductServer, *given: Any) -> Tensor:
        seen.append(torch.get_num_threads())
        return product(self, *given)

    monkeypatch.setattr(ProductServer, "product", spy)
    monkeypatch.setattr("private_llm_hf.service.product_service.usable_cores", lambda: 6)
    servers = serve(tiny_folder)
    with servers.model(tiny_folder) as model:
        text(model, 1, new=1)
        assert {*seen} == {6}
        with servers.model(tiny_folder, "bob"):
            seen.clear()
            text(model, 1, new=1)
            assert {*seen} == {3}


def test_a_weight_counts_twice_until_it_is_padded() -> None:
    """What is received and what it becomes are there together, of every client at the same time."""
    counts: list[int] = []

    class Link:
        def recv(self, *given: Any) -> Tensor:
            counts.append(memory._held.total())
            return torch.zeros(2 * 3 * 5, dtype=torch.uint8)

    memory = product_server.ServerMemory(torch.device("cpu"))
    server = ProductServer.__new__(ProductServer)
    server._open, server._memory, server._user, server._weights = None, memory, "", []
    server._bytes, server._characters, server._bits = 0, 0, 16
    server._device, server.transport = torch.device("cpu"), Link()  # type: ignore[assignment]
    server._obey(LoadLines("a", 3, 5))
    assert counts == [2 * 3 * 2 * 32]
    assert memory._held.total() == server._bytes == 3 * 2 * 32
