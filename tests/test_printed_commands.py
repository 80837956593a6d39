"""The commands that README and docs print run as they are printed, each page's in one folder, in order.

A hub's model is the bundled one, hosts are ports of this machine, and named texts are short ones.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import pytest

from private_llm.net.addresses import open_listeners
from tests.forked_scripts import Scripts
from tests.test_docs import PAGES, ROOT, blocks

MODEL = str(resources.files("private_llm_hf").joinpath("demo_model"))
HOSTS = "a:7000,b:7000,c:7000"
BENCH = "python scripts/bench/run.py "
TEXTS = ("notes.txt", "a.txt", "b.txt", "unseen.txt")
ELSEWHERE = {
    "# at ": "tests/system/walk_deploy.py runs the operators' guide, whose blocks begin so",
    "gpu.md": "needs GPUs",
    "private-llm party --index": "started below, whatever the page's index, where a page has `share` before it",
    "private-llm certs --out certs --protocol cascade": "tests/cli/test_nodes.py starts nodes",
    'private-llm generate facebook/opt-125m --prompt "..." --protocol cascade': "tests/cli/test_nodes.py starts nodes",
    "private-llm gateway": "tests/gateway/test_started_parties.py starts gateways, which serve until they are stopped",
    "private-llm classify microsoft/resnet-18": "weights that no package carries",
    "private-llm generate folder --gguf-file": "tests/cli/test_checkpoints.py makes such a file",
}  # fmt: skip
"""Pages, and beginnings of blocks and of commands, that something else runs, and what."""


def printed(page: Path) -> list[str]:
    """`private-llm` commands and benchmarks of a page that run here."""
    here = [block for block in blocks(page, "bash") if not block.startswith("# at ")]
    lines = [line.split(" #")[0].strip() for block in here for line in block.splitlines()]
    found = [line for line in lines if line.startswith(("private-llm ", BENCH))]
    return [line for line in dict.fromkeys(found) if not any(line.startswith(start) for start in ELSEWHERE)]


def with_commands() -> list[Path]:
    return [page for page in PAGES if page.name not in ELSEWHERE and printed(page)]


@contextmanager
def parties(folder: Path, hosts: str) -> Iterator[None]:
    """Of the shares and certificates that a page's commands have made."""
    started = []
    for index in range(3):
        words = ["party", "--index", str(index), "--hosts", hosts, "--tls", "certs"]
        words += ["--shares", f"shares/party{index}.safetensors"]
        with (folder / f"party {index}").open("wb") as log:
            command = [sys.executable, "-m", "private_llm", *words]
            started.append(subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=Scripts().env))
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def free_hosts() -> str:
    listeners = open_listeners(3)
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ",".join(f"127.0.0.1:{port}" for port in ports)


@pytest.mark.full
@pytest.mark.parametrize("page", with_commands(), ids=lambda page: page.name)
def test_printed_commands_run(page: Path, tmp_path: Path, forked_scripts: Scripts) -> None:
    source = resources.files("private_llm_hf").joinpath("data", "shakespeare.txt").read_text("utf-8")
    for number, name in enumerate(TEXTS):
        (tmp_path / name).write_text(source[20_000 * number : 20_000 * (number + 1)], "utf-8")
    hosts = free_hosts()
    for line in printed(page):
        text = re.sub("facebook/opt-125m|integrations/private_llm_hf/demo_model", MODEL, line)
        script = ROOT / "scripts/bench/run.py" if line.startswith(BENCH) else ROOT / "private_llm/__main__.py"
        words = shlex.split(text.removeprefix(BENCH).removeprefix("private-llm ").replace(HOSTS, hosts))
        began = time.monotonic()
        if "--hosts" in words:
            with parties(tmp_path, hosts):
                code, out, err = forked_scripts.run(script, tmp_path, *words)
        else:
            code, out, err = forked_scripts.run(script, tmp_path, *words)
        print(f"{time.monotonic() - began:.1f} s: {line}")
        assert code == 0, f"{line}\n{out[-1500:]}\n{err[-1500:]}"


def test_what_runs_elsewhere_is_still_printed() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    names = {page.name for page in PAGES}
    assert not [
        start for start in ELSEWHERE if start not in names and not re.search(rf"^{re.escape(start)}", text, re.M)
    ]
