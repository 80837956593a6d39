"""Several clients of one set of parties: one at a time, all parties or none, and nobody holds them for ever."""

import contextlib
import threading
import time
from dataclasses import replace

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, PartiesBusy, PartyFailed, TransportError
from private_llm.net import rendezvous, sockets
from private_llm.net.addresses import hosts_of, open_listeners, parse_address
from private_llm.net.rendezvous import connect, open_acceptor
from private_llm.net.transport import CLIENT

from .mesh import run_threads


@pytest.fixture
def config():
    listeners = open_listeners(3)
    hosts = hosts_of(listeners)
    for listener in listeners:
        listener.close()
    return PrivateConfig(party_mode="remote", hosts=hosts, allow_plain_loopback=True, timeout_s=10.0, busy_wait_s=20.0)


def number(t, peer, value=None):
    """Receive a number from a peer, or send it one."""
    if value is None:
        return t.recv(peer, "m", (1,), torch.int64).item()
    return t.send(peer, "m", torch.tensor([value]))


def session(t):
    """A party's part of a session: everybody learns everybody's opinion of who the client is; ends with 0."""
    while True:
        t.wait(CLIENT)
        mine = number(t, CLIENT)
        if not mine:
            return
        others = [p for p in range(3) if p != t.me]
        for other in others:
            number(t, other, mine)
        if any(number(t, other) != mine for other in others):
            raise TransportError("the parties serve different clients")
        number(t, CLIENT, mine)


def party(config, me, wait_s, ended, reasons):
    """One session after the other, as `private-llm party` does it."""
    with contextlib.closing(open_acceptor(config, me)) as acceptor:
        while not ended.is_set():
            try:
                t = connect(config, me, wait_s=wait_s, acceptor=acceptor)
            except TransportError:
                continue  # nobody came
            try:
                session(t)
            except TransportError as error:
                reasons.append(str(error))
                t.abort(str(error))
            finally:
                t.close()


@contextlib.contextmanager
def parties(config, wait_s=1.0):
    """Three parties that serve; yields why their sessions failed."""
    ended, reasons = threading.Event(), []
    threads = [
        threading.Thread(target=party, args=(config, me, wait_s, ended, reasons), daemon=True) for me in range(3)
    ]
    for thread in threads:
        thread.start()
    try:
        yield reasons
    finally:
        ended.set()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)


def ask(t, value):
    """One call of a client."""
    for peer in range(3):
        number(t, peer, value)
    return [number(t, peer) for peer in range(3)] if value else []


def whole_session(config, value):
    t = connect(config, CLIENT)
    answers = [ask(t, value) for _ in range(3)]
    ask(t, 0)
    t.close()
    return answers


@pytest.mark.parametrize("clients", [2, 4])
@pytest.mark.parametrize("parallel_sessions", [1, 2])
def test_clients_that_start_together_are_served_one_after_the_other(config, clients, parallel_sessions):
    config = replace(config, parallel_sessions=parallel_sessions)
    together = threading.Barrier(clients)

    def client(value):
        together.wait()
        return whole_session(config, value)

    with parties(config) as reasons:
        numbers = range(1, clients + 1)
        results = run_threads(dict(zip(numbers, numbers, strict=True)), dict.fromkeys(numbers, client))
    assert results == {value: [[value] * 3] * 3 for value in numbers}
    assert reasons == []


def test_a_second_client_hears_that_the_parties_are_busy(config):
    with parties(replace(config, timeout_s=1.0)):
        first = connect(config, CLIENT)
        assert ask(first, 1) == [1] * 3
        time.sleep(1.5)  # however long the session lasts
        with pytest.raises(PartiesBusy, match=r"party 0 refused: it serves another client; waited 0 s .*busy_wait_s"):
            connect(replace(config, busy_wait_s=0.0), CLIENT)
        assert ask(first, 2) == [2] * 3  # it has noticed nothing
        ask(first, 0)
        first.close()


