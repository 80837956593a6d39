"""Common to all tests: nothing is fetched from the network; without a GPU, Triton kernels run in its interpreter."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
from collections.abc import Callable, Iterator

import pytest

from tests import selection
from tests.forked_scripts import Scripts

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if shutil.which("nvidia-smi") is None:
    # Triton reads it when it is first imported, by whichever test comes first in a process.
    os.environ["TRITON_INTERPRET"] = "1"


gc.disable()  # until all is collected, a third sooner: what is imported stays anyway


_LONG = {"test_scripts_tiny.py", "test_examples.py", "test_attack_scripts.py"}
"""Files that take minutes, and would come last by their names."""


def pytest_addoption(parser: pytest.Parser) -> None:
    selection.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    selection.configure(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files come first: whichever process gets them, the other has all the rest meanwhile."""
    items.sort(key=lambda item: (item.get_closest_marker("real_model") is None, item.path.name not in _LONG))
    selection.select(config, items)


def pytest_collection_finish() -> None:
    gc.freeze()  # to look through all that was imported takes 0.4 s each time
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Libraries count what is left at the end; the report at the terminal imports some that look for it, too."""
    if hasattr(session.config, "workerinput"):
        atexit.register(gc.unfreeze)
    else:
        gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def _programs_from_the_start() -> Iterator[None]:
    """Tests count programs, also where kernels are not kept yet."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("private_llm.replay.program_cache.are_compiling", lambda: False)
        yield


@pytest.fixture(autouse=True, scope="module")
def _threads() -> None:
    """As many threads for every module, its fixtures included: the last bits of trained floats depend on them."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command in this process; its output if it ends with `code` 0, else its errors."""

    from private_llm_cli.app import main

    def call(*arguments: str, code: int = 0, begin: Callable[[], None] = main) -> str:
        monkeypatch.setattr(sys, "argv", ["private-llm", *arguments])
        with pytest.raises(SystemExit) as ended:
            begin()
        out, err = capsys.readouterr()
        assert ended.value.code == code, out + err
        return out if code == 0 else err

    return call


@pytest.fixture(scope="session")
def forked_scripts() -> Iterator[Scripts]:
    """Runs scripts of `scripts/` as forks of one process."""
    scripts = Scripts()
    yield scripts
    scripts.close()
