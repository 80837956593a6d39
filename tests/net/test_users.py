"""Users with names of their own: certificates, lists of who is admitted, and taking a name off a list."""

import contextlib
import threading
from dataclasses import replace

import pytest
import torch
from cryptography import x509
from cryptography.x509.oid import NameOID

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, TransportError
from private_llm.net.addresses import hosts_of, open_connection, open_listeners, parse_address
from private_llm.net.authority import make_certificates, user_folder
from private_llm.net.rendezvous import connect, open_acceptor
from private_llm.net.roles import Users, check_user, client_name, is_client
from private_llm.net.transport import CLIENT
from private_llm.tls_config import TLSConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, 1, users=["alice", "bob"])
    return folder


def of(folder, name):
    return TLSConfig(str(folder / f"{name}.pem"), str(folder / f"{name}.key"), str(folder / "ca.pem"))


def test_files_of_users(folder):
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*")) == [
        "ca.pem",
        "client-alice/ca.pem", "client-alice/client.key", "client-alice/client.pem",
        "client-bob/ca.pem", "client-bob/client.key", "client-bob/client.pem",
        "party0.key", "party0.pem",
    ]  # fmt: skip
    certificate = x509.load_pem_x509_certificate((user_folder(folder, "bob") / "client.pem").read_bytes())
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert name.value == client_name("bob") == "client:bob"
    assert (user_folder(folder, "bob") / "client.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["", "a b", "../up", ".hidden", "a/b", "a:b", "é", "x" * 58, "a\n"])
def test_names_that_no_user_may_have(name, tmp_path):
    with pytest.raises(ConfigError, match="user: got"):
        check_user(name)
    with pytest.raises(ConfigError, match="user: got"):
        make_certificates(tmp_path / "new", 1, users=[name])
    assert not (tmp_path / "new").exists()
    assert not is_client(f"client:{name}") or name == ""


@pytest.mark.parametrize(
    ("name", "client"),
    [("client", True), ("client:a.b-c@d_e", True), ("party0", False), ("clients", False), ("client:", False)],
)
def test_common_names_of_clients(name, client):
    assert is_client(name) is client


def test_a_list_in_a_file(tmp_path):
    path = tmp_path / "users"
    path.write_text("# who may come\nalice   # until May\n\n  bob\n")
    users = Users(str(path))
    users.verify()
    for name in ("alice", "bob"):
        users.check(client_name(name))
    for name in ("eve", "alice2", "bo"):
        with pytest.raises(TransportError, match=f"user '{name}' is not on this party's list"):
            users.check(f"client:{name}")
    with pytest.raises(TransportError, match="'client' names no user"):
        users.check("client")
    path.unlink()
    with pytest.raises(TransportError, match="nobody is admitted for now"):
        users.check("client:alice")


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "user: got"), ("alice,", "user: got"), ("a b", "user: got"), ("/nowhere/users", "no list of users")],
)
def test_lists_that_are_none_are_refused_before_listening(folder, text, message):
    tls = replace(of(folder, "party0"), allow=text)
    config = PrivateConfig(protocol="plain", insecure=True, party_mode="remote", hosts=("127.0.0.1:1",), tls=tls)
    with pytest.raises(ConfigError, match=message):
        open_acceptor(config, 0)


def test_a_list_with_a_name_that_is_none(tmp_path):
    (tmp_path / "users").write_text("alice\nbob and eve\n")
    with pytest.raises(ConfigError, match="user: got 'bob and eve'"):
        Users(str(tmp_path / "users")).verify()


@pytest.fixture
def served(folder, tmp_path):
    """One party that admits by a file, and the client's settings; the party serves until nobody comes any more."""
    (listener,) = open_listeners(1)
    hosts = hosts_of([listener])
    listener.close()
    allowed = tmp_path / "allowed"
    allowed.write_text("alice\nbob\n")
    config = PrivateConfig(protocol="plain", insecure=True, party_mode="remote", hosts=hosts, timeout_s=5.0)
    ended = threading.Event()
    mine = replace(config, tls=replace(of(folder, "party0"), allow=str(allowed)))

    def serve():
        with contextlib.closing(open_acceptor(mine, 0)) as acceptor:
            while not ended.is_set():
                with contextlib.suppress(TransportError):
                    t = connect(mine, 0, acceptor=acceptor, wait_s=0.5)
                    t.send(CLIENT, "m", t.recv(CLIENT, "m", (1,), torch.int64))
                    t.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield config, allowed
    ended.set()
    thread.join(20)


def session(config, tls):
    t = connect(replace(config, tls=tls), CLIENT)
    t.send(0, "m", torch.tensor([4]))
    answer = t.recv(0, "m", (1,), torch.int64).item()
    t.close()
    return answer


def test_taking_a_name_off_the_list_keeps_its_user_out(served, folder, caplog):
    config, allowed = served
    alice, bob = (of(user_folder(folder, name), "client") for name in ("alice", "bob"))
    assert (session(config, alice), session(config, bob)) == (4, 4)
    open_connection(parse_address(config.hosts[0]), 5.0).close()  # who looks whether a party listens is not refused
    allowed.write_text("bob\n")
    with pytest.raises(TransportError, match="party 0 refused: user 'alice' is not on this party's list"):
        session(config, alice)
    assert session(config, bob) == 4
    refused = [line for line in caplog.messages if "refused a caller" in line]
    assert refused == ["party 0 refused a caller: user 'alice' is not on this party's list; ask who runs it"]
    allowed.write_text("alice\nbob\n")
    assert session(config, alice) == 4


def test_a_list_does_not_admit_a_party_as_client(served, folder):
    config, _ = served
    with pytest.raises(TransportError, match="got the name party0; want client"):
        session(config, of(folder, "party0"))


def test_a_common_certificate_is_no_user(tmp_path, folder):
    """Without a list it is welcome as ever (see test_tls.py); with one it names nobody."""
    both = make_certificates(tmp_path / "common", 1)
    (listener,) = open_listeners(1)
    hosts = hosts_of([listener])
    config = PrivateConfig(protocol="plain", insecure=True, timeout_s=2.0)

    def serve():
        with pytest.raises(TransportError, match="names no user"):
            connect(replace(config, tls=replace(both[0], allow="alice")), 0, hosts=hosts, listener=listener)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(TransportError, match="'client' names no user, and this party admits users by name"):
        connect(replace(config, tls=both[CLIENT]), CLIENT, hosts=hosts)
    thread.join(20)
