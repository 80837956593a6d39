"""Weights whose masks stay seeds: the same answers to the last bit, party by party, and where memory is short."""

from __future__ import annotations

import dataclasses
import json
import secrets
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig, patch
from private_llm_hf.api import share_checkpoint
from private_llm_hf.checkpoint.share_files import ShareFile, share_path
from private_llm_hf.client.launch import serve_party
from private_llm_hf.party import placement
from torch import Tensor

from private_llm.errors import ConfigError, ShareFileError
from private_llm.kernels.prg import aes
from private_llm.kernels.seeded_tensor import SeededTensor
from private_llm.protocols.session import Session, meta_session
from private_llm.protocols.weight_sharing import bytes_at_rest
from private_llm.replay.program_cache import ProgramCache
from private_llm.sparsity_config import CometConfig
from tests.hf import tiny
from tests.hf.compare import BATCH
from tests.hf.test_remote import free_ports

GREEDY = {"max_new_tokens": 3, "do_sample": False}
SEEDS = PrivateConfig(weights_at_rest="seeds", timeout_s=60)
RESIDENT = dataclasses.replace(SEEDS, weights_at_rest="resident")


@pytest.fixture
def same_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw of the system's entropy gives the same: two sessions with equal messages, whatever the roundings."""
    monkeypatch.setattr(secrets, "token_bytes", lambda count=32: bytes(range(count)))


def answers(model: tr.PreTrainedModel, config: PrivateConfig, inputs: dict[str, Tensor]) -> tuple[Tensor, int, int]:
    with patch(model, config) as private:
        out = private(**inputs)
        cost = private.cost()
    return out.logits if "logits" in out else out.last_hidden_state, cost.bytes_total, cost.rounds


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("same_entropy")
@pytest.mark.parametrize("protocol", ["trio", "dealer", "quad"])
@pytest.mark.parametrize("name", ["opt", "gpt2", "llama", "vit"])
def test_the_same_bits(name: str, protocol: str) -> None:
    """Tied tables, positions, fused query, key and value, [inputs, outputs] of Conv1D, and a convolution."""
    model, inputs = tiny.build(name), dict(BATCH)
    if name == "vit":
        inputs = {"pixel_values": torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(2))}
    seeds, resident = (
        answers(model, dataclasses.replace(config, protocol=protocol), inputs) for config in (SEEDS, RESIDENT)
    )
    assert torch.equal(seeds[0], resident[0])
    assert seeds[1:] == resident[1:]


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("same_entropy")
@pytest.mark.parametrize(
    "settings", [{"ring": 32, "frac_bits": 10}, {"protocol": "dealer", "matmul": "remask"}, {"prg": "chacha20"}]
)
def test_the_same_bits_in_other_settings(settings: dict[str, Any]) -> None:
    if settings.get("ring") == 32:
        torch.manual_seed(3)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 5, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(45, 7)
        )
        image = torch.rand(2, 3, 5, 5)
        found = []
        for config in (SEEDS, RESIDENT):
            with patch(model, dataclasses.replace(config, **settings)) as private:
                found.append(private(image))
        assert torch.equal(*found)
        return
    seeds, resident = (
        answers(tiny.build("opt"), dataclasses.replace(config, **settings), BATCH) for config in (SEEDS, RESIDENT)
    )
    assert torch.equal(seeds[0], resident[0])


# -- each party as it likes -------------------------------------------------------------------------------------
def test_each_party_decides_for_itself(tmp_path: Path) -> None:
    """Share files; party 0 keeps seeds, party 1 everything, party 2 seeds and its layers on disk."""
    model = tiny.build("gpt2")
    model.save_pretrained(tmp_path / "checkpoint")
    share_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "shared", RESIDENT)
    client = PrivateConfig(party_mode="remote", hosts=free_ports(3), allow_plain_loopback=True, timeout_s=60)
    settings: tuple[dict[str, Any], ...] = (
        {"weights_at_rest": "seeds"},
        {"weights_at_rest": "resident"},
        {"weights_at_rest": "seeds", "device_map": {"": "disk"}},
    )
    threads = [
        threading.Thread(
            target=serve_party,
            args=(dataclasses.replace(client, **own), party, share_path(tmp_path / "shared", party), 1),
            daemon=True,
        )
        for party, own in enumerate(settings)
    ]
    for thread in threads:
        thread.start()
    with AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path / "shared" / "client"), client) as private:
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))
    for thread in threads:
        thread.join(60)


