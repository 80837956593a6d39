"""Peak memory and time of each party that holds a share file, with weights in memory, as seeds, or on disk.

python tests/system/measure_memory.py  OPT-1.3B shapes, layers from disk (21 GB of disk)
python tests/system/measure_memory.py --layers 1 --vocabulary 512 --map cpu --seq 128  fewer layers, all in memory
python tests/system/measure_memory.py --map cpu --at-rest seeds  OPT-1.3B in 24 GiB of memory: masks stay seeds
python tests/system/measure_memory.py --tiny                                           a small model, in seconds

Weights are random numbers in the model's public shapes. Parties are processes of `private-llm party`; a figure is the
kernel's own peak of a process's resident memory (VmHWM), read after loading and after a generation. Times are the least
of some repetitions, by the clock, and in seconds of processor time of each party's process, which a busy machine
changes less.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from private_llm_hf import AutoPrivateModelForCausalLM
from private_llm_hf.checkpoint.model_spec import describe
from private_llm_hf.checkpoint.share_files import ShareWriter, share_path
from private_llm_hf.checkpoint.weights import WeightList, skeleton
from process_memory import process_mb
from transformers import OPTConfig, OPTForCausalLM

from private_llm.config import PrivateConfig
from private_llm.protocols.weight_sharing import keys_held, sends_parts

OPT_1_3B = {"hidden_size": 2048, "ffn_dim": 8192, "num_attention_heads": 32, "word_embed_proj_dim": 2048}
TINY = {
    "hidden_size": 64, "ffn_dim": 256, "num_attention_heads": 4, "word_embed_proj_dim": 64, "vocab_size": 256,
    "max_position_embeddings": 64,
}  # fmt: skip


def make_files(folder: Path, config: OPTConfig) -> int:
    """Share files of random weights, and the client's folder; returns the number of weights."""
    wanted = WeightList.of(skeleton(OPTForCausalLM, config))
    with ShareWriter(folder, PrivateConfig(), describe(OPTForCausalLM, config), wanted) as writer:
        for name, shape in wanted.shapes.items():
            writer(name, torch.empty(shape).normal_(0.0, 0.02))
    config.architectures = ["OPTForCausalLM"]
    config.save_pretrained(folder / "client")
    return sum(math.prod(shape) for shape in wanted.shapes.values())


def free_hosts(count: int) -> list[str]:
    """Loopback addresses that nobody uses."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    hosts = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return hosts


@contextmanager
def parties(
    folder: Path, hosts: list[str], device_map: str, at_rest: str, patience_s: float
) -> Iterator[list[int]]:  # fmt: skip
    """One process per party; yields their numbers."""
    command = [sys.executable, "-c", "from private_llm_cli.app import main; main()", "party", "--allow-plain-loopback"]
    command += ["--sessions", "1", "--timeout", str(patience_s), "--device-map", device_map, "--hosts", ",".join(hosts)]
    command += ["--weights-at-rest", at_rest]
    running = [
        subprocess.Popen([*command, "--index", str(party), "--shares", str(share_path(folder, party))])
        for party in range(3)
    ]
    try:
        yield [process.pid for process in running]
        for process in running:
            process.wait(60)
    finally:
        for process in running:
            process.kill()
            process.wait()


def processor_s(process: int) -> float:
    """Seconds that a process has computed so far."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(model: Any, processes: list[int], ids: torch.Tensor, new: int) -> list[float]:
    """Seconds by the clock, and of each process, for a generation of `new` tokens."""
    before, start = [processor_s(process) for process in processes], time.monotonic()
    model.generate(input_ids=ids, min_new_tokens=new, max_new_tokens=new, do_sample=False, pad_token_id=1)
    clock = time.monotonic() - start
    return [clock, *(processor_s(process) - began for process, began in zip(processes, before, strict=True))]


