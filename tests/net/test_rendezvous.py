"""Opening the mesh: addresses, tokens, strangers, and errors before anything is sent."""

import contextlib
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TransportError
from private_llm.net import addresses, hello, rendezvous
from private_llm.net.addresses import hosts_of, open_listeners, open_named_listeners, parse_address
from private_llm.net.admission import Acceptor
from private_llm.net.rendezvous import connect
from private_llm.net.transport import CLIENT
from private_llm.tls_config import TLSConfig

from .mesh import TOKEN, run_threads

ONE = {"protocol": "plain", "insecure": True}


def join(me, hosts, listener=None, token=TOKEN, timeout=3.0, **options):
    config = options.pop("config", None) or PrivateConfig(timeout_s=timeout, **options)
    return connect(config, me, hosts=hosts, token=token, listener=listener)


def both(serve, call):
    """Results or errors of party 0 and of the client of a one-party session."""
    return run_threads({0: None, CLIENT: None}, {0: lambda _: serve(), CLIENT: lambda _: call()})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.example:1", ("a.example", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("127.0.0.1:7000", ("127.0.0.1", 7000)),
    ],
)
def test_addresses(text, expected):
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "host:1a", "h:\u0661"])
def test_malformed_addresses(text):
    with pytest.raises(ConfigError, match="host:port"):
        parse_address(text)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere sockets have ports only")
def test_sockets_with_names(monkeypatch):
    monkeypatch.setattr(addresses, "_holds_enough", lambda: True)
    listeners = open_named_listeners(1)
    hosts = hosts_of(listeners)
    assert hosts[0].startswith("unix:")
    assert hosts != hosts_of(open_named_listeners(1))
    local = {"party_mode": "processes", **ONE}

    def serve():
        transport = join(0, hosts, listeners[0], **local)
        transport.send(CLIENT, "t", torch.arange(5))
        transport.close()

    def call():
        return join(CLIENT, hosts, **local).recv(0, "t", (5,), torch.int64)

    results = both(serve, call)
    assert torch.equal(results[CLIENT], torch.arange(5)), results
    with pytest.raises(TransportError, match=r"party 0 at a socket of this machine was not reached within 0\.2 s"):
        join(CLIENT, hosts, timeout=0.2, **local)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere sockets have ports only")
def test_another_user_is_turned_away_unheard(monkeypatch):
    monkeypatch.setattr(addresses, "_holds_enough", lambda: True)
    listeners = open_named_listeners(1)
    hosts, user = hosts_of(listeners), os.geteuid()
    local = {"party_mode": "processes", **ONE}
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(TransportError, match="another user listens there"):
        join(CLIENT, hosts, timeout=0.2, **local)
    acceptor = Acceptor(listeners[0], 1)
    met = []
    acceptor.lead_to(lambda sock, proved: met.append(sock))
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(b"\0" + hosts[0].encode())
        assert caller.recv(1) == b""
    acceptor.close()
    assert not met


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere sockets have ports only")
@pytest.mark.parametrize("small", [False, True])
def test_ports_where_names_are_refused(monkeypatch, small):
    def refused(name):
        raise PermissionError(1, name)

    if small:
        monkeypatch.setattr(addresses, "_SEND_BUFFER", 1 << 30)  # more than any system grants
    else:
        monkeypatch.setattr(addresses, "_holds_enough", lambda: True)
        monkeypatch.setattr(addresses.secrets, "token_hex", refused)
    listeners = open_named_listeners(2)
    assert [each.family for each in listeners] == [socket.AF_INET] * 2
    for each in listeners:
        each.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere sockets have ports only")
