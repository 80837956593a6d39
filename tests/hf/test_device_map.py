"""Whole sessions whose parties keep layers on disk, each party as it likes: the same tokens, messages and rounds."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from private_llm_cli.commands.parties import devices
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig, patch
from private_llm_hf.api import share_checkpoint
from private_llm_hf.checkpoint.offload import OffloadFile
from private_llm_hf.checkpoint.share_files import share_path
from private_llm_hf.client.launch import serve_party

from private_llm.errors import ConfigError, PrivateLLMError, ShareFileError
from tests.hf import tiny
from tests.hf.compare import BATCH
from tests.hf.conftest import TRIO
from tests.hf.test_remote import free_ports

GREEDY = {"max_new_tokens": 4, "do_sample": False}


def placed(tmp_path: Path, device_map: object, **settings: Any) -> PrivateConfig:
    return dataclasses.replace(TRIO, device_map=device_map, offload_folder=str(tmp_path), **settings)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device_map", [{"": "disk"}, {"": "cpu", "model.layers.1": "disk"}, "auto"])
def test_the_same_tokens_messages_and_rounds(tmp_path: Path, device_map: object) -> None:
    model = tiny.build("llama")
    with patch(model, TRIO) as private:
        private.generate(**BATCH, **GREEDY)
        usual = private.cost()
    with patch(model, placed(tmp_path, device_map)) as private:
        assert list(tmp_path.iterdir()) == []  # the files have no names
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))
        assert private.cost().ledgers[1].sent == usual.ledgers[1].sent
        assert private.cost().ledgers[1].rounds == usual.ledgers[1].rounds


def test_a_plan_within_a_small_memory(tmp_path: Path) -> None:
    model = tiny.build("opt")
    config = placed(tmp_path, "auto", max_memory={"cpu": "1MB"})
    with patch(model, config) as private:
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))


@pytest.mark.full
def test_processes_and_public_weights(tmp_path: Path) -> None:
    """The map reaches child processes as JSON."""
    model = tiny.build("opt")
    config = placed(tmp_path, {"": "disk"}, party_mode="processes", weights="public")
    with patch(model, config) as private:
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))


def test_each_party_places_its_own_layers(tmp_path: Path) -> None:
    """Share files as the disk; party 0 keeps all in memory, party 1 nothing, party 2 one layer."""
    model = tiny.build("llama")
    model.save_pretrained(tmp_path / "checkpoint")
    share_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "shared", TRIO)
    client = PrivateConfig(party_mode="remote", hosts=free_ports(3), allow_plain_loopback=True, timeout_s=60)
    maps = (None, {"": "disk"}, {"": "disk", "model.layers.0": "cpu"})
    threads = [
        threading.Thread(
            target=serve_party,
            args=(dataclasses.replace(client, device_map=where), party, share_path(tmp_path / "shared", party), 1),
            daemon=True,
        )
        for party, where in enumerate(maps)
    ]
    for thread in threads:
        thread.start()
    with AutoPrivateModelForCausalLM.from_pretrained(str(tmp_path / "shared" / "client"), client) as private:
        assert torch.equal(private.generate(**BATCH, **GREEDY), model.generate(**BATCH, **GREEDY))
    for thread in threads:
        thread.join(20)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_map": {"": "disk"}}, "offload_folder"),
        ({"device_map": {"": "disk"}, "offload_folder": "/nowhere/at/all"}, "No such file"),
        ({"device_map": {"": "cpu", "model.layer": "cpu"}}, "no module model.layer"),
        ({"device_map": "auto", "max_memory": {"cpu": "much"}}, "max_memory"),
    ],
)
def test_maps_that_parties_refuse_are_told_to_the_client(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivateLLMError, match=message):
        patch(tiny.build("llama"), dataclasses.replace(TRIO, **settings))


# -- the file -----------------------------------------------------------------------------------------------------
def test_an_offload_file_returns_what_it_was_given(tmp_path: Path) -> None:
    file = OffloadFile(str(tmp_path))
    given = {"a": torch.arange(7).view(7, 1), "none": torch.empty(0, 3), "b": torch.tensor([-1, 2**31 - 1]).int()}
    for name, tensor in given.items():
        file.write(name, tensor)
    for name in ("b", "a", "none", "a"):
        found = file.read(name)
        assert found is not None
        assert found.dtype == given[name].dtype
        assert torch.equal(found, given[name])
    assert file.read("missing") is None


def test_an_offload_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    file = OffloadFile(str(tmp_path))
    file.write("a", torch.arange(100))
    os.ftruncate(file._file.fileno(), 99 * 8)
    with pytest.raises(ShareFileError, match="shorter"):
        file.read("a")


# -- settings -----------------------------------------------------------------------------------------------------
def test_maps_survive_json_and_are_not_agreed_upon() -> None:
    config = PrivateConfig(device_map={"": 0, "lm_head": "cuda:1", "model": "disk"}, device="cuda")
    assert config.device_map == {"": "cuda:0", "lm_head": "cuda:1", "model": "disk"}
    planned = PrivateConfig(device_map="auto", max_memory={0: "10GB", "cpu": 5}, offload_folder="x")
    for each in (config, planned):
        assert PrivateConfig.from_dict(json.loads(json.dumps(each.to_dict()))) == each
        assert each.agreement() == PrivateConfig().agreement()
        hash(each)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "want 'cpu', 'cuda'"),
        ({"device": "disk"}, "want 'cpu', 'cuda'"),
        ({"device_map": "quickly"}, "balanced_low_0"),
        ({"device_map": {"": "mps"}}, "got device 'mps'"),
        ({"device_map": {"": -1}}, "got device -1"),
        ({"device_map": {"": True}}, "got device True"),
        ({"device_map": "auto", "max_memory": {"disk": 5}}, "got device 'disk'"),
        ({"device_map": {"": "cpu"}, "max_memory": {"cpu": 5}}, "planned"),
    ],
)
def test_devices_that_do_not_exist_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrivateConfig.from_dict(settings)


# -- the command line ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", None),
        ("disk", {"": "disk"}),
        ("cuda:1", {"": "cuda:1"}),
        ("auto", "auto"),
        ('{"": 0, "lm_head": "cpu"}', {"": "cuda:0", "lm_head": "cpu"}),
    ],
)
def test_the_party_command_reads_maps(text: str, wanted: object) -> None:
    config = PrivateConfig(**devices("cuda:1", text, "", "folder"))
    assert (config.device, config.device_map, config.offload_folder) == ("cuda:1", wanted, "folder")


def test_the_party_command_reads_memory_limits() -> None:
    assert PrivateConfig(**devices("cpu", "auto", '{"0": "1GB", "cpu": 7}', None)).max_memory == {
        "cuda:0": "1GB",
        "cpu": 7,
    }


@pytest.mark.parametrize(("device_map", "max_memory"), [("{", ""), ("auto", "[1]"), ("auto", "4GB"), ("fast", "")])
def test_the_party_command_refuses_other_text(device_map: str, max_memory: str) -> None:
    with pytest.raises(ConfigError):
        PrivateConfig(**devices("cpu", device_map, max_memory, None))
