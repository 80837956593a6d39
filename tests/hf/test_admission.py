"""Several users of the same remote parties: those that start together are served in turn; none holds them for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig
from private_llm_hf.api import share_checkpoint
from private_llm_hf.checkpoint.share_files import share_path
from private_llm_hf.client.launch import serve_party

from private_llm.errors import PartiesBusy, PartyFailed
from tests.hf import tiny
from tests.hf.compare import BATCH
from tests.hf.test_remote import free_ports


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    tiny.build("llama").save_pretrained(folder / "checkpoint")
    for protocol in ("trio", "quad"):
        share_checkpoint(str(folder / "checkpoint"), folder / protocol, PrivateConfig(protocol=protocol))  # type: ignore[arg-type]
    return folder


def remote(protocol: str, parties: int) -> PrivateConfig:
    return PrivateConfig.from_dict(
        {
            "protocol": protocol, "party_mode": "remote", "hosts": free_ports(parties), "allow_plain_loopback": True,
            "timeout_s": 120.0, "busy_wait_s": 120.0,
        }
    )  # fmt: skip


@contextmanager
def serving(config: PrivateConfig, folder: Path, sessions: int) -> Iterator[list[str]]:
    """`private-llm party` loops as threads; yields what they report."""
    lines: list[str] = []
    threads = [
        threading.Thread(
            target=serve_party, args=(config, number, share_path(folder, number), sessions, lines.append), daemon=True
        )
        for number in range(config.parties)
    ]
    for thread in threads:
        thread.start()
    yield lines
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("protocol", "parties", "clients"), [("trio", 3, 2), ("trio", 3, 4), ("quad", 4, 3)])
def test_clients_that_start_together_all_get_their_text(
    shared: Path, protocol: str, parties: int, clients: int
) -> None:
    config = remote(protocol, parties)
    want = tiny.build("llama").generate(**BATCH, max_new_tokens=2, do_sample=False)
    together = threading.Barrier(clients)
    texts: dict[int, object] = {}

    def user(number: int) -> None:
        together.wait()
        try:
            with AutoPrivateModelForCausalLM.from_pretrained(str(shared / protocol / "client"), config) as private:
                texts[number] = private.generate(**BATCH, max_new_tokens=2, do_sample=False)
        except Exception as error:
            texts[number] = error

    with serving(config, shared / protocol, clients) as lines:
        users = [threading.Thread(target=user, args=(number,), daemon=True) for number in range(clients)]
        for each in users:
            each.start()
        for each in users:
            each.join(120)
    assert sorted(texts) == list(range(clients))
    for text in texts.values():
        assert isinstance(text, torch.Tensor), text
        assert torch.equal(text, want)
    ends = [line for line in lines if line.startswith("session ") and " ended" in line]
    assert len(ends) == clients * parties
    assert all(line.endswith(" ended") for line in ends)  # no session failed


def test_a_second_user_is_told_that_the_parties_are_busy(shared: Path) -> None:
    config = remote("trio", 3)
    source = str(shared / "trio" / "client")
    with (
        serving(config, shared / "trio", sessions=1),
        AutoPrivateModelForCausalLM.from_pretrained(source, config) as private,
    ):
        with pytest.raises(PartiesBusy, match="serves another client"):
            AutoPrivateModelForCausalLM.from_pretrained(source, replace(config, busy_wait_s=0.0))
        assert private(BATCH["input_ids"]).logits.shape == (2, 5, 128)


@pytest.mark.full
def test_a_user_who_leaves_the_parties_idle_gives_way(shared: Path) -> None:
    """The next user waits for its turn; the idle one is told in words when it comes back."""
    config = remote("trio", 3)
    source = str(shared / "trio" / "client")
    with serving(replace(config, idle_s=2.0), shared / "trio", sessions=2) as lines:
        idle = AutoPrivateModelForCausalLM.from_pretrained(source, config)
        idle(BATCH["input_ids"])
        time.sleep(1.0)  # a thought within the limit
        idle(BATCH["input_ids"])
        with AutoPrivateModelForCausalLM.from_pretrained(source, config) as private:
            assert private(BATCH["input_ids"]).logits.shape == (2, 5, 128)
        with pytest.raises(PartyFailed, match="the client sent nothing for 2 s and holds the parties"):
            idle(BATCH["input_ids"])
    assert sum("session 1 ended: " in line and "sent nothing for 2 s" in line for line in lines) == 3