def test_a_client_that_was_let_in_by_the_first_party_only_holds_up_the_others_before_any_other_party(config):
    """Whoever waits for its turn holds no party at all."""
    addresses = [parse_address(host) for host in config.hosts]
    with parties(config):
        half = rendezvous._Mesh(config, CLIENT, addresses, b"", 10)
        half._call(0, True, 0)
        late = rendezvous._Mesh(replace(config, busy_wait_s=0.5), CLIENT, addresses, b"", 10)
        with pytest.raises(PartiesBusy):
            late.open(None)
        assert late._made == {}
        half.close()
        assert whole_session(config, 5) == [[5] * 3] * 3


def test_who_loses_its_place_at_the_first_party_lets_go_of_all_others(config):
    addresses = [parse_address(host) for host in config.hosts]
    with parties(config):
        lost = rendezvous._Mesh(config, CLIENT, addresses, b"", 10)
        for peer in (0, 1):
            lost._call(peer, True, 0)
        sock = lost._made[0, True, 0][0]
        sock.shutdown(2)
        assert not lost._complete()
        assert lost._made == {}


def test_a_place_without_a_session_is_given_to_the_next(config):
    """A client that takes a place and never goes on; also one that begins at the wrong party."""
    addresses = [parse_address(host) for host in config.hosts]
    with parties(replace(config, timeout_s=1.5), wait_s=8.0):
        held = [rendezvous._Mesh(config, CLIENT, addresses, b"", 10) for _ in range(2)]
        held[0]._call(0, True, 0)
        held[1]._call(1, True, 0)
        assert whole_session(replace(config, busy_wait_s=5.0), 6) == [[6] * 3] * 3
        for mesh in held:
            mesh.close()


def test_an_idle_client_makes_room(config):
    with parties(replace(config, idle_s=1.0)):
        idle = connect(config, CLIENT)
        assert ask(idle, 1) == [1] * 3
        assert whole_session(config, 2) == [[2] * 3] * 3  # waits for its turn
        with pytest.raises(PartyFailed, match=r"the client sent nothing for 1 s and holds the parties"):
            ask(idle, 3)
        idle.close()


def test_notes_of_an_idle_client_are_not_awaited_byte_by_byte(config):
    """A header without its end is no call."""
    with parties(replace(config, idle_s=1.0)):
        idle = connect(config, CLIENT)
        for peer in range(3):
            idle._out[peer]._sock.send(b"PLLM")
        assert whole_session(config, 2) == [[2] * 3] * 3
        idle.close()


def test_a_client_whose_calls_concern_one_party_is_not_idle_at_the_others(config, monkeypatch):
    """Preprocessed calls pass the helping party by, tokens of a sharded model most nodes."""
    monkeypatch.setattr(sockets, "_LIFE_S", 0.2)
    ended = threading.Event()

    def quiet(me):
        with contextlib.closing(open_acceptor(config, me)) as acceptor:
            t = connect(replace(config, idle_s=1.0), me, acceptor=acceptor)
            if me == 1:
                while number(t, CLIENT):
                    number(t, CLIENT, 1)
            else:
                t.wait(CLIENT)
                number(t, CLIENT)
            ended.wait(20)
            t.close()

    def client(_):
        t = connect(config, CLIENT)
        for _ in range(10):
            number(t, 1, 1)
            number(t, 1)
            time.sleep(0.3)
        ask(t, 0)
        ended.set()
        t.close()

    everybody = {0: quiet, 1: quiet, 2: quiet, CLIENT: client}
    assert run_threads({me: me for me in everybody}, everybody) == dict.fromkeys(everybody)


@pytest.mark.parametrize("options", [{"busy_wait_s": -1.0}, {"idle_s": 0.0}, {"idle_s": float("nan")}])
def test_limits_that_are_none(options):
    with pytest.raises(ConfigError, match="busy_wait_s, idle_s"):
        PrivateConfig(**options)