def test_strangers_find_no_way_in_by_a_name(monkeypatch):
    monkeypatch.setattr(addresses, "_holds_enough", lambda: True)
    listeners = open_named_listeners(1)
    hosts = hosts_of(listeners)
    local = {"party_mode": "processes", "timeout": 1.0, **ONE}
    results = both(
        lambda: join(0, hosts, listeners[0], **local), lambda: join(CLIENT, hosts, token=b"another" * 4, **local)
    )
    assert all(isinstance(each, TransportError) for each in results.values()), results
    with pytest.raises(ConfigError, match="host:port"):
        join(CLIENT, (), config=PrivateConfig(party_mode="remote", hosts=hosts, allow_plain_loopback=True, **ONE))
    with pytest.raises(ConfigError, match="host:port"):
        join(CLIENT, hosts, token=b"", allow_plain_loopback=True, **local)
    named = PrivateConfig(
        party_mode="remote", hosts=(f"{hosts[0]}:7000",), allow_plain_loopback=True, timeout_s=1.0, **ONE
    )
    with pytest.raises(ConfigError, match="has no address"):
        join(CLIENT, (), config=named)


@pytest.mark.parametrize(
    ("options", "hosts", "token", "message"),
    [
        ({}, ["127.0.0.1:1"] * 3, b"", "need certificates"),
        ({"party_mode": "processes"}, ["127.0.0.1:1"] * 3, b"short", "need certificates"),
        ({"party_mode": "remote", "hosts": ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")}, [], TOKEN, "need cert"),
        (
            {"allow_plain_loopback": True},
            ["127.0.0.1:1", "192.0.2.1:1", "127.0.0.1:1"],
            TOKEN,
            "not a loopback",
        ),
        ({"party_mode": "processes"}, ["127.0.0.1:1", "0.0.0.0:1", "127.0.0.1:1"], TOKEN, "not a loopback"),
        ({"party_mode": "distributed"}, ["192.0.2.1:1"] * 3, TOKEN, "not a loopback"),
        ({"party_mode": "processes", "trusted_network": True}, ["192.0.2.1:1"] * 3, TOKEN, "not a loopback"),
        ({"party_mode": "distributed", "trusted_network": True}, ["192.0.2.1:1"] * 3, b"short", "need certificates"),
        ({"allow_plain_loopback": True}, ["127.0.0.1:1"] * 2, TOKEN, "got 2 addresses; want 3"),
        ({"allow_plain_loopback": True}, ["127.0.0.1:1"] * 4, TOKEN, "got 4 addresses; want 3"),
        ({"tls": TLSConfig("a", "b", "c")}, ["127.0.0.1:1"] * 3, TOKEN, "tls.certificate"),
    ],
)
def test_unsafe_settings_are_refused_before_anything_is_sent(options, hosts, token, message, monkeypatch):
    monkeypatch.setattr(rendezvous.socket, "create_connection", None)
    monkeypatch.setattr(rendezvous.socket, "create_server", None)
    config = PrivateConfig(**options)
    with pytest.raises(ConfigError, match=message):
        join(0, hosts, token=token, config=config)


@pytest.mark.parametrize("me", [-1, 3, 254])
def test_unknown_endpoint(me):
    with pytest.raises(ConfigError, match=f"endpoint: got {me}"):
        join(me, ["127.0.0.1:1"] * 3)


def test_ports_given_as_numbers(unused_port):
    """Without inherited listeners: parties listen where `hosts` says, in whatever order they start."""
    hosts = [f"127.0.0.1:{unused_port}"]
    config = PrivateConfig(**ONE, party_mode="remote", hosts=tuple(hosts), allow_plain_loopback=True, timeout_s=10)

    def serve():
        time.sleep(0.3)
        t = join(0, [], token=b"", config=config)
        t.send(CLIENT, "m", t.recv(CLIENT, "m", (1,), torch.int64) + 1)
        return t

    def call():
        t = join(CLIENT, [], token=b"", config=config)  # kept until the party has answered: who closes has given up
        t.send(0, "m", torch.tensor([9]))
        return t.recv(0, "m", (1,), torch.int64).item()

    assert both(serve, call)[CLIENT] == 10


@pytest.fixture
def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_nobody_there(unused_port):
    with pytest.raises(TransportError, match=rf"party 0 at 127\.0\.0\.1:{unused_port} was not reached within 0\.5 s"):
        join(CLIENT, [f"127.0.0.1:{unused_port}"], timeout=0.5, **ONE)


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        hosts = [f"127.0.0.1:{server.getsockname()[1]}"]
        with pytest.raises(TransportError, match=r"cannot listen at 127\.0\.0\.1"):
            join(0, hosts, timeout=0.5, **ONE)


def test_missing_endpoints_are_listed():
    listeners = open_listeners(3)
    with pytest.raises(TransportError, match=r"party 1, party 2, the client did not connect within 0\.5 s"):
        join(0, hosts_of(listeners), listeners[0], timeout=0.5)


def test_another_token():
    listeners = open_listeners(1)
    hosts = hosts_of(listeners)
    results = both(
        lambda: join(0, hosts, listeners[0], timeout=1.5, **ONE),
        lambda: join(CLIENT, hosts, token=b"another" * 4, timeout=1.5, **ONE),
    )
    assert isinstance(results[0], TransportError)
    assert isinstance(results[CLIENT], TransportError)
    assert "does not know this session's token" in str(results[CLIENT])
    assert "the client did not connect" in str(results[0])
    for text in map(str, results.values()):
        assert TOKEN.decode() not in text


def test_the_token_does_not_travel():
    """What a program that squats on the port gets to see."""
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        seen = bytearray()

        def take():
            sock, _ = squatter.accept()
            sock.settimeout(5)
            seen.extend(sock.recv(4096))
            sock.sendall(bytes(seen))
            seen.extend(sock.recv(4096))
            sock.close()

        thread = threading.Thread(target=take)
        thread.start()
        with pytest.raises(TransportError):
            join(CLIENT, hosts_of([squatter]), **ONE)
        thread.join()
    assert len(seen) == 64 + 4 + 16 + 32
    assert TOKEN not in seen


def test_a_stranger_cannot_send_the_acceptors_own_proof_back():
    mine, theirs = socket.socketpair()
    admitted, errors = [], []

    def accept():
        try:
            hello.answer(theirs, 0, TOKEN, admitted.append)
        except TransportError as error:
            errors.append(str(error))

    thread = threading.Thread(target=accept)
    thread.start()
    hello._put(mine, CLIENT, 0, bytes([0, 1, 0, 1]) + bytes(hello.CALLER_BYTES + 32))
    _, reply = hello._get(mine)
    hello._put(mine, CLIENT, 1, reply[32:])
    thread.join(5)
    mine.close()
    theirs.close()
    assert not admitted
    assert errors == ["the client does not know this session's token"]


def test_a_program_that_does_not_know_the_token_is_no_party():
    mine, theirs = socket.socketpair()

    def accept():
        hello._get(theirs)
        hello._put(theirs, 0, 0, bytes(32 + hello._PROOF))
        theirs.close()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(accept)
        with pytest.raises(TransportError, match="party 0 does not know this session's token"):
            hello.greet(mine, CLIENT, 0, True, TOKEN, bytes(hello.CALLER_BYTES))
    mine.close()


def test_hosts_in_another_order():
    listeners = open_listeners(3)
    hosts = hosts_of(listeners)

    swapped = [hosts[1], hosts[0], hosts[2]]
    results = run_threads(
        {1: None, CLIENT: None},
        {
            1: lambda _: join(1, hosts, listeners[1], timeout=1.5),
            CLIENT: lambda _: join(CLIENT, swapped, timeout=1.5),
        },
    )
    assert "this is party 1, not party 0; the hosts lists differ" in str(results[CLIENT])


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"PLLM\x01\x01\x03\x01" + bytes(200),
        bytes(5000),
        b"\x16\x03\x01\x02\x00\x01\x00",
    ],
)
def test_strangers_do_not_disturb(junk):
    """Junk, silence and half handshakes on the port while the mesh opens."""
    listeners = open_listeners(1)
    hosts = hosts_of(listeners)
    strangers, kept = [], []
    for _ in range(3):
        sock = socket.create_connection(listeners[0].getsockname())
        sock.sendall(junk)
        strangers.append(sock)

    def serve():
        t = join(0, hosts, listeners[0], timeout=10, **ONE)
        return t.recv(CLIENT, "m", (1,), torch.int64).item()

    def call():
        kept.append(join(CLIENT, hosts, timeout=10, **ONE))  # dropped, it would close before the other end has read
        kept[0].send(0, "m", torch.tensor([9]))

    assert both(serve, call) == {0: 9, CLIENT: None}
    for sock in strangers:
        sock.close()


