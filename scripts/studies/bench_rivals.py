"""Ratios against CrypTen, both libraries measured in this run on this machine.

    python scripts/studies/bench_rivals.py            the usual shapes (about a minute)
    python scripts/studies/bench_rivals.py --tiny     smallest shapes

CrypTen is optional: `pip install --no-deps crypten && pip install omegaconf`. Its converter of ONNX models does not
load on current PyTorch; this script leaves it out, as no model is converted here. CrypTen runs two processes with its
default provider of correlated randomness (one of the two parties, which is not secure); the traffic of a real dealer
would come on top of the bytes that are printed.
"""

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import scripts_folder  # noqa: F401 - finds `bench`
import torch
from bench.catalogue import make
from bench.measure import measure
from bench.work import Work
from torch import Tensor

from private_llm.config import PrivateConfig

WORKS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "relu": lambda x: x[0].relu(),
    "mul": lambda x: x[0] * x[1],
    "matmul": lambda x: x[0].matmul(x[1]),
    "softmax": lambda x: x[0].softmax(-1),
}
"""What CrypTen does with the same inputs."""
_LIMIT_S = 300.0


def crypten() -> Any:  # noqa: ANN401 - a module without types
    """CrypTen without its model converter."""
    stub = types.ModuleType("crypten.nn.onnx_converter")
    for name in ("from_pytorch", "from_tensorflow", "from_onnx", "TF_AND_TF2ONNX"):
        setattr(stub, name, None)
    sys.modules["crypten.nn.onnx_converter"] = stub
    import crypten as module

    return module


def worker(tiny: bool, repeat: int) -> None:
    """One of CrypTen's two parties; rank 0 prints a row for each work."""
    library = crypten()
    library.cfg.communicator.verbose = True  # counts bytes
    library.init()
    torch.set_num_threads(1)
    link = library.comm.get()
    for name, run in WORKS.items():
        work = make(name, tiny=tiny)
        if not isinstance(work, Work):
            raise SystemExit(f"{name} is no work on single tensors")
        values = work.values()
        shared = [library.cryptensor(value.to(torch.float32), src=0) for value in values]
        times = []
        for _ in range(repeat + 1):
            link.reset_communication_stats()
            link.barrier()
            started = time.perf_counter()
            result = run(shared)
            link.barrier()
            times.append(time.perf_counter() - started)
        sent = torch.tensor([float(link.comm_bytes)])
        torch.distributed.all_reduce(sent)
        sent /= 2  # CrypTen books a message at both ends (its own note in communicator.py)
        plain: Tensor = result.get_plain_text()
        if link.get_rank() == 0:
            error = float((plain.double() - work.truth(values, {})).abs().max())
            row = {"name": name, "seconds": statistics.median(times[1:]), "bytes_total": int(sent), "error_max": error}
            print(json.dumps(row), flush=True)


def run_crypten(tiny: bool, repeat: int) -> list[dict[str, Any]]:
    """Both parties as processes; the rows of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **os.environ, "WORLD_SIZE": "2", "RENDEZVOUS": "env://", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "DISTRIBUTED_BACKEND": "gloo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, "--worker", "--repeat", str(repeat), *(["--tiny"] if tiny else [])]
    parties = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    limit = threading.Timer(_LIMIT_S, lambda: [party.kill() for party in parties])
    limit.start()
    rows = []
    for line in parties[0].stdout or ():
        if line.startswith("{"):
            rows.append(json.loads(line))
        if len(rows) == len(WORKS):
            break  # CrypTen's threads may abort or hang when its processes end, so they are not waited for
    limit.cancel()
    for party in parties:
        party.kill()
        party.wait()
    if len(rows) != len(WORKS):
        raise SystemExit(f"CrypTen failed or took more than {_LIMIT_S:g} s; its own message is above")
    return rows


def main() -> int:
    """Measure CrypTen, then this library, and print one JSON object per work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("crypten") is None:
        print("CrypTen is not installed here: pip install --no-deps crypten && pip install omegaconf")
        return 0
    if options.worker:
        worker(options.tiny, options.repeat)
        return 0
    for theirs in run_crypten(options.tiny, options.repeat):
        ours = measure(make(theirs["name"], tiny=options.tiny), PrivateConfig(party_mode="processes"), options.repeat)
        print(
            json.dumps(
                {
                    "name": theirs["name"], "shape": ours.shape, "crypten": theirs,
                    "private_llm": {
                        "seconds": ours.seconds["median"], "bytes_total": ours.bytes_total, "error_max": ours.error_max,
                    },
                    "times_faster": theirs["seconds"] / ours.seconds["median"],
                    "times_fewer_bytes": theirs["bytes_total"] / ours.bytes_total,
                }
            ),
            flush=True,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
