"""Kernels compiled ahead: those that a session uses, by processes that end, and once for all processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from private_llm.config import PrivateConfig
from private_llm.protocols.trio.division import TrioParty
from private_llm.replay import ahead, program_cache
from tests.kernels.test_compiling import CODE, ROOT
from tests.replay.test_programs import CALLS, run, some

USED = """
import gc, sys, torch
from numba.core.dispatcher import Dispatcher
from private_llm_hf import PrivateConfig, patch
from private_llm.replay import ahead
from private_llm.kernels.compiling import CompiledStep
from tests.hf import tiny

def compiled():
    for each in gc.get_objects():
        if isinstance(each, Dispatcher) and each.py_func.__module__.startswith("private_llm."):
            yield from ((each.py_func.__name__, types) for types in each.overloads)
        elif isinstance(each, CompiledStep) and "address" in vars(each):
            yield each._function.__name__, ()

for kernel, types in ahead.jobs(sys.argv[1]):
    _ = kernel.compile(types) if types else kernel.address
before = set(compiled())
ahead._start = lambda protocol: None
with patch(tiny.build("llama"), PrivateConfig(protocol=sys.argv[1])) as private:
    for _ in range(3):
        private.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=3, do_sample=False)
print(sorted(set(compiled()) - before))
"""
HELD = """
from private_llm.replay import ahead
from private_llm.kernels.fields import cpu as trunc
from private_llm.kernels.waves import cpu as waves
def jobs(protocol):
    for kernel in (waves.placed, waves.hidden, trunc.KERNELS["unpack_fields"]):
        yield kernel, ahead._types(kernel)
ahead.jobs = jobs
ahead.main()
"""
COUNTED = f"""
from numba.core import event

class Compilations(event.Listener):
    begun = 0

    def on_start(self, event):
        self.begun += event.data["dispatcher"].py_func.__module__.startswith("private_llm.")

    def on_end(self, event):
        pass

event.register("numba:compile", counted := Compilations())
{CODE}
print(counted.begun)
"""
"""Notes are no count: who waits for another process says so, too."""


def start(code: str, cache: Path | None, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "integrations"))), "OMP_NUM_THREADS": "1"}
    if cache is not None:
        env |= {"XDG_CACHE_HOME": str(cache)}
        env.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_steps_are_compiled_for_protocols_whose_parties_repeat_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: sum(not types for _, types in ahead.jobs(name)) for name in ("trio", "dealer", "quad")}
    assert made["trio"] == made["dealer"] > 10
    assert made["quad"] == 0
    monkeypatch.setattr(TrioParty, "can_repeat", False)
    assert not any(not types for _, types in ahead.jobs("trio"))


@pytest.mark.full
@pytest.mark.parametrize("protocol", ["trio", "dealer", "quad"])
def test_a_session_uses_no_other_kernels(protocol: str) -> None:
    said, _ = start(USED, None, protocol).communicate()
    assert said.strip() == "[]"


@pytest.mark.full
def test_processes_compile_note_that_all_is_kept_and_end(tmp_path: Path) -> None:
    child = start(HELD, tmp_path, "trio", "2")
    assert child.wait() == 0
    assert len([*tmp_path.rglob("*.ahead")]) == 1
    made = {(path.parent.name.partition("_")[0], path.name.partition("-")[0]) for path in tmp_path.rglob("*.nbi")}
    assert {("waves", "cpu.placed"), ("waves", "cpu.hidden"), ("fields", "cpu.unpack_fields")} <= made


@pytest.mark.full
def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    child = start(HELD.replace("ahead.jobs = jobs", "import time; ahead.jobs = lambda _: [(time, (1,))] * 2\n"
                               "time.compile = lambda _: time.sleep(600)"), tmp_path, "trio", "2")  # fmt: skip
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait() == 1
    assert not list(tmp_path.rglob("*.ahead"))


@pytest.mark.full
def test_two_processes_compile_each_kernel_once(tmp_path: Path) -> None:
    """Side by side on an empty folder, with the same results."""
    children = [start(COUNTED, tmp_path) for _ in range(2)]
    (first, *_, one), (second, *_, other) = (child.communicate()[0].split() for child in children)
    assert first == second
    digest, *_, alone = start(COUNTED, tmp_path / "other").communicate()[0].split()
    assert (int(one) + int(other), first) == (int(alone), digest)


def test_a_session_computes_without_programs_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the process that compiles has ended."""
    ended = tmp_path / "ended"
    held = f"import pathlib, time\nwhile not pathlib.Path({str(ended)!r}).exists():\n    time.sleep(0.01)"
    monkeypatch.setattr(ahead, "_CHILD", held)
    monkeypatch.setattr(ahead, "_mark", lambda _: tmp_path / "mark")
    monkeypatch.setattr(program_cache, "are_compiling", ahead.are_compiling)
    ahead._start.__wrapped__("trio")
    _, programs, _ = run(PrivateConfig(), torch.relu, some(1))
    assert [dict(programs[party].counts) for party in range(3)] == [{"plain": CALLS}] * 3
    child = os.fork()
    if child == 0:
        os._exit(ahead.are_compiling())  # a fork has no thread that notes the end
    assert os.waitpid(child, 0)[1] == 0
    ended.touch()
    while ahead.are_compiling():
        time.sleep(0.01)
    _, programs, _ = run(PrivateConfig(), torch.relu, some(1))
    assert programs[0].counts["repeated"] > 0


def test_only_parties_of_this_machine_are_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(ahead, "_start", heard.append)
    hosts = ("127.0.0.1:7000", "127.0.0.1:7001", "127.0.0.1:7002", "127.0.0.1:7003")
    ahead.compile_ahead(PrivateConfig(hosts=hosts))
    ahead.compile_ahead(PrivateConfig(device="cuda"))
    ahead.compile_ahead(PrivateConfig(ring=32, frac_bits=10))
    assert not heard
    ahead.compile_ahead(PrivateConfig())
    ahead.compile_ahead(PrivateConfig(protocol="dealer", party_mode="processes"))
    ahead.compile_ahead(PrivateConfig(hosts=hosts), party=True)
    assert heard == ["trio", "dealer", "trio"]


def test_no_process_starts_where_all_is_kept_or_for_other_protocols(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(ahead.compiling, "FOLDER", tmp_path)
    monkeypatch.setattr(ahead.subprocess, "Popen", refuse)
    monkeypatch.setattr(ahead, "usable_cores", lambda: 2)
    ahead._mark("trio").touch()
    for protocol in ("trio", "plain"):
        ahead._start.__wrapped__(protocol)
    with pytest.raises(AssertionError, match="was started"):
        ahead._start.__wrapped__("dealer")
