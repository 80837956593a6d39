"""`private-llm party --config FILE --check`: everything that can be known before a party starts."""

from __future__ import annotations

import datetime
import json
import logging
import shutil
import socket
from pathlib import Path

import pytest
from private_llm_cli.app import app
from private_llm_hf.api import share_checkpoint
from private_llm_hf.service.party_service import PartyService
from private_llm_hosting.check import check_party
from private_llm_hosting.observers import ExpiryWatch, PartyMetrics
from private_llm_hosting.settings import read_settings
from transformers import OPTConfig, OPTForCausalLM
from typer.testing import CliRunner

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.authority import make_certificates

from .party import settings, write_settings


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates and share files."""
    folder = tmp_path_factory.mktemp("made")
    make_certificates(folder / "tls", 3)
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = OPTForCausalLM(OPTConfig(vocab_size=20, max_position_embeddings=16, word_embed_proj_dim=16, **sizes))
    model.save_pretrained(folder / "model")
    share_checkpoint(folder / "model", folder / "shares", PrivateConfig(calibrate=False))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    for name in ("tls", "shares"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


def verdicts(folder: Path, more: str = "", **keywords: object) -> dict[str, str]:
    """By verdict: what was said, where it is not "ok"."""
    found = check_party(settings(folder, more, **keywords))
    return {each.verdict: f"{each.what}: {each.found}" for each in found if each.verdict != "ok"}


def test_a_party_that_may_start(folder: Path) -> None:
    assert verdicts(folder) == {}


def test_the_table_and_the_exit_code(folder: Path) -> None:
    path = write_settings(folder)
    result = CliRunner().invoke(app, ["party", "--config", str(path), "--check"])
    assert result.exit_code == 0
    for word in ("1 of 3, protocol trio", "digest fits", "party1, 365 days left", "everybody with"):
        assert word in " ".join(result.output.split()), result.output
    (folder / "shares" / "party1.safetensors").unlink()
    result = CliRunner().invoke(app, ["party", "--config", str(path), "--check", "--json"])
    assert result.exit_code == 2
    (wrong,) = [each for each in map(json.loads, result.output.splitlines()) if each["verdict"] == "error"]
    assert "no such file" in wrong["found"]


def test_a_party_for_one_client_that_options_describe(folder: Path) -> None:
    hosts = ",".join(settings(folder).config.hosts)
    words = [
        "party",
        "--index",
        "1",
        "--hosts",
        hosts,
        "--tls",
        str(folder / "tls"),
        "--shares",
        str(folder / "shares"),
    ]
    result = CliRunner().invoke(app, [*words, "--allow", "alice", "--check", "--json"])
    found = {each["what"]: each["found"] for each in map(json.loads, result.output.splitlines())}
    assert (result.exit_code, found["operator port"], found["users"]) == (0, "none", "alice")
    assert "digest fits" in found["model model"]
    assert CliRunner().invoke(app, [*words, "--check", "--device", "cuda:99"]).exit_code == 2


def test_a_node_that_reads_its_own_checkpoint(folder: Path, made: Path) -> None:
    words = ["party", "--protocol", "cascade", "--plan", "1,3,1", "--index", "0", "--allow-plain-loopback", "--json"]
    words += ["--hosts", ",".join(settings(folder).config.hosts[:2]), "--check", "--model"]
    result = CliRunner().invoke(app, [*words, str(made / "model")])
    assert (result.exit_code, "digest" in result.output) == (0, True)
    assert "no such folder here" in CliRunner().invoke(app, [*words, "no such model"]).output


def test_share_files_of_others(folder: Path) -> None:
    shutil.copy(folder / "shares" / "party2.safetensors", folder / "shares" / "party1.safetensors")
    assert "belongs to party 2; this is party 1" in verdicts(folder)["error"]


def test_models_that_the_ring_cannot_hold(
    made: Path, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused when they are shared; a file from elsewhere when a party looks, and before it listens."""
    config = PrivateConfig(ring=32, frac_bits=12, calibrate=False)
    with pytest.raises(ConfigError, match=r"ring: got 32 for OPTForCausalLM, whose '.*layer_norm' .*; want ring=64"):
        share_checkpoint(made / "model", tmp_path / "small", config)
    with monkeypatch.context() as patch:
        patch.setattr("private_llm_hf.api.check_ring", lambda *_: None)
        share_checkpoint(made / "model", tmp_path / "small", config)
    shutil.rmtree(folder / "shares")
    (tmp_path / "small").rename(folder / "shares")
    more = "[computation]\nring = 32\nfrac_bits = 12\ncalibrate = false\n"
    assert "want ring=64" in verdicts(folder, more)["error"]
    chosen = settings(folder, more)
    with pytest.raises(ConfigError, match="want ring=64"):
        PartyService(chosen.config, chosen.party, chosen.service)


