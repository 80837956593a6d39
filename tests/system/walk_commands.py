"""How `walk_deploy.py` runs `private-llm` at a place: as a program of its own, or as a fork of this process.

A program of its own is what operators have; it imports PyTorch and more each time, which takes seconds. A fork finds
all that imported and runs the same command line: for short walks.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Protocol

PRIVATE_LLM = (sys.executable, "-m", "private_llm")
_CLONE_NEWNET = 0x40000000
_IMPORTS = (
    "private_llm_cli.app", "private_llm_hf.api",
    "private_llm_cli.commands.parties", "private_llm_cli.commands.certs", "private_llm_hf.service.party_service",
    "transformers.models.opt.modeling_opt",
)  # fmt: skip


class Running(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int:
        """Its number."""

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""

    def kill(self) -> None:
        """SIGKILL."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code once it has ended. Raises subprocess.TimeoutExpired."""


@dataclass(frozen=True)
class Commands:
    """Starts commands. forks: as forks of this process, which must have no threads that hold locks."""

    forks: bool = False

    def prepare(self) -> None:
        """Import what the commands will want."""
        for name in _IMPORTS if self.forks else ():
            importlib.import_module(name)

    def start(self, namespace: str | None, home: Path, words: list[str], out: IO[bytes], err: IO[bytes]) -> Running:
        """`private-llm WORDS` in a network namespace (None: this one) and a folder."""
        if self.forks:
            return Fork(namespace, home, partial(_command_line, words), out, err)
        prefix = [] if namespace is None else ["ip", "netns", "exec", namespace]
        return subprocess.Popen([*prefix, *PRIVATE_LLM, *words], cwd=home, stdout=out, stderr=err)


class Fork:
    """A child of this process that does something in a network namespace and a folder."""

    def __init__(
        self, namespace: str | None, home: Path, work: Callable[[], None], out: IO[bytes], err: IO[bytes]
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_run, args=(namespace, home, work, out.fileno(), err.fileno()))
        self._process.start()

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid or 0

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code once it has ended. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a fork of this process", timeout or 0.0)
        return code


def _run(namespace: str | None, home: Path, work: Callable[[], None], out: int, err: int) -> None:
    if namespace is not None:
        with open(f"/run/netns/{namespace}", "rb") as found:
            if ctypes.CDLL(None, use_errno=True).setns(found.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
    os.chdir(home)
    os.dup2(out, 1)
    os.dup2(err, 2)
    work()


def _command_line(words: list[str]) -> None:
    sys.argv = ["private-llm", *words]
    importlib.import_module("private_llm_cli.app").main()