def test_an_endpoint_may_start_again_while_the_others_wait():
    """A client that dies after half of its connections, and comes back."""
    listeners = open_listeners(1)
    hosts = hosts_of(listeners)
    kept = []

    def serve():
        t = join(0, hosts, listeners[0], timeout=10, **ONE)
        return t.recv(CLIENT, "m", (1,), torch.int64).item()

    def call():
        config = PrivateConfig(timeout_s=10, **ONE)
        half = rendezvous._Mesh(config, CLIENT, [parse_address(hosts[0])], TOKEN, 10)
        half._call(0, True, 0)
        half.close()
        kept.append(join(CLIENT, hosts, timeout=10, **ONE))
        kept[0].send(0, "m", torch.tensor([9]))

    assert both(serve, call) == {0: 9, CLIENT: None}


def test_an_endpoint_that_gave_up_may_come_back_when_all_others_are_there():
    """Party 2 starts after the client's first try; the others, who waited for both, do not count that try."""
    listeners = open_listeners(3)
    hosts = hosts_of(listeners)
    first_try = threading.Event()
    gone = PrivateConfig(timeout_s=0.5)

    def client():
        with pytest.raises(TransportError, match=r"party 2 .* was not reached within 0\.5 s"):
            connect(gone, CLIENT, hosts=hosts, token=TOKEN)
        first_try.set()
        time.sleep(0.5)  # all parties find each other
        return work(join(CLIENT, hosts, timeout=10))

    def party(me):
        if me == 2:
            first_try.wait()
        else:
            listeners[2].close()
        return work(join(me, hosts, listeners[me] if me < 2 else None, timeout=10))

    def work(t):
        for peer in {0, 1, 2, CLIENT} - {t.me}:
            t.send(peer, "m", torch.tensor([t.me]))
        total = sum(t.recv(peer, "m", (1,), torch.int64).item() for peer in sorted({0, 1, 2, CLIENT} - {t.me}))
        t.close()
        return total

    everybody = {me: lambda _, me=me: party(me) for me in range(3)} | {CLIENT: lambda _: client()}
    results = run_threads(dict.fromkeys(everybody), everybody)
    assert results == {me: sum((0, 1, 2, CLIENT)) - me for me in (0, 1, 2, CLIENT)}