def test_share_files_that_are_damaged_or_open_to_others(folder: Path) -> None:
    file = folder / "shares" / "party1.safetensors"
    file.chmod(0o644)
    assert verdicts(folder)["warning"].startswith("share file: ")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    assert "does not match its digest" in verdicts(folder)["error"]


def test_certificates_of_others(folder: Path) -> None:
    for end in ("pem", "key"):
        shutil.copy(folder / "tls" / f"party2.{end}", folder / "tls" / f"party1.{end}")
    assert "got the name 'party2'; want 'party1'" in verdicts(folder)["error"]


def test_keys_that_do_not_fit_or_are_open_to_others(folder: Path) -> None:
    (folder / "tls" / "party1.key").chmod(0o640)
    assert "others may open it (mode 640); chmod 600" in verdicts(folder)["warning"]
    shutil.copy(folder / "tls" / "party2.key", folder / "tls" / "party1.key")
    assert "do not fit together" in verdicts(folder)["error"]


@pytest.mark.parametrize(
    ("days", "verdict", "said"),
    [(20, "warning", "expires in 20 days"), (-1, "error", "expired on"), (40, None, None)],
)
def test_certificates_that_end_soon(folder: Path, days: int, verdict: str | None, said: str | None) -> None:
    shutil.rmtree(folder / "tls")
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=100)
    make_certificates(folder / "tls", 3, days=100 + days + 0.01, start=start)
    found = verdicts(folder)
    assert set(found) == ({verdict} if verdict else set())
    assert said is None or said in str(found)


def test_ports_that_are_taken(folder: Path) -> None:
    found = settings(folder)
    host, _, port = found.config.hosts[1].rpartition(":")
    assert found.operator is not None
    for address in ((host, int(port)), found.operator):
        with socket.create_server(address):
            (wrong,) = [each for each in check_party(found) if each.verdict == "error"]
        assert f"cannot listen at {address[0]}:{address[1]}" in wrong.found


def test_an_operator_port_that_is_the_partys_own(folder: Path) -> None:
    found = settings(folder)
    text = (folder / "party.toml").read_text()
    assert found.operator is not None
    own = found.config.hosts[1].rpartition(":")[2]
    (folder / "party.toml").write_text(text.replace(f'"127.0.0.1:{found.operator[1]}"', f'"127.0.0.1:{own}"'))
    (wrong,) = [each for each in check_party(read_settings(folder / "party.toml", {})) if each.verdict == "error"]
    assert wrong.found == f"operator.address: port {own} is this party's own in hosts; want another one"


def test_a_gpu_that_is_not_there(folder: Path) -> None:
    text = write_settings(folder).read_text() + '[computation]\ndevice = "cuda:99"\n'
    (folder / "party.toml").write_text(text)
    (wrong,) = [each for each in check_party(read_settings(folder / "party.toml", {})) if each.verdict == "error"]
    assert wrong.what == "device"
    assert "got 'cuda:99'; this process sees" in wrong.found


def test_models_go_by_their_names_in_the_settings(folder: Path) -> None:
    assert [each.what for each in check_party(settings(folder)) if each.what.startswith("model")] == ["model demo"]


def test_lists_of_users_that_cannot_be_read(folder: Path) -> None:
    text = write_settings(folder).read_text().replace("[tls]", '[tls]\nallow_file = "users.txt"')
    (folder / "party.toml").write_text(text)
    wrong = [each for each in check_party(read_settings(folder / "party.toml", {})) if each.verdict == "error"]
    assert [each.what for each in wrong] == ["tls"]
    assert "no list of users can be read" in wrong[0].found
    (folder / "users.txt").write_text("alice\n")
    assert not [each for each in check_party(read_settings(folder / "party.toml", {})) if each.verdict == "error"]


def test_without_certificates(folder: Path) -> None:
    assert verdicts(folder, tls=False) == {
        "warning": "tls: none: unencrypted, on loopback addresses only; for trying out"
    }


def test_the_watch_warns_and_measures(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(folder / "tls")
    made = make_certificates(folder / "tls", 3, days=5)
    metrics = PartyMetrics(1, "trio")
    watch = ExpiryWatch(made[1], metrics, look_s=1000)
    try:
        assert sorted(r.levelname for r in caplog.records) == ["ERROR", "ERROR"]  # the certificate and the CA
        assert "the certificate party1 expires in 5 days" in caplog.text
        assert "let all endpoints trust both" in caplog.text
        text = metrics.text().decode()
        assert 'certificate_days_left{file="certificate",subject="party1"} 4.99' in text
        watch.look()
        assert len(caplog.records) == 2
        shutil.rmtree(folder / "tls")
        make_certificates(folder / "tls", 3, days=200)
        watch.look()
        assert 'file="certificate",subject="party1"} 199.9' in metrics.text().decode()
        assert len(caplog.records) == 2
        (folder / "tls" / "ca.pem").write_text("")
        watch.look()
        assert caplog.records[-1].levelno == logging.ERROR
        assert 'file="certificate",subject="party1"} 199.9' in metrics.text().decode()
    finally:
        watch.close()