def prompt_and_token(
    model: Any, processes: list[int], ids: torch.Tensor, new: int, repeat: int
) -> list[tuple[float, float]]:  # fmt: skip
    """Least seconds for a prompt with its first token, and for each further token: by the clock, then by process."""
    firsts = [timed(model, processes, ids, 1) for _ in range(repeat)]
    wholes = [timed(model, processes, ids, 1 + new) for _ in range(repeat)]
    pairs = zip(zip(*firsts, strict=True), zip(*wholes, strict=True), strict=True)
    return [(min(first), (min(whole) - min(first)) / new) for first, whole in pairs]


def measure(
    folder: Path, config: OPTConfig, device_map: str, at_rest: str, sequence: int, new: int, repeat: int
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One row per party."""
    patience_s = 120 + 30 * config.num_hidden_layers  # parties check their files before they listen
    start = time.monotonic()
    weights = make_files(folder, config)
    row: dict[str, Any] = {"name": "memory", "device_map": device_map, "weights_at_rest": at_rest}
    row |= {"layers": config.num_hidden_layers, "load_average": os.getloadavg()[0]}
    row |= {"weights": weights, "tokens": sequence, "seconds_sharing": round(time.monotonic() - start, 1)}
    hosts = free_hosts(3)
    client = PrivateConfig(party_mode="remote", hosts=tuple(hosts), allow_plain_loopback=True, timeout_s=patience_s)
    with parties(folder, hosts, device_map, at_rest, patience_s) as processes:
        start = time.monotonic()
        with AutoPrivateModelForCausalLM.from_pretrained(str(folder / "client"), client) as model:
            row["seconds_loading"] = round(time.monotonic() - start, 1)
            loaded = [process_mb(process, "VmHWM") for process in processes]
            ids = torch.arange(5, 5 + sequence)[None]
            row["seconds_two_tokens"] = round(timed(model, processes, ids, 2)[0], 1)
            (prompt, token), *own = prompt_and_token(model, processes, ids, new, repeat)
            row |= {"seconds_prompt": round(prompt, 3), "seconds_token": round(token, 3)}
            peaks = [process_mb(process, "VmHWM") for process in processes]
    for party in range(3):
        parts = (0 if at_rest == "seeds" else keys_held(client, party)) + sends_parts(client, party)
        held = parts * weights * 8 / 1e6
        prompt, token = own[party]
        yield {
            **row, "party": party, "share_file_mb": round(share_path(folder, party).stat().st_size / 1e6, 1),
            "held_mb": round(held, 1), "peak_loading_mb": round(loaded[party], 1), "peak_mb": round(peaks[party], 1),
            "peak_by_ring_size": round(peaks[party] / (weights * 8 / 1e6), 3),
            "processor_seconds_prompt": round(prompt, 3), "processor_seconds_token": round(token, 3),
        }  # fmt: skip


def main() -> None:
    """Print one JSON object per party."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--map", default="disk", help="'disk', 'cpu', or any --device-map of private-llm party")
    parser.add_argument("--at-rest", default="resident", help="--weights-at-rest of private-llm party")
    parser.add_argument("--new", type=int, default=2, help="tokens to time behind the first one")
    parser.add_argument("--repeat", type=int, default=1, help="repetitions of times")
    parser.add_argument("--layers", type=int, default=24, help="decoder layers")
    parser.add_argument("--vocabulary", type=int, default=50272, help="tokens in the tied table")
    parser.add_argument("--seq", type=int, default=8, help="tokens of the prompt")
    parser.add_argument("--folder", type=Path, help="where the share files go (default: a temporary folder)")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    given = parser.parse_args()
    large = {"num_hidden_layers": given.layers, **OPT_1_3B, "vocab_size": given.vocabulary}
    shape = {"num_hidden_layers": 2, **TINY} if given.tiny else large
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        asked = given.map, given.at_rest, given.seq, given.new, given.repeat
        for row in measure(Path(folder), OPTConfig(**shape), *asked):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
