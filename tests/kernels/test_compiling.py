"""Kernels on disk: the next process finds them, with the same results, and never those of other sources."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from private_llm.kernels import compiling, steps
from private_llm.kernels.bits import cpu as cpu_bits

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import hashlib
import numpy as np
import torch
from private_llm.kernels import compiling, ops
from private_llm.kernels.compile_note import shown_by
from private_llm.kernels.bits import cpu as cpu_bits
heard = []
draw = torch.Generator().manual_seed(7)
def word(*shape):
    return torch.randint(-(2**62), 2**62, shape, generator=draw)
made = []
with shown_by(heard.append):
    for rows in (1, 5):  # register tiles along either dimension, and the tiles of processors that have some
        made += [ops.ring_matmul(word(rows, 70), word(70, 33)), ops.ring_matmul(word(rows, 70), word(33, 70).mT)]
    made += [ops.ring_matmul(word(130, 300), word(300, 70)), ops.transpose_bits(word(130), 64)]
    made += [ops.trunc_open(word(130), word(130), word(130), word(130), 18, 18)[0]]
    made += [ops.ring_conv2d(word(1, 3, 9, 9), word(4, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1)]
digest = hashlib.sha256()
for tensor in made:
    digest.update(tensor.contiguous().numpy().tobytes())
stats = cpu_bits.transpose_bits.stats
print(digest.hexdigest(), len(heard), sum(stats.cache_hits.values()), compiling.FOLDER)
"""
SHIFTED = """
import numpy as np
import torch
from private_llm.kernels.bits import cpu as cpu_bits
x, out = torch.arange(65), torch.zeros(65, dtype=torch.int64)
cpu_bits.transpose_bits(x.data_ptr(), out.data_ptr(), 64, 64, np.uint64(0), 1, 0, 1)
print(int(out[0]) == 0)
"""


def run(code: str, cache: Path | None, root: Path = ROOT) -> list[str]:
    """What a process prints that keeps kernels in `cache`; None: nowhere, and it has no home."""
    hidden = {"NUMBA_CACHE_DIR", "XDG_CACHE_HOME"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    env |= {"HOME": "/dev/null"} if cache is None else {"XDG_CACHE_HOME": str(cache)}
    made = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    return made.stdout.split()


@pytest.mark.full
def test_kernels_from_disk_give_the_same_bits(tmp_path: Path) -> None:
    """Compiled now, read from disk, and compiled by a process that can write nowhere."""
    digest, compilations, hits, folder = run(CODE, tmp_path)
    assert int(compilations) > 5
    assert hits == "0"
    assert Path(folder).is_relative_to(tmp_path)
    assert run(CODE, tmp_path) == [digest, "0", "1", folder]
    assert run(CODE, None) == [digest, compilations, "0", "None"]


@pytest.mark.full
def test_old_code_is_not_used_when_a_helper_in_another_file_has_changed(tmp_path: Path) -> None:
    """`flat` gives kernels their arrays; a changed one that begins a word later must show in `transpose_bits`."""
    root = tmp_path / "sources"
    shutil.copytree(ROOT / "private_llm", root / "private_llm", ignore=shutil.ignore_patterns("__pycache__"))
    assert run(SHIFTED, tmp_path / "cache", root) == ["False"]
    helper = root / "private_llm/kernels/address.py"
    old = "builder.inttoptr(place, made.data.type)"
    text = helper.read_text()
    assert text.count(old) == 1
    helper.write_text(text.replace(old, "builder.inttoptr(builder.add(place, place.type(8)), made.data.type)"))
    assert run(SHIFTED, tmp_path / "cache", root) == ["True"]


UNKEPT = """
import errno
from private_llm.kernels import compiling
from private_llm.kernels.bits import cpu as cpu_bits
from private_llm.kernels import steps

def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

if compiling.FOLDER is not None:
    from numba.core.caching import IndexDataCacheFile
    IndexDataCacheFile.save = full
exec(open("{shifted}").read())
print(steps.gather.address > 0, steps.combine.address > 0)
"""


@pytest.mark.full
@pytest.mark.parametrize("where", ["nowhere", "full"])
def test_kernels_that_cannot_be_kept_are_compiled_with_one_warning(where: str, tmp_path: Path) -> None:
    """It names the folder and what to set, whether that cannot be written from the beginning or later."""
    shifted, told = tmp_path / "shifted.py", tmp_path / "told"
    shifted.write_text(SHIFTED)
    code = f"import sys\nsys.stderr = open({str(told)!r}, 'w')\n" + UNKEPT.replace("{shifted}", str(shifted))
    assert run(code, None if where == "nowhere" else tmp_path) == ["False", "True", "True"]
    said = told.read_text()
    assert said.count("KernelsNotKept: ") == 1
    assert "XDG_CACHE_HOME" in said
    assert ("/dev/null/.cache" if where == "nowhere" else str(tmp_path)) in said
    assert ("Not a directory" if where == "nowhere" else "No space left") in said


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files here")
def test_code_that_others_could_change_is_not_used(tmp_path: Path) -> None:
    code = "from private_llm.kernels import compiling; print(compiling.FOLDER)"
    folder = Path(run(code, tmp_path)[0])
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert run(code, tmp_path) == ["None"]


def test_an_archive_is_named_as_what_lacks_the_sources(tmp_path: Path) -> None:
    """Not the folder for the machine code, which can be written."""
    shutil.copytree(ROOT / "private_llm", tmp_path / "private_llm", ignore=shutil.ignore_patterns("__pycache__"))
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path, "private_llm")
    code = f"import sys\nsys.path.insert(0, {archive!r})\nfrom private_llm.kernels import compiling\n"
    folder, *said = run(code + "print(compiling.FOLDER, *compiling._NOT_KEPT)", tmp_path / "cache")
    assert folder == "None"
    assert " ".join(said).startswith(f"{archive}/private_llm/")
    assert " ".join(said).endswith("cannot be read (Not a directory) Install the package with its sources")


def test_threads_that_ask_for_a_step_at_once_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that both began to make it."""
    kernel, both = cpu_bits.transpose_bits, Barrier(2)
    signature = inspect.signature

    def waiting(function: Any) -> inspect.Signature:
        both.wait()
        return signature(function)

    monkeypatch.setattr(steps, "_STEPS", {})
    monkeypatch.setattr(inspect, "signature", waiting)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(steps.step_of, [kernel] * 2)
    assert first is second


def test_the_digest_covers_every_file_with_compiled_functions() -> None:
    library = ROOT / "private_llm"
    texts = {path.relative_to(library): path.read_text() for path in library.rglob("*.py")}
    made = {path.as_posix() for path, text in texts.items() if "kernels.compiling import" in text and "\n@comp" in text}
    assert {path for path in made if not path.startswith("kernels/")} == {*compiling.ELSEWHERE} - {"net/connection.py"}
