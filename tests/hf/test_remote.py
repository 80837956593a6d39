"""Parties that run already and hold share files; the user brings configuration and tokenizer only."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from private_llm_cli.commands.models import loaded_from
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig, patch
from private_llm_hf.api import share_checkpoint
from private_llm_hf.checkpoint.share_files import share_path
from private_llm_hf.client.launch import serve_party

from private_llm.errors import ConfigError, PrivateLLMError, ShareFileError
from tests.hf import tiny
from tests.hf.compare import BATCH


def free_ports(count: int) -> tuple[str, ...]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    hosts = tuple(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)
    for each in sockets:
        each.close()
    return hosts


@contextmanager
def running(
    config: PrivateConfig, files: list[Path | None], sessions: int = 1, checkpoint: str | None = None
) -> Iterator[list[str]]:
    """Three `private-llm party` loops as threads with sockets; yields what they report."""
    lines: list[str] = []
    threads = [
        threading.Thread(
            target=serve_party, args=(config, number, file, sessions, lines.append, checkpoint), daemon=True
        )
        for number, file in enumerate(files)
    ]
    for thread in threads:
        thread.start()
    yield lines
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


@pytest.fixture
def config() -> PrivateConfig:
    return PrivateConfig(party_mode="remote", hosts=free_ports(3), allow_plain_loopback=True, timeout_s=30)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    tiny.build("llama").save_pretrained(folder / "checkpoint")
    for name in ("one", "two"):
        share_checkpoint(str(folder / "checkpoint"), folder / name, PrivateConfig())
    return folder


def files(folder: Path) -> list[Path | None]:
    return [share_path(folder, party) for party in range(3)]


def test_generate_from_share_files_in_two_sessions(shared: Path, config: PrivateConfig) -> None:
    want = tiny.build("llama").generate(**BATCH, max_new_tokens=3, do_sample=False)
    with running(config, files(shared / "one"), sessions=2) as lines:
        for _ in range(2):
            source = str(shared / "one" / "client")
            with AutoPrivateModelForCausalLM.from_pretrained(source, config) as private:
                assert torch.equal(private.generate(**BATCH, max_new_tokens=3, do_sample=False), want)
    assert sum(line == "session 2 ended" for line in lines) == 3


def test_weights_beside_the_parties_shares_are_said_to_stay_unread(
    shared: Path, config: PrivateConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(config, files(shared / "one"), sessions=2):
        for source, told in ((shared / "one" / "client", False), (shared / "checkpoint", True)):
            with loaded_from(AutoPrivateModelForCausalLM, str(source), config) as private:
                assert private.stored
            said = " ".join(capsys.readouterr().err.split())
            assert (f"The parties use shares of their own; the weights in {source} stay unread." in said) is told


@pytest.mark.full
def test_parties_wait_for_their_client_longer_than_the_timeout(shared: Path, config: PrivateConfig) -> None:
    patient = replace(config, timeout_s=1.2)
    with running(patient, files(shared / "one")):
        time.sleep(1.8)
        with AutoPrivateModelForCausalLM.from_pretrained(str(shared / "one" / "client"), patient) as private:
            time.sleep(1.8)  # and between its calls
            assert private(BATCH["input_ids"]).logits.shape == (2, 5, 128)


def test_a_model_owner_who_is_the_user_streams_the_weights(config: PrivateConfig) -> None:
    model = tiny.build("llama")
    with running(config, [None] * 3), patch(model, config) as private:
        want = model.generate(**BATCH, max_new_tokens=2, do_sample=False)
        assert torch.equal(private.generate(**BATCH, max_new_tokens=2, do_sample=False), want)


def test_a_client_that_vanishes_frees_the_parties_for_the_next(shared: Path, config: PrivateConfig) -> None:
    with running(config, files(shared / "one"), sessions=2) as lines:
        source = str(shared / "one" / "client")
        lost = AutoPrivateModelForCausalLM.from_pretrained(source, config)
        lost.parties.transport.close()  # no farewell: as if its process had died
        with AutoPrivateModelForCausalLM.from_pretrained(source, config) as private:
            assert private(BATCH["input_ids"]).logits.shape == (2, 5, 128)
    assert sum(line.startswith("session 1 ended: ") and "client" in line for line in lines) == 3


def test_files_of_two_sharings_do_not_mix(shared: Path, config: PrivateConfig) -> None:
    mixed = [*files(shared / "one")[:2], files(shared / "two")[2]]
    with running(config, mixed), pytest.raises(ShareFileError, match="different models or different sharings"):
        AutoPrivateModelForCausalLM.from_pretrained(str(shared / "one" / "client"), config)


def test_files_of_another_model(shared: Path, config: PrivateConfig) -> None:
    with (
        running(config, files(shared / "one")),
        pytest.raises(ShareFileError, match="hold share files of another model"),
    ):
        patch(tiny.build("opt"), config)


def test_a_client_with_other_settings(shared: Path, config: PrivateConfig) -> None:
    with (
        running(config, files(shared / "one")),
        pytest.raises(PrivateLLMError, match="reveal: party 0 has 'logits', this endpoint 'token'"),
    ):
        AutoPrivateModelForCausalLM.from_pretrained(str(shared / "one" / "client"), replace(config, reveal="token"))


def test_wrong_party_numbers_and_files_are_refused_before_listening(shared: Path, config: PrivateConfig) -> None:
    with pytest.raises(ConfigError, match="party: got 3; want 0 to 2"):
        serve_party(config, 3)
    with pytest.raises(ShareFileError, match="belongs to party 1; this is party 0"):
        serve_party(config, 0, share_path(shared / "one", 1))


@pytest.mark.full
def test_parallel_sessions_read_the_same_share_file(shared: Path, config: PrivateConfig) -> None:
    config = replace(config, parallel_sessions=2)
    want = tiny.build("llama").generate(**BATCH, max_new_tokens=3, do_sample=False)
    source = str(shared / "one" / "client")
    with (
        running(config, files(shared / "one")),
        AutoPrivateModelForCausalLM.from_pretrained(source, config) as private,
    ):
        assert torch.equal(private.generate(**BATCH, max_new_tokens=3, do_sample=False), want)


def test_a_share_file_holds_one_role(shared: Path, config: PrivateConfig) -> None:
    config = replace(config, parallel_sessions=2, rotate_roles=True)
    with (
        running(config, files(shared / "one")),
        pytest.raises(ConfigError, match="rotate_roles: a share file holds the share of one role"),
    ):
        AutoPrivateModelForCausalLM.from_pretrained(str(shared / "one" / "client"), config)


@pytest.mark.full
def test_hosts_take_turns_in_the_roles(config: PrivateConfig) -> None:
    config, plain = replace(config, parallel_sessions=3, rotate_roles=True), tiny.build("llama")
    rows = torch.arange(12).view(3, 4) + 3
    with running(config, [None] * 3), patch(plain, config) as private:
        want = plain.generate(rows, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert torch.equal(private.generate(rows, max_new_tokens=3, do_sample=False, pad_token_id=0), want)