@pytest.mark.full
def test_processes(tmp_path: Path) -> None:
    """The setting reaches child processes, with weights from a client on disk."""
    model = tiny.build("opt")
    config = dataclasses.replace(SEEDS, party_mode="processes", device_map={"": "disk"}, offload_folder=str(tmp_path))
    with patch(model, config) as private:
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))


def test_a_file_with_another_seed_is_refused(tmp_path: Path) -> None:
    """One changed digit of a seed: the digest is over the seeds, too."""
    model = tiny.build("opt")
    model.save_pretrained(tmp_path / "checkpoint")
    share_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "shared", SEEDS)
    path = share_path(tmp_path / "shared", 0)
    seed = ShareFile.open(path, SEEDS, 0).keys[0].raw().hex()
    raw = path.read_bytes()
    assert raw.count(seed.encode()) == 1
    path.write_bytes(raw.replace(seed.encode(), (("0" if seed[0] != "0" else "1") + seed[1:]).encode()))
    with pytest.raises(ShareFileError, match="damaged"):
        ShareFile.open(path, SEEDS, 0)


def test_share_files_say_which_cipher_makes_their_masks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Parties take the cipher of the file, whatever their streams are; on a GPU masks of AES are worth a warning."""
    model = tiny.build("opt")
    model.save_pretrained(tmp_path / "checkpoint")
    session = dataclasses.replace(meta_session(SEEDS, 0), device="cuda:0")
    session.numerics.lazy_masks = True
    for prg, form, warned in (("aes", b"share file 2", True), ("chacha20", b"share file 3", False)):
        folder = tmp_path / prg
        share_checkpoint(str(tmp_path / "checkpoint"), folder, dataclasses.replace(SEEDS, prg=prg))
        assert all(form in share_path(folder, party).read_bytes() for party in range(3))
        files = [ShareFile.open(share_path(folder, party), SEEDS, party) for party in range(3)]
        assert {file.cipher for file in files} == {prg}
        name = "model.decoder.embed_tokens.weight"
        masks = [part for file in files for part in file.weight(name, seeds=True).parts]
        assert sum(isinstance(part, SeededTensor) for part in masks) == 4
        (a, b), (x, c), (y, d) = (file.weight(name).parts for file in files)
        assert (y - a).equal(x - b) and c.equal(a) and d.equal(b)  # noqa: PT018
        caplog.clear()
        placement.weights_of_file(session, files[0])
        assert ("AES streams" in caplog.text) == warned


# -- where memory is short --------------------------------------------------------------------------------------
SHAPES = [(64, 64), (64,), (128, 64)]


def planned(session_of: Any, **settings: Any) -> list[bool]:
    config = PrivateConfig(**settings)
    return [placement.keeps_seeds(session_of(config, party), SHAPES) for party in range(config.parties)]


def test_auto_keeps_seeds_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def session(config: PrivateConfig, party: int) -> Session:
        return type("_", (), {"config": config, "party": party, "device": "cpu"})()  # type: ignore[no-any-return]

    needed = sum(bytes_at_rest(PrivateConfig(), 0, shape, False) for shape in SHAPES)
    for free, wanted in ((int(needed / placement.FILLED) + 9, False), (needed, True)):
        monkeypatch.setattr(placement, "get_max_memory", lambda limits, free=free: limits or {"cpu": free})
        assert planned(session, party_mode="remote", hosts=("a:1", "b:1", "c:1")) == [wanted] * 3
    assert planned(session) == [True] * 3  # parties of one machine share its memory
    assert planned(session, weights_at_rest="resident") == [False] * 3
    assert planned(session, weights="public") == [False] * 3
    assert planned(session, sparsity=CometConfig(predictors="x")) == [False] * 3
    assert planned(session, protocol="plain", insecure=True) == [False]
    for maximum, wanted in ((needed, False), (needed - 1, True)):
        assert planned(session, device_map="auto", max_memory={"cpu": maximum}) == [wanted] * 3
    assert planned(session, device_map={"": "cpu"}) == [False] * 3
    assert planned(session, device_map={"": "cpu", "a": "disk"}) == [True] * 3


@pytest.mark.parametrize(
    ("settings", "each"),
    [
        ({"device": "cuda"}, 300), ({"device": "cuda:1"}, 200), ({"device_map": "auto"}, 200),
        ({"device": "cuda", "party_mode": "remote", "hosts": ["a:1", "b:1", "c:1"], "tls": None}, 600),
    ],
)  # fmt: skip
def test_parties_that_share_a_gpu_have_a_part_of_it_each(
    settings: dict[str, Any], each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs: of three parties two are on the first one, or all on the same, or on both."""
    monkeypatch.setattr(placement, "get_max_memory", lambda limits: limits or {0: 600, 1: 600, "cpu": 1 << 40})
    if settings.get("party_mode") == "remote":
        settings = settings | {"allow_plain_loopback": True, "hosts": [f"127.0.0.1:{n}" for n in (1, 2, 3)]}
    free = placement.free_memory(PrivateConfig.from_dict(settings))
    assert (free[0], free[1]) == (each, each)


