"""Models of HuggingFace under `dealer`: two parties and a dealer give the plaintext model's results everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig, patch
from private_llm_hf.api import share_checkpoint
from private_llm_hf.checkpoint.share_files import ShareFile, share_path
from private_llm_hf.wire.codec import Message
from private_llm_hf.wire.commands import CacheEdit, CropCache, ManageCache

from private_llm.errors import ConfigError, PartyFailed, ShareFileError, TransportError
from private_llm.net.local import LocalMesh
from private_llm.net.transport import Transport
from tests.hf import tiny
from tests.hf.compare import BATCH, GREEDY
from tests.hf.test_remote import free_ports, running

DEALER = PrivateConfig(protocol="dealer", timeout_s=60)


def test_remote_hosts_with_share_files(tmp_path: Path) -> None:
    model = tiny.build("llama")
    model.save_pretrained(tmp_path / "checkpoint")
    config = replace(DEALER, party_mode="remote", hosts=free_ports(3), allow_plain_loopback=True, timeout_s=30)
    share_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "shares", config)
    files: list[Path | None] = [share_path(tmp_path / "shares", endpoint) for endpoint in range(3)]
    source = str(tmp_path / "shares" / "client")
    with running(config, files) as lines, AutoPrivateModelForCausalLM.from_pretrained(source, config) as private:
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))
        private.close()
    assert any(line.startswith("the dealer waits for the others at ") for line in lines)
    assert not any("party 0" in line for line in lines)
    with pytest.raises(ShareFileError, match="belongs to party 1; this is the dealer"):
        ShareFile.open(share_path(tmp_path / "shares", 1), config, 0)
    assert (tmp_path / "shares" / "party0.safetensors").stat().st_size < 10_000, "the dealer holds seeds, no weights"


def edits(heard: list[Message]) -> list[CacheEdit]:
    return [each.edit for each in heard if isinstance(each, ManageCache)]


def test_the_dealer_learns_how_many_drafted_tokens_were_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same prompt, same text, and its requests still tell a good draft model from a bad one."""
    from private_llm_hf.client import parties as client

    heard: list[Message] = []
    send = client.send_message

    def listening(transport: Transport, party: int, message: Message) -> None:
        if party == 0:
            heard.append(message)
        send(transport, party, message)

    monkeypatch.setattr(client, "send_message", listening)
    model = tiny.build("opt")
    ids, rejected, texts = torch.tensor([[5, 6, 7, 8]]), [], []
    with patch(model, DEALER) as private:
        for draft in (model, tiny.build("opt", seed=5)):
            heard.clear()
            texts.append(private.generate(ids, assistant_model=draft, max_new_tokens=6, do_sample=False))
            rejected.append(sum(edit.count for edit in edits(heard) if isinstance(edit, CropCache)))
    assert torch.equal(*texts)
    assert rejected[0] == 0 != rejected[1]


# -- what users read ------------------------------------------------------------------------------------------
def test_a_dealer_that_stops_is_called_the_dealer() -> None:
    mesh = LocalMesh(3, timeout=20)
    with patch(tiny.build("opt"), DEALER, mesh) as private:
        mesh.transport(0).abort("party 0: PartyFailed: its machine was switched off")
        with pytest.raises(PartyFailed, match=r"^the dealer: its machine was switched off$"):
            private(**BATCH)


def test_a_silent_dealer_is_called_the_dealer() -> None:
    from private_llm_hf.client.launch import start_parties

    config = replace(DEALER, party_mode="remote", hosts=free_ports(3), allow_plain_loopback=True, timeout_s=0.5)
    with pytest.raises(TransportError, match=r"^the dealer at .* was not reached within 0.5 s"):
        start_parties(config)


def test_three_ranks_would_put_the_client_into_the_dealer(monkeypatch: pytest.MonkeyPatch) -> None:
    from private_llm_hf.client import launch

    class Mesh:
        def __init__(self, *_: object, **__: object) -> None:
            self.closed = False

        def rank_of(self, endpoint: int) -> int:
            return 0 if endpoint in (0, 255) else endpoint

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr("private_llm.net.distributed.DistMesh", Mesh)
    with pytest.raises(ConfigError, match="client into the dealer's process; want 4"):
        launch.start_parties(replace(DEALER, party_mode="distributed"))
