"""Renewal without a restart: new certificates are used from the next handshake on, and only whole, fitting ones."""

import datetime
import hashlib
import logging
import os
import shutil
import socket
import ssl
import threading
from pathlib import Path

import pytest

from private_llm.errors import ConfigError
from private_llm.net.authority import certificate_facts, make_authority, make_certificates, make_request, sign_request
from private_llm.net.tls import Credentials
from private_llm.tls_config import TLSConfig


def issued(folder: Path, name: str, ca: Path) -> TLSConfig:
    request = make_request(folder, name)
    path, _ = sign_request(ca, request.path, None, 90)
    shutil.copy(ca / "ca.pem", folder / "ca.pem")
    return TLSConfig(str(path), str(path.with_suffix(".key")), str(folder / "ca.pem"))


@pytest.fixture
def place(tmp_path):
    """A CA, party 1's files, and party 0's credentials to meet it with."""
    make_authority(tmp_path / "ca", 365)
    own = issued(tmp_path / "own", "party1", tmp_path / "ca")
    return tmp_path, own, Credentials(issued(tmp_path / "peer", "party0", tmp_path / "ca"))


def shown(server: Credentials, client: Credentials) -> str:
    """The fingerprint of the certificate that a server shows; raises what the client's handshake raises."""
    near, far = socket.socketpair()

    def answer() -> None:
        with server.wrap(near, server=True) as sock:
            try:
                sock.do_handshake()
            except ssl.SSLError:
                return

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with client.wrap(far, server=False) as sock:
            sock.do_handshake()
            raw = sock.getpeercert(binary_form=True)
    finally:
        far.close()
        thread.join(10)
    digest = hashlib.sha256(raw).digest()
    return digest.hex(":").upper()


def of(tls: TLSConfig) -> str:
    return certificate_facts(Path(tls.certificate))[0].fingerprint


def install(new: TLSConfig, own: TLSConfig) -> None:
    for field in ("key", "certificate", "ca"):
        os.replace(getattr(new, field), getattr(own, field))


def test_a_new_pair_is_shown_at_the_next_handshake(place, caplog):
    tmp_path, own, peer = place
    server = Credentials(own)
    first = of(own)
    assert shown(server, peer) == first
    new = issued(tmp_path / "new", "party1", tmp_path / "ca")
    second = of(new)
    with caplog.at_level(logging.INFO, "private_llm"):
        install(new, own)
        assert shown(server, peer) == second != first
    assert [r.message for r in caplog.records if "party1 renewed" in r.message]
    caplog.clear()
    assert shown(server, peer) == second
    assert not caplog.records


def test_a_pair_of_which_half_has_arrived_is_not_used_until_the_rest_comes(place, caplog):
    tmp_path, own, peer = place
    server, first = Credentials(own), of(own)
    new = issued(tmp_path / "new", "party1", tmp_path / "ca")
    second = of(new)
    os.replace(new.key, own.key)
    for _ in range(3):
        assert shown(server, peer) == first
    assert [r.levelname for r in caplog.records] == ["ERROR"]  # said once, not at each handshake
    assert "not used" in caplog.records[0].message
    os.replace(new.certificate, own.certificate)
    assert shown(server, peer) == second


@pytest.mark.parametrize("damage", ["short", "empty", "missing", "text"])
@pytest.mark.parametrize("field", ["certificate", "key", "ca"])
def test_a_damaged_file_leaves_what_was_in_use(place, caplog, field, damage):
    _, own, peer = place
    server, first = Credentials(own), of(own)
    path = Path(getattr(own, field))
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"short": whole[: len(whole) // 2], "empty": b"", "text": b"hello\n"}[damage])
    assert shown(server, peer) == first
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "BEGIN" not in caplog.text
    path.write_bytes(whole)
    assert shown(server, peer) == first


def test_files_of_others_and_of_the_past_are_not_used(place, caplog):
    tmp_path, own, peer = place
    server, first = Credentials(own), of(own)
    kept = {field: Path(getattr(own, field)).read_bytes() for field in ("certificate", "key", "ca")}
    make_authority(tmp_path / "ca2", 365)
    other_ca = issued(tmp_path / "b", "party1", tmp_path / "ca2")
    Path(other_ca.ca).write_bytes(kept["ca"])  # the pair of another CA, with this one's certificate
    expired = make_certificates(
        tmp_path / "old", 3, start=datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=400)
    )[1]
    other_name = issued(tmp_path / "a", "party2", tmp_path / "ca")
    for new, said in ((other_name, "got the name 'party2'"), (other_ca, "signed by"), (expired, "expired on")):
        caplog.clear()
        install(new, own)
        assert shown(server, peer) == first
        assert said in caplog.text
        for field, content in kept.items():
            Path(getattr(own, field)).write_bytes(content)


def test_a_new_ca_beside_the_old_one_admits_both(place):
    tmp_path, own, _ = place
    server = Credentials(own)
    make_authority(tmp_path / "ca2", 365)
    newcomer = issued(tmp_path / "newcomer", "party0", tmp_path / "ca2")
    both = Path(newcomer.ca).read_bytes() + Path(own.ca).read_bytes()
    Path(newcomer.ca).write_bytes(both)
    near, far = socket.socketpair()
    client = Credentials(newcomer)
    assert not accepted(server, client, near, far)
    Path(own.ca).write_bytes(both)
    near, far = socket.socketpair()
    assert accepted(server, client, near, far)


def accepted(server: Credentials, client: Credentials, near: socket.socket, far: socket.socket) -> bool:
    """Whether the server admits the client."""
    found: list[bool] = []

    def answer() -> None:
        try:
            with server.wrap(near, server=True) as sock:
                sock.do_handshake()
                found.append(True)
        except ssl.SSLError:
            found.append(False)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with client.wrap(far, server=False) as sock:
            sock.do_handshake()
            thread.join(10)
    except (ssl.SSLError, OSError):
        thread.join(10)
    return found == [True]


def test_the_first_set_must_fit(place):
    _, own, _ = place
    Path(own.key).write_bytes(b"")
    with pytest.raises(ConfigError, match="do not fit together"):
        Credentials(own)