def test_auto_keeps_seeds_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def session(config: PrivateConfig, party: int) -> Session:
        return type("_", (), {"config": config, "party": party, "device": "cpu"})()  # type: ignore[no-any-return]

    monkeypatch.setattr(placement, "get_max_memory", lambda limits: limits or {"cpu": 1 << 40})
    monkeypatch.setattr(placement, "memory_bytes", lambda: 1 << 40)
    monkeypatch.setattr(placement, "makes_fast", lambda: True)
    assert planned(session) == [False] * 3  # small: it stays in the caches
    monkeypatch.setattr(placement, "LARGE", 16 * (64 * 64 + 64 + 128 * 64))
    assert planned(session) == planned(session, protocol="dealer") == [True] * 3
    assert planned(session, protocol="dealer", matmul="remask") == [False] * 3  # these make masks whole
    assert planned(session, protocol="quad") == [False] * 4
    assert planned(session, prg="chacha20") == [False] * 3  # which no kernel of a CPU makes piece by piece
    assert planned(session, weights_at_rest="resident") == [False] * 3
    assert planned(session, device_map={"": "cpu"}) == [False] * 3
    assert planned(session, weights="public") == planned(session, ring=32, frac_bits=10) == [False] * 3
    assert planned(session, sparsity=CometConfig(predictors="x")) == [False] * 3
    with monkeypatch.context() as other:
        other.setattr(sys.modules[__name__], "SHAPES", [*SHAPES, (64, 64, 3)])
        assert planned(session) == [False] * 3
    monkeypatch.setattr(placement, "makes_fast", lambda: False)
    assert planned(session) == [False] * 3


def test_a_plan_counts_what_seeds_leave(tmp_path: Path) -> None:
    """Memory for 12 bytes a weight: with seeds nothing has to go to disk, and no folder for it is needed."""
    model = tiny.build("llama")
    room = 12 * sum(weight.numel() for weight in model.parameters())
    config = PrivateConfig(timeout_s=60, device_map="auto", max_memory={"cpu": room})
    with patch(model, config) as private:
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))
    with pytest.raises(ConfigError, match="no disk is known"):
        patch(model, dataclasses.replace(config, weights_at_rest="resident"))


@pytest.mark.full
@pytest.mark.skipif(not aes.usable(), reason="masks are made by OpenSSL here, which is no step")
@pytest.mark.parametrize("protocol", ["trio", "dealer"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_modules_with_seeds_are_repeated(name: str, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined projections, a tied head, [inputs, outputs] of Conv1D: as many calls as with masks in memory."""
    found: list[ProgramCache] = []
    original = ProgramCache.__init__

    def kept(programs: ProgramCache) -> None:
        original(programs)
        found.append(programs)

    monkeypatch.setattr(ProgramCache, "__init__", kept)
    how = {"input_ids": BATCH["input_ids"][:1], "max_new_tokens": 12, "do_sample": False}
    model, counts = tiny.build(name), []
    for config in (SEEDS, RESIDENT):
        with patch(model, dataclasses.replace(config, protocol=protocol, party_mode="threads")) as private:
            for _ in range(2):
                assert torch.equal(private.generate(**how), model.generate(**how))
        assert [each.refused for each in found] == [Counter()] * 3
        counts.append([dict(each.counts) for each in found])
        found.clear()
    assert counts[0] == counts[1]
    assert all(each["repeated"] > 90 for each in counts[0])


def test_contradictions() -> None:
    with pytest.raises(ConfigError, match="listed neurons are read from memory"):
        dataclasses.replace(SEEDS, sparsity=CometConfig(predictors="x"))
    with pytest.raises(ConfigError, match="weights_at_rest: got 'half'"):
        PrivateConfig(weights_at_rest="half")  # type: ignore[arg-type]
    kept = json.loads(json.dumps(SEEDS.to_dict()))
    assert PrivateConfig.from_dict(kept).weights_at_rest == "seeds"
    assert SEEDS.agreement() == RESIDENT.agreement()
