"""Keys made at home: requests, what a CA signs, and what it refuses."""

import stat

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from private_llm.errors import ConfigError
from private_llm.net.authority import (
    Authority,
    certificate_facts,
    check_signed,
    make_authority,
    make_request,
    read_request,
    sign_request,
)
from private_llm.tls_config import TLSConfig


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ca")
    make_authority(folder, 365)
    return folder


@pytest.mark.parametrize(("name", "stem"), [("party1", "party1"), ("client", "client"), ("client:alice", "client")])
def test_a_key_made_at_home_gets_its_certificate(ca, tmp_path, name, stem):
    request = make_request(tmp_path / "home", name)
    assert stat.S_IMODE((tmp_path / "home" / f"{stem}.key").stat().st_mode) == 0o600
    assert b"PRIVATE" not in request.path.read_bytes()
    sent = tmp_path / "ca-inbox" / request.path.name
    sent.parent.mkdir()
    sent.write_bytes(request.path.read_bytes())
    assert read_request(sent).fingerprint == request.fingerprint
    path, facts = sign_request(ca, sent, tmp_path / "signed", 90)
    assert path == tmp_path / "signed" / f"{stem}.pem"
    assert (facts.name, facts.authority) == (name, False)
    assert 89.9 < facts.days_left() < 90.1
    tls = TLSConfig(str(path), str(tmp_path / "home" / f"{stem}.key"), str(ca / "ca.pem"))
    assert check_signed(tls) == facts == certificate_facts(path)[0]


def test_the_ca_keeps_its_key_to_itself(ca):
    assert stat.S_IMODE((ca / "ca.key").stat().st_mode) == 0o600
    (facts,) = certificate_facts(ca / "ca.pem")
    assert facts.authority
    with pytest.raises(ConfigError, match=r"ca\.key exists already"):
        make_authority(ca, 365)


def test_no_key_is_overwritten(ca, tmp_path):
    request = make_request(tmp_path, "party0")
    before = (tmp_path / "party0.key").read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        make_request(tmp_path, "party0")
    assert (tmp_path / "party0.key").read_bytes() == before
    sign_request(ca, request.path, None, 90)
    with pytest.raises(ConfigError, match=r"party0\.pem exists already"):
        sign_request(ca, request.path, None, 90)


@pytest.mark.parametrize(
    "name", ["", "party", "party-1", "party01", "party1 ", "ca", "client:", "client:a/b", "server"]
)
def test_names_that_nobody_may_have(name, tmp_path):
    with pytest.raises(ConfigError, match="name: got"):
        make_request(tmp_path / "new", name)
    assert not (tmp_path / "new").exists()


def foreign(path, name="party0", bits=2048, more=()):
    """A request that another program made."""
    key = rsa.generate_private_key(65537, bits)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each) for each in (name, *more)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject)
    request = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    path.write_bytes(request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return path


def test_requests_of_other_programs(ca, tmp_path):
    path, facts = sign_request(ca, foreign(tmp_path / "a.csr"), None, 90)
    assert not facts.authority  # although it asked to be one
    assert not certificate_facts(path)[0].authority
    for wrong, said in (
        (foreign(tmp_path / "b.csr", bits=1024), "its key is weak"),
        (foreign(tmp_path / "c.csr", name="root"), "name: got 'root'"),
        (foreign(tmp_path / "d.csr", more=["party1"]), "name: got 'party0 and party1'"),
    ):
        with pytest.raises(ConfigError, match=said):
            sign_request(ca, wrong, None, 90)
    altered = bytearray(x509.load_pem_x509_csr(foreign(tmp_path / "e.csr").read_bytes()).public_bytes(
        serialization.Encoding.DER
    ))  # fmt: skip
    altered[-1] ^= 1
    (tmp_path / "e.csr").write_bytes(x509.load_der_x509_csr(bytes(altered)).public_bytes(serialization.Encoding.PEM))
    with pytest.raises(ConfigError, match="was altered on the way"):
        sign_request(ca, tmp_path / "e.csr", None, 90)


def test_a_ca_that_is_not_whole(ca, tmp_path):
    request = make_request(tmp_path, "party0").path
    with pytest.raises(ConfigError, match="No such file"):
        sign_request(tmp_path, request, None, 90)
    make_authority(tmp_path / "other", 365)
    (tmp_path / "other" / "ca.key").write_bytes((ca / "ca.key").read_bytes())
    with pytest.raises(ConfigError, match="is not the key of"):
        Authority.open(tmp_path / "other")
    with pytest.raises(ConfigError, match="want a request"):
        sign_request(ca, ca / "ca.pem", None, 90)
    with pytest.raises(ConfigError, match="days: got 0"):
        sign_request(ca, request, None, 0)


def test_a_certificate_ends_with_its_ca(tmp_path):
    made = make_authority(tmp_path / "ca", 10)
    _, facts = sign_request(tmp_path / "ca", make_request(tmp_path, "party0").path, None, 90)
    assert facts.ends == made.ends