def test_who_leaves_is_let_go_while_others_are_still_awaited():
    """Party 0 lacks party 1 when a client leaves; party 1 waits for the client when party 0 starts again."""
    listeners = open_listeners(2)
    hosts, config = hosts_of(listeners), PrivateConfig(protocol="assisted", timeout_s=10)
    places = [parse_address(host) for host in hosts]
    zero, again, one, client = (rendezvous._Mesh(config, me, places, TOKEN, 10) for me in (0, 0, 1, CLIENT))
    doors, threads = [Acceptor(listener, 2) for listener in listeners], []

    def opens(mesh, me):
        with contextlib.suppress(TransportError), contextlib.closing(mesh):
            mesh.open(doors[me])

    def until(condition):
        end = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.02)

    def start(mesh, me):
        threads.append(threading.Thread(target=opens, args=(mesh, me), daemon=True))
        threads[-1].start()

    start(zero, 0)
    until(lambda: doors[0]._receive)
    client._call(0, True, 0)
    until(lambda: zero._made)
    client.close()
    until(lambda: not zero._made)
    start(one, 1)
    until(lambda: len(zero._made) == 2)
    start(again, 0)
    until(lambda: doors[0]._receive == again._receive)
    zero._deadline = 0.0
    until(lambda: len(again._made) == 2)
    again._deadline = one._deadline = 0.0
    for each in threads:
        each.join(5)
        assert not each.is_alive()
    for door in doors:
        door.close()
