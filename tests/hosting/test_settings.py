"""The settings file: what it becomes, and what it says about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
from private_llm_cli.options import adder_of
from private_llm_hosting.settings import EXAMPLE, PartySettings, example_of, read_settings

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.authority import make_certificates
from private_llm.tls_config import TLSConfig
from private_llm.token_sharding import ShardingPlan

from .party import settings, write_settings


def read(folder: Path, text: str, environment: dict[str, str] | None = None) -> PartySettings:
    (folder / "party.toml").write_text(text)
    return read_settings(folder / "party.toml", environment or {})


def test_the_example_parses_and_states_the_defaults(tmp_path: Path) -> None:
    found = read(tmp_path, EXAMPLE)
    assert found.party == 0
    assert found.config.tls == TLSConfig(
        str(tmp_path / "tls/party0.pem"), str(tmp_path / "tls/party0.key"), str(tmp_path / "tls/ca.pem"),
        str(tmp_path / "users.txt"),
    )  # fmt: skip
    assert found.service.models == {"demo": tmp_path / "shares/party0.safetensors"}
    least = EXAMPLE.split("[limits]")[0]
    without = read(tmp_path, least)
    assert (without.service, without.operator, without.log_format, without.log_level) == (
        found.service, found.operator, found.log_format, found.log_level,
    )  # fmt: skip
    assert without.config == found.config


@pytest.mark.parametrize("protocol", ["trio", "quad", "dealer", "plain", "cascade", "assisted"])
def test_there_is_an_example_for_each_protocol(tmp_path: Path, protocol: str) -> None:
    found = read(tmp_path, example_of(protocol))
    assert found.config.protocol == protocol
    assert len(found.config.hosts) == found.config.endpoints
    assert (found.checkpoint is None, found.service is None) == (found.config.facts is not None, protocol == "cascade")
    assert example_of("trio") == EXAMPLE
    assert "AttnNodes" not in EXAMPLE


def test_the_example_of_nodes_says_why_there_are_so_many_hosts() -> None:
    written = example_of("cascade")
    assert written.count(".example.org:7000") == 144
    assert "\n# The default plan has 8 CompNodes and 136 AttnNodes, in this order, a host each; with\n" in written
    assert "# plan = {alpha = 3, c = 4, m = 1} in [computation] there are 3 CompNodes and 6 AttnNodes.\n" in written
    assert ShardingPlan.from_dict({"alpha": 3, "c": 4, "m": 1}).nodes == 9


def test_a_folder_of_shares_means_this_partys_file(tmp_path: Path) -> None:
    (tmp_path / "shares").mkdir()
    assert settings(tmp_path).service.models == {"demo": tmp_path / "shares" / "party1.safetensors"}


def test_computation_becomes_the_configuration(tmp_path: Path) -> None:
    more = '[computation]\nring = 32\nfrac_bits = 10\nidle_s = 0\noffline_folder = "ahead"\n'
    config = settings(tmp_path, more, head='protocol = "dealer"').config
    assert (config.protocol, config.ring, config.frac_bits, config.idle_s) == ("dealer", 32, 10, None)
    assert config.party_mode == "remote"
    assert config.offline_folder == str(tmp_path / "ahead")


def test_far_parties_and_a_user_of_the_command_line_agree(tmp_path: Path) -> None:
    """TOML has 1000 where an option has 1000.0."""
    more = '[computation]\nadder = "auto"\nbandwidth_mbit = 1000\nlatency_ms = 20\n'
    party = settings(tmp_path, more).config
    user = PrivateConfig.from_dict(adder_of("auto,bandwidth_mbit=1000,latency_ms=20"))
    assert user.agreement() == party.agreement() != PrivateConfig().agreement()
    by_keys = PrivateConfig.from_dict(adder_of("keys"))
    assert settings(tmp_path, '[computation]\nadder = "keys"\n').config.agreement() == by_keys.agreement()
    assert by_keys.adder == "keys"
    assert by_keys.agreement() != user.agreement()
    assert adder_of("") == {}


def test_users_by_name_or_by_file(tmp_path: Path) -> None:
    text = write_settings(tmp_path).read_text()
    listed = read(tmp_path, text.replace("[tls]", '[tls]\nallow = ["alice", "bob"]')).config.tls
    assert listed is not None
    assert listed.allow == "alice,bob"
    filed = read(tmp_path, text.replace("[tls]", '[tls]\nallow_file = "users"')).config.tls
    assert filed is not None
    assert filed.allow == str(tmp_path / "users")


def test_the_environment_replaces_single_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_settings(tmp_path, "[limits]\nrows = 3\n")
    for name, value in {"LIMITS__ROWS": "8", "HOSTS": "a:1, b:2,c:3", "LOG__FORMAT": "json", "DRAIN_S": "2.5"}.items():
        monkeypatch.setenv(f"PRIVATE_LLM_PARTY__{name}", value)
    found = read_settings(path)
    assert (found.service.rows, found.service.sessions, found.service.drain_s) == (8, 5, 2.5)
    assert found.config.hosts == ("a:1", "b:2", "c:3")
    assert found.log_format == "json"
    monkeypatch.setenv("PRIVATE_LLM_PARTY__LIMIT__ROWS", "8")
    with pytest.raises(
        ConfigError,
        match=r"environment, PRIVATE_LLM_PARTY__: unknown key\(s\) limit \(did you mean limits\?\); known keys: .*limi",
    ):
        read_settings(path)
    monkeypatch.delenv("PRIVATE_LLM_PARTY__LIMIT__ROWS")
    monkeypatch.setenv("PRIVATE_LLM_PARTY__LIMITS__ROWZ", "8")
    with pytest.raises(ConfigError, match=r"limits: unknown key\(s\) rowz \(did you mean rows\?\); known keys: .*rows"):
        read_settings(path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("party = 1", "partei = 1", r"unknown key\(s\) partei \(did you mean party\?\); known keys: .*party"),
        ("party = 1", "", "party: got none; want this party's number"),
        ("party = 1", 'party = "one"', "party: got 'one'; want a whole number"),
        ("clients = 5", "clients = 0", "clients: got 0; want at least 1"),
        ("clients = 5\n", "", "operator: got clients = 1; these settings want more than 1"),
        ("party = 1", "party = 1\nsessions = 2", "sessions: got clients = 5; these settings want 1"),
        ("party = 1", "party = 3", "party: got 3; want 0 to 2 for 'trio'"),
        ("party = 1", "party = ", "party.toml: Invalid value.*want TOML"),
        ("party = 1", 'party = 1\nprotocol = "duo"', "protocol: got 'duo'"),
        ("127.0.0.1:", "127.0.0.1-", "hosts: got '127.0.0.1-.*want host:port"),
        (
            "[tls]",
            "[tls]\nalow = []",
            r"tls: unknown key\(s\) alow \(did you mean allow\?\); known keys: allow, allow_file, ca, certif",
        ),
        ("[tls]", "[tls]\nallow = []", "tls.allow: got no name, which admits nobody"),
        ("[tls]", '[tls]\nallow = ["a b"]', "user: got 'a b'"),
        ("[tls]", '[tls]\nallow = ["a"]\nallow_file = "b"', "tls.allow, tls.allow_file: got both"),
        ("demo =", '"a b" =', "models: got the name 'a b'"),
        ("[models]\ndemo", "[models]\n[models.demo]\nx", "models.demo: got {.*want a share file"),
        ("[operator]", "[limits]\nrows = 0\n[operator]", "rows: got 0; want at least 1"),
        ("[operator]", '[log]\nformat = "xml"\n[operator]', "log.format: got 'xml'; want one of 'text', 'json'"),
        (
            "[operator]",
            "[computation]\nrings = 64\n[operator]",
            r"computation: unknown key\(s\) rings \(did you mean ring\?\); known",
        ),
        ("[operator]", "[computation]\nhosts = []\n[operator]", "computation: got 'hosts', whose place is hosts"),
        ("[operator]", "[computation]\nring = 16\n[operator]", "ring: got 16; want one of 64, 32"),
        ("[operator]", '[computation]\ntimeout_s = "x"\n[operator]', "timeout_s: got 'x'; want a finite number"),
    ],
)
def test_mistakes(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = write_settings(tmp_path).read_text()
    assert old in text
    with pytest.raises(ConfigError, match=rf"(?s)party\.toml.*{said}|{said}"):
        read(tmp_path, text.replace(old, new))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config: .*none\.toml: No such file.*--example-config"):
        read_settings(tmp_path / "none.toml", {})


ONE = 'party = 1\nhosts = ["a:1", "b:2", "c:3"]\nsessions = 2\n[models]\ndemo = "demo"\n[computation]\nring = 32\n'


def test_a_file_for_one_client_at_a_time(tmp_path: Path) -> None:
    found = read(tmp_path, ONE)
    assert (found.service, found.sessions, found.models) == (None, 2, {"demo": tmp_path / "demo"})
    assert (found.config.ring, found.config.frac_bits) == (32, 12)
    with pytest.raises(ConfigError, match="models: got 2 with clients = 1; want one, or more clients"):
        read(tmp_path, ONE.replace("[models]", '[models]\nother = "x"'))
    with pytest.raises(ConfigError, match="sessions: got 0; want at least 1"):
        read(tmp_path, ONE.replace("sessions = 2", "sessions = 0"))


def test_options_replace_what_the_environment_and_the_file_say(tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls", 3)
    (tmp_path / "party.toml").write_text(f'{ONE}[tls]\ncertificate = "x"\nkey = "x"\nca = "x"\nallow = ["eve"]\n')
    environment = {"PRIVATE_LLM_PARTY__PARTY": "0", "PRIVATE_LLM_PARTY__COMPUTATION__FRAC_BITS": "10"}
    found = read_settings(tmp_path / "party.toml", environment)
    assert (found.party, found.config.frac_bits) == (0, 10)
    options = {
        "party": 2, "hosts": ["d:1,e:2", "f:3"], "models": {"model": "own"}, "computation": {"device": "cuda:1"},
        "tls": {"folder": str(tmp_path / "tls"), "certificate": None, "key": None, "ca": None},
    }  # fmt: skip
    found = read_settings(tmp_path / "party.toml", environment, options)
    assert (found.party, found.config.hosts, found.models) == (2, ("d:1", "e:2", "f:3"), {"model": Path("own")})
    assert (found.config.device, found.config.frac_bits) == ("cuda:1", 10)
    assert found.config.tls is not None
    assert (found.config.tls.key, found.config.tls.allow) == (str(tmp_path / "tls" / "party2.key"), "eve")


def test_servers_of_open_weights_serve_several_clients_with_settings_of_their_own() -> None:
    options = {"party": 0, "hosts": ["127.0.0.1:1", "127.0.0.1:2"], "protocol": "assisted", "clients": 4}
    options |= {"checkpoint": "some/model", "limits": {"sessions_per_user": 2}, "drain_s": 1.0}
    found = read_settings(None, {}, options)
    assert found.service is not None
    assert (found.checkpoint, found.service.sessions, found.service.sessions_per_user) == ("some/model", 4, 2)
    for more, message in (
        ({"limits": {"rows": 2}}, "limits: unknown key.*rows"),
        ({"models": {"m": "party0.safetensors"}}, "models, --shares: 'assisted' has public weights"),
        ({"sessions": 3}, "sessions: got clients = 4"),
        ({"protocol": "trio", "hosts": ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]}, "checkpoint: got clients = 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_settings(None, {}, options | more)
    cascade = {"party": 0, "hosts": [f"127.0.0.1:{n}" for n in range(1, 145)], "protocol": "cascade", "clients": 4}
    with pytest.raises(ConfigError, match="under 'cascade' a party serves one client at a time"):
        read_settings(None, {}, cascade)
