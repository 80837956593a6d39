"""Who may join over TLS: one CA, the right name, a valid date; everything else is refused with a reason."""

import datetime
import os
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TransportError
from private_llm.net.addresses import hosts_of, open_listeners
from private_llm.net.authority import make_certificates
from private_llm.net.rendezvous import connect
from private_llm.net.tls import check_name
from private_llm.net.transport import CLIENT
from private_llm.tls_config import TLSConfig

from .mesh import ENDPOINTS, open_mesh, run_threads

YEAR_AGO = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=400)
NEXT_YEAR = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=400)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Certificates: good, of another CA, expired, not valid yet."""
    folder = tmp_path_factory.mktemp("certificates")
    return {
        "good": make_certificates(folder / "good", 3),
        "other": make_certificates(folder / "other", 3),
        "expired": make_certificates(folder / "expired", 3, start=YEAR_AGO),
        "early": make_certificates(folder / "early", 3, start=NEXT_YEAR),
    }


class Shown(ssl.SSLSocket):
    """A connection whose other end has shown a certificate with these common names."""

    def __init__(self, *names):
        self.names = names

    def getpeercert(self):
        return {"subject": tuple((("commonName", name),) for name in self.names)}


def test_a_certificate_plays_one_endpoint():
    check_name(Shown("party1"), 1)
    check_name(Shown("client:ann"), CLIENT)
    for names in ((), ("party0",), ("party1", "party2"), ("party2", "party1"), ("client", "party1"), ("client",)):
        with pytest.raises(TransportError, match="certificate of party 1: got the name"):
            check_name(Shown(*names), 1)
    for names in ((), ("party1",), ("client", "party1"), ("client:ann", "client")):
        with pytest.raises(TransportError, match="certificate of the client: got the name"):
            check_name(Shown(*names), CLIENT)


def test_a_mesh_over_tls(sets):
    transports = open_mesh(tls=sets["good"])

    def work(t):
        for peer in ENDPOINTS:
            if peer != t.me:
                t.send(peer, "m", torch.full((200_000,), t.me))
        return [int(t.recv(p, "m", (200_000,), torch.int64).sum()) // 200_000 for p in ENDPOINTS if p != t.me]

    results = run_threads(transports, dict.fromkeys(ENDPOINTS, work))
    assert results == {me: [p for p in ENDPOINTS if p != me] for me in ENDPOINTS}
    for transport in transports.values():
        transport.close()


def test_nothing_legible_crosses_a_tls_link(sets):
    """A relay between client and party sees TLS 1.3 records only, no frame and no payload."""
    listeners = open_listeners(1)
    relay = socket.create_server(("127.0.0.1", 0))
    seen = bytearray()

    def forward(a, b):
        while data := a.recv(65536):
            seen.extend(data)
            b.sendall(data)

    def pump():
        for _ in range(2):
            near, _ = relay.accept()
            far = socket.create_connection(listeners[0].getsockname())
            for ends in ((near, far), (far, near)):
                threading.Thread(target=forward, args=ends, daemon=True).start()

    threading.Thread(target=pump, daemon=True).start()
    ends = {0: (hosts_of(listeners), listeners[0]), CLIENT: (hosts_of([relay]), None)}
    payload = b"a prompt that nobody may see"

    def work(me):
        hosts, listener = ends[me]
        config = PrivateConfig(protocol="plain", insecure=True, tls=sets["good"][me], timeout_s=10)
        transport = connect(config, me, hosts=hosts, listener=listener)
        if me == CLIENT:
            transport.send(0, "input", torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            return transport.recv(0, "ack", (1,), torch.uint8).item()
        got = transport.recv(CLIENT, "input", (len(payload),), torch.uint8)
        transport.send(CLIENT, "ack", torch.ones(1, dtype=torch.uint8))
        return got.numpy().tobytes()

    results = run_threads({me: me for me in ends}, dict.fromkeys(ends, work))
    assert results == {0: payload, CLIENT: 1}
    assert len(seen) > 1000
    assert b"PLLM" not in seen
    assert payload not in seen


def attempt(server_tls, client_tls, timeout=1.5, **client_options):
    """Errors of party 0 and of the client when both try to connect."""
    listeners = open_listeners(1)
    hosts = hosts_of(listeners)
    shared = {"protocol": "plain", "insecure": True, "timeout_s": timeout, "allow_plain_loopback": True}

    def serve(_):
        connect(PrivateConfig(**shared, tls=server_tls), 0, hosts=hosts, listener=listeners[0])

    def call(_):
        connect(PrivateConfig(**shared, tls=client_tls), CLIENT, hosts=hosts, **client_options)

    results = run_threads({0: None, CLIENT: None}, {0: serve, CLIENT: call})
    assert all(isinstance(error, TransportError) for error in results.values()), results
    return str(results[0]), str(results[CLIENT])


def test_a_client_of_another_ca(sets):
    mixed = TLSConfig(sets["other"][CLIENT].certificate, sets["other"][CLIENT].key, sets["good"][CLIENT].ca)
    party, client = attempt(sets["good"][0], mixed)
    assert "the client did not connect" in party
    assert "different CAs" in party
    assert "different CAs" in client


def test_a_party_of_another_ca(sets):
    mixed = TLSConfig(sets["other"][0].certificate, sets["other"][0].key, sets["good"][0].ca)
    party, client = attempt(mixed, sets["good"][CLIENT])
    assert "different CAs" in party
    assert "TLS with party 0" in client
    assert "different CAs" in client


@pytest.mark.parametrize(("name", "word"), [("expired", "expired"), ("early", "not valid yet")])
@pytest.mark.parametrize("old", [0, CLIENT])
def test_a_certificate_out_of_date(sets, name, word, old, tmp_path):
    """Both ends trust both CAs, so the date alone is wrong."""
    bundle = tmp_path / "ca.pem"
    bundle.write_text("".join(Path(sets[kind][0].ca).read_text() for kind in ("good", name)))
    ends = {}
    for me in (0, CLIENT):
        own = sets[name if me == old else "good"][me]
        ends[me] = TLSConfig(own.certificate, own.key, str(bundle))
    errors = dict(zip((0, CLIENT), attempt(ends[0], ends[CLIENT]), strict=True))
    judge = CLIENT if old == 0 else 0
    assert "its certificate was refused here" in errors[judge]
    assert word in errors[judge]
    assert "refused" in errors[old]
    assert "certificate" in errors[old]


def test_another_partys_certificate(sets):
    party, client = attempt(sets["good"][1], sets["good"][CLIENT])
    assert "got the name party1; want party0" in client
    assert "the client did not connect" in party


def test_a_party_that_poses_as_the_client(sets):
    party, client = attempt(sets["good"][0], sets["good"][2])
    assert "party 0 refused" in client
    assert "got the name party2; want client" in client
    assert "got the name party2; want client" in party


def test_a_plaintext_client(sets):
    party, client = attempt(sets["good"][0], None)
    assert "does not speak TLS" in party
    assert "compare tls and the order of hosts" in client


def test_a_plaintext_party(sets):
    party, client = attempt(None, sets["good"][CLIENT])
    assert "want a frame of private-llm" in party
    assert "set tls at all endpoints or at none" in client


def test_a_caller_without_certificate(sets):
    """Another TLS program that shows none, and one that stays at TLS 1.2, get nothing and harm nobody."""
    listeners = open_listeners(1)
    config = PrivateConfig(protocol="plain", insecure=True, tls=sets["good"][0], timeout_s=3)
    hosts = hosts_of(listeners)
    thread_result = {}

    def serve():
        try:
            connect(config, 0, hosts=hosts, listener=listeners[0])
        except TransportError as error:
            thread_result["text"] = str(error)

    thread = threading.Thread(target=serve)
    thread.start()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(sets["good"][0].ca)
    secured = context.wrap_socket(socket.create_connection(listeners[0].getsockname()))
    with secured, pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
        secured.recv(1)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    old = socket.create_connection(listeners[0].getsockname())
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        context.wrap_socket(old)
    thread.join(20)
    assert "the client did not connect within 3 s" in thread_result["text"]


def test_a_user_may_name_the_folder_of_certificates(sets, tmp_path):
    own = sets["good"][CLIENT]
    assert PrivateConfig(tls=str(Path(own.ca).parent)).tls == own
    with pytest.raises(ConfigError, match="tls: got an empty name; want the folder"):
        PrivateConfig(tls="")
    with pytest.raises(ConfigError, match=f"tls: {tmp_path} lacks client.pem, client.key, ca.pem; want the files"):
        PrivateConfig(tls=tmp_path)


@pytest.mark.parametrize("field", ["certificate", "key", "ca"])
def test_a_missing_file_is_named(sets, field):
    paths = {name: getattr(sets["good"][0], name) for name in ("certificate", "key", "ca")}
    config = PrivateConfig(tls=TLSConfig(**(paths | {field: "/nowhere/x.pem"})), timeout_s=1)
    with pytest.raises(ConfigError, match=f"tls.{field}: no file at /nowhere/x.pem"):
        connect(config, 0, hosts=["127.0.0.1:1"] * 3)


def test_a_key_that_does_not_fit(sets):
    good = sets["good"]
    config = PrivateConfig(tls=TLSConfig(good[0].certificate, good[1].key, good[0].ca), timeout_s=1)
    with pytest.raises(ConfigError, match="do not fit together"):
        connect(config, 0, hosts=["127.0.0.1:1"] * 3)


def test_files_of_make_certificates(tmp_path):
    configs = make_certificates(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ca.pem",
        "client.key",
        "client.pem",
        "party0.key",
        "party0.pem",
        "party1.key",
        "party1.pem",
    ]
    assert all(stat.S_IMODE(os.stat(configs[me].key).st_mode) == 0o600 for me in configs)
    with pytest.raises(ConfigError, match="exists already"):
        make_certificates(tmp_path, 2)
