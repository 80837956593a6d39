"""One process per party over torch.distributed, as launchers start them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError
from private_llm.net.distributed import DistMesh
from private_llm.net.transport import CLIENT

from .mesh import process_context
from .ranks import child

SCRIPT = Path(__file__).with_name("ranks.py")
ROOT = SCRIPT.parents[2]
ALL_BYTES = 3 * (8 + 60 + 4031 + 4032 + 4033 + 8 * 1001000)


def environment(**more):
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    kept = {key: value for key, value in os.environ.items() if key not in names}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | more


def lines(output):
    found = [json.loads(line[line.index("{") :]) for line in output.splitlines() if '{"endpoint"' in line]
    return {entry["endpoint"]: entry["result"] for entry in found}


def ranks(what, world=4, timeout=30.0, lost=(), **more):
    """Start `world` processes without a launcher; results by endpoint, except of `lost` ranks."""
    context = process_context()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pipes, processes, results = [], [], {}
    try:
        for rank in range(world):
            env = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env = {key: str(value) for key, value in env.items()} | {"GLOO_SOCKET_IFNAME": "lo"} | more
            near, far = context.Pipe()
            processes.append(context.Process(target=child, args=(env, what, timeout, far), daemon=True))
            processes[-1].start()
            pipes.append(near)
        for rank, pipe in enumerate(pipes):
            if rank not in lost:
                assert pipe.poll(90), f"rank {rank} hangs"
                got = pipe.recv()
                results |= got if isinstance(got, dict) else {f"rank {rank}": got}
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results


def test_every_endpoint_has_a_rank():
    totals = ranks("everything_to_everybody")
    assert totals == {0: ALL_BYTES, 1: ALL_BYTES + (64 << 20), 2: ALL_BYTES + (64 << 20), CLIENT: ALL_BYTES}


@pytest.mark.full
def test_torchrun_with_the_client_in_the_process_of_party_0():
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
        str(SCRIPT),
    ]
    done = subprocess.run(
        [*command, "everything_to_everybody", "30"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert lines(done.stdout) == {
        0: ALL_BYTES,
        1: ALL_BYTES + (64 << 20),
        2: ALL_BYTES + (64 << 20),
        CLIENT: ALL_BYTES,
    }, done.stderr[-2000:]


def test_accelerates_debug_launcher():
    command = [sys.executable, str(SCRIPT), "debug_launcher"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert sorted(lines(done.stdout)) == [0, 1, 2, CLIENT], done.stderr[-2000:]


def test_disagreement_is_an_error_everywhere():
    results = ranks("disagreement")
    assert results[2].startswith("TransportError: party 2: from party 1: got 'mul' with 3 x int64; want")
    for me in (0, 1, CLIENT):
        assert results[me] == results[2].replace("TransportError", "PartyFailed")
    assert "4242424242" not in results[2]


def test_a_killed_process_is_named_everywhere():
    results = ranks("one_is_killed", lost=[2])
    assert set(results) == {0, 1, CLIENT}
    assert set(results.values()) == {results[1]}
    assert results[1] == (
        "PartyFailed: party 1: party 2 stopped: its connection closed, while 'mul' of party 2 was awaited; "
        "restart the session"
    )


def test_a_silent_process_stops_everybody():
    results = ranks("one_is_silent", timeout=2.0, lost=[2])
    assert set(results) == {0, 1, CLIENT}
    assert set(results.values()) == {results[1]}
    assert "was silent for 2 s" in results[1]


def test_a_reason_reaches_everybody():
    results = ranks("one_gives_up")
    assert results == {2: None, **dict.fromkeys([0, 1, CLIENT], "PartyFailed: layer 3 overflowed")}


@pytest.mark.parametrize("network", ["trusted", "not trusted"])
def test_ranks_on_several_machines(network):
    results = ranks("everything_to_everybody", APART=network)
    if network == "trusted":
        assert sorted(results) == [0, 1, 2, CLIENT]
        assert results[0] == ALL_BYTES
    else:
        assert all("ConfigError: the ranks run on several machines" in text for text in results.values())


def test_without_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: start one process"):
        DistMesh(PrivateConfig())


@pytest.mark.parametrize("world", [1, 2])
def test_a_wrong_number_of_ranks(world):
    results = ranks("everything_to_everybody", world)
    assert len(results) == world
    for text in results.values():
        assert f"ConfigError: ranks: got {world}; want 4 (parties and client) or 3" in text
