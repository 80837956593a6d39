"""Nodes of token sharding as ranks of a launcher, on hosts of their own with mutual TLS."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig
from private_llm_hf.client.launch import choose_mode, serve_party

from private_llm.net.authority import make_certificates
from private_llm.net.transport import CLIENT
from private_llm.tls_config import TLSConfig
from private_llm.token_sharding import ShardingPlan
from tests.hf import tiny
from tests.hf.test_remote import free_ports

ROOT = Path(__file__).resolve().parents[3]
PLAN = ShardingPlan(2, 3, 1, accept_weak_plan=True)
IDS = torch.arange(3, 20).view(1, -1)
HOW = {"max_new_tokens": 4, "do_sample": False}

SCRIPT = """
import sys, torch
from private_llm import PrivateConfig
from private_llm.token_sharding.plans import ShardingPlan
from private_llm_hf import AutoPrivateModelForCausalLM

torch.set_num_threads(1)
plan = ShardingPlan(int(sys.argv[2]), 3, 1, accept_weak_plan=True)
config = PrivateConfig(protocol="cascade", plan=plan, party_mode="distributed", timeout_s=60)
model = AutoPrivateModelForCausalLM.from_pretrained(sys.argv[1], config)
tokens = model.generate(input_ids=torch.arange(3, 20).view(1, -1), max_new_tokens=4, do_sample=False)
print("tokens", tokens[0].tolist(), flush=True)
model.close()
"""


def start(*command: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def wanted() -> torch.Tensor:
    return tiny.build("llama").generate(IDS, **HOW)


# -- launchers -----------------------------------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "alpha"),
    [
        (["torch.distributed.run", "--standalone", "--nproc-per-node", "6"], "2"),
        (["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"], "1"),
    ],
    ids=["torchrun, a rank for the client", "accelerate, client beside CompNode 0"],
)
def test_ranks_of_a_launcher(
    checkpoint: Path, wanted: torch.Tensor, tmp_path: Path, launcher: list[str], alpha: str
) -> None:
    """Five nodes and a rank for the client, or two nodes and the client in the process of the first."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    out, err = start(*launcher, str(script), str(checkpoint), alpha).communicate(timeout=180)
    assert out.count("tokens [") == 1, err[-2000:]
    assert out.strip().splitlines()[-1] == f"tokens {wanted[0].tolist()}"


def test_a_launcher_is_recognised_by_the_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = PrivateConfig(protocol="cascade", plan=PLAN)
    monkeypatch.setenv("RANK", "0")
    for world, mode in (("3", "threads"), ("5", "distributed"), ("6", "distributed"), ("7", "threads")):
        monkeypatch.setenv("WORLD_SIZE", world)
        assert choose_mode(config) == mode


# -- hosts ------------------------------------------------------------------------------------------------------------
def endpoints(folder: Path, plan: ShardingPlan = PLAN, **more: object) -> dict[int, PrivateConfig]:
    """A configuration for each node and the client, with certificates in `folder`."""
    settings = PrivateConfig.from_dict({"protocol": "cascade", "plan": plan, "timeout_s": 20.0, **more})
    tls: dict[int, TLSConfig] = make_certificates(folder, settings.endpoints)
    shared = replace(settings, party_mode="remote", hosts=free_ports(settings.endpoints))
    return {endpoint: replace(shared, tls=mine) for endpoint, mine in tls.items()}


@contextmanager
def serving(
    configs: dict[int, PrivateConfig], sessions: int = 1, checkpoints: Sequence[str | None] = ()
) -> Iterator[dict[int, list[str]]]:
    """`private-llm party` loops as threads with sockets; yields what each node reports."""
    lines: dict[int, list[str]] = {number: [] for number in configs if number != CLIENT}
    own = dict(enumerate(checkpoints))
    threads = [
        threading.Thread(target=serve_party, args=(configs[n], n, None, sessions, said.append, own.get(n)), daemon=True)
        for n, said in lines.items()
    ]
    for thread in threads:
        thread.start()
    yield lines
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def test_nodes_on_hosts_with_mutual_tls_serve_one_client_after_the_other(
    tmp_path: Path, checkpoint: Path, wanted: torch.Tensor
) -> None:
    configs = endpoints(tmp_path / "certs")
    with serving(configs, sessions=2) as lines:
        for _ in range(2):
            with AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), configs[CLIENT]) as private:
                assert torch.equal(private.generate(IDS, **HOW), wanted)
    assert lines[1][0].startswith("CompNode 1 (party 1) waits for the others at 127.0.0.1:")
    assert lines[3][0].startswith("AttnNode (0, 1) (party 3) waits")
    assert all(said[-1] == "session 2 ended" for said in lines.values())


def test_a_split_on_hosts(tmp_path: Path, checkpoint: Path, wanted: torch.Tensor) -> None:
    """Three parties for the first layer, then five nodes, numbered after them."""
    configs = endpoints(tmp_path, protocol="trio", split=1)
    with (
        serving(configs) as lines,
        AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), configs[CLIENT]) as private,
    ):
        assert torch.equal(private.generate(IDS, **HOW), wanted)
    assert lines[2][0].startswith("party 2 waits for the others")
    assert lines[3][0].startswith("CompNode 0 (party 3) waits for the others")
    assert lines[7][-1] == "session 1 ended"
