"""Strangers before a party's acceptor: what they can hold is bounded, and the others come in."""

import socket
import time

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.net import admission as acceptors
from private_llm.net.addresses import hosts_of, open_listeners
from private_llm.net.admission import Acceptor, source_of
from private_llm.net.rendezvous import connect
from private_llm.net.transport import CLIENT

from .mesh import TOKEN, run_threads

ONE = {"protocol": "plain", "insecure": True}


def call(address, source="127.0.0.1"):
    sock = socket.create_connection(address, source_address=(source, 0))
    sock.settimeout(5)
    return sock


def cut(sock):
    """Whether the other end closes it within five seconds."""
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False


def still_open(sock):
    sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        sock.recv(1)
    return True


@pytest.fixture
def acceptor(monkeypatch):
    """An acceptor whose receiver waits for one byte, which is all that a caller has to prove."""
    monkeypatch.setattr(acceptors, "_CALLERS", 3)
    monkeypatch.setattr(acceptors, "_PER_SOURCE", 1)
    listener = socket.create_server(("127.0.0.1", 0))
    made = Acceptor(listener, 1)

    def receive(sock, proved):
        if sock.recv(1):
            proved()
            sock.sendall(b"+")
            sock.recv(1)
        sock.close()

    made.lead_to(receive)
    made.address = listener.getsockname()
    yield made
    made.close()


def test_a_source_with_too_many_callers_loses_its_oldest(acceptor):
    other = call(acceptor.address, "127.0.0.9")
    first, second, third = (call(acceptor.address) for _ in range(3))  # two of one source are allowed
    assert cut(first)
    assert all(map(still_open, (other, second, third)))


def test_a_full_table_loses_its_oldest(acceptor):
    callers = [call(acceptor.address, f"127.0.0.{number}") for number in range(2, 7)]  # four are allowed
    assert cut(callers[0])
    assert all(map(still_open, callers[1:]))


def test_who_has_proved_who_it_is_makes_room_and_is_not_cut_off(acceptor):
    known = call(acceptor.address)
    known.sendall(b"x")
    assert known.recv(1) == b"+"
    first, second = call(acceptor.address), call(acceptor.address)
    assert all(map(still_open, (known, first, second)))


def test_a_moment_without_threads_does_not_close_the_door(acceptor, monkeypatch):
    start = acceptors.threading.Thread.start

    def fail(thread):
        monkeypatch.setattr(acceptors.threading.Thread, "start", start)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(acceptors.threading.Thread, "start", fail)
    assert cut(call(acceptor.address))
    known = call(acceptor.address)
    known.sendall(b"x")
    assert known.recv(1) == b"+"


def test_a_caller_that_speaks_slowly_for_ever_is_cut_off(acceptor, monkeypatch):
    monkeypatch.setattr(acceptors, "HANDSHAKE_S", 0.5)
    slow = call(acceptor.address)
    assert cut(slow)


def test_one_byte_now_and_then_does_not_prolong_a_handshake(monkeypatch):
    """Against a real party: its own patience between two bytes would be ten seconds."""
    monkeypatch.setattr(acceptors, "HANDSHAKE_S", 1.0)
    listeners = open_listeners(1)
    hosts, address = hosts_of(listeners), listeners[0].getsockname()

    def serve(_):
        config = PrivateConfig(timeout_s=20, **ONE)
        return connect(config, 0, hosts=hosts, token=TOKEN, listener=listeners[0])

    def drip(_):
        slow = call(address)
        slow.settimeout(0.1)
        for _ in range(60):  # a header has 64 bytes
            try:
                slow.sendall(b"P")
                if slow.recv(64) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            return "the party listened to the end"
        config = PrivateConfig(timeout_s=20, **ONE)
        return connect(config, CLIENT, hosts=hosts, token=TOKEN)

    results = run_threads({0: None, CLIENT: None}, {0: serve, CLIENT: drip})
    assert results[CLIENT] != "the party listened to the end"
    for transport in results.values():
        transport.close()


def test_idle_connections_do_not_keep_the_client_out():
    listeners = open_listeners(1)
    hosts = hosts_of(listeners)
    strangers = [socket.create_connection(listeners[0].getsockname()) for _ in range(60)]

    def serve(_):
        config = PrivateConfig(timeout_s=6, **ONE)
        return connect(config, 0, hosts=hosts, token=TOKEN, listener=listeners[0])

    def client(_):
        time.sleep(0.5)  # the party has met the strangers
        strangers.extend(socket.create_connection(listeners[0].getsockname()) for _ in range(60))
        config = PrivateConfig(timeout_s=6, **ONE)
        return connect(config, CLIENT, hosts=hosts, token=TOKEN)

    results = run_threads({0: None, CLIENT: None}, {0: serve, CLIENT: client})
    results[CLIENT].send(0, "m", torch.tensor([7]))
    assert results[0].recv(CLIENT, "m", (1,), torch.int64).item() == 7
    for end in (*results.values(), *strangers):
        end.close()


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_what_counts_as_one_source(address, source):
    assert source_of(address) == source
