"""How many files of the library one more of each kind takes: each is added to a copy of the tree, and tried there.

python scripts/studies/extensions.py                   the table: what was added, the files that it took; does it work?
python scripts/studies/extensions.py protocol kernel   some kinds only
python scripts/studies/extensions.py --tiny            the table without trying

Tests and a line of docs come on top; docs/how-to-add.md says which.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
END = ""
"""Text is added at the end of a file, or before the first line that begins so."""


@dataclass(frozen=True)
class Extension:
    """One more of a kind. edits: (file of the library, before which line, text). plugin: a file of the user's own.

    tries: a program that raises unless the new thing works. written: files that a command of the library writes then.
    """

    kind: str
    what: str
    edits: tuple[tuple[str, str, str], ...]
    tries: str
    plugin: str = ""
    written: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Files of the library."""
        return [*dict.fromkeys(name for name, _, _ in self.edits), *self.written]

    @property
    def files(self) -> int:
        """Files to touch."""
        return len(self.names) + bool(self.plugin)


TOY = Path("private_llm", "protocols", "toy").with_suffix(".py").as_posix()
TWINS = (ROOT / "tests" / "hf" / "test_registered_protocol.py").read_text("utf-8")
TWINS = TWINS[TWINS.index("class Twin(") : TWINS.index("TOY = ")].rstrip()
"""A protocol that a test registers from outside: both ends, and what opens."""

EXTENSIONS = (
    Extension(
        "activation", "mish(x) = x tanh(softplus(x)), in models and plain networks", ((
            "private_llm/nn/activations.py", ")  # fmt: skip", '''\
    Activation("mish", lambda x: x.mul(approx.precise_tanh(_softplus(x))), (F.mish,), nn.Mish, (1245.3, 38), 5e-4, 2e-5,
               wide=True),
'''),),
        """
import torch, torch.nn as nn, torch.nn.functional as F
from private_llm_hf import PrivateConfig, patch
from tests.tensor.secrets import noise, opened, plain_session, secret
x = noise(3, 5)
assert (opened(F.mish(secret(plain_session(), x))) - F.mish(x)).abs().max() < 1e-3
network = nn.Sequential(nn.Linear(5, 4), nn.Mish())
with torch.no_grad(), patch(network, PrivateConfig(party_mode="threads")) as private:
    assert (private(x.float()) - network(x.float())).abs().max() < 1e-2
""",
    ),
    Extension(
        "fitted activation", "the normal distribution function, by tables that `fit_tables.py` writes", ((
            "private_llm/nn/activations.py", ")  # fmt: skip", '''\
    Activation("ndtr", FromTables("NDTR"), (torch.special.ndtr,), None, (233.6, 11), 2e-4, wide=True),
'''),),
        """
import importlib, torch
import private_llm.nn
from private_llm.approx import tables
from tests.tensor.secrets import opened, plain_session, secret
import fit_tables
fit_tables.put(["NDTR"], tiny=True)
importlib.reload(tables)
x = torch.linspace(-9, 9, 500, dtype=torch.float64)
assert (opened(torch.special.ndtr(secret(plain_session(), x))) - torch.special.ndtr(x)).abs().max() < 1e-3
""",
        written=("private_llm/approx/tables.py",),
    ),
    Extension(
        "kernel", "rows of bits in reverse, on CPUs and GPUs, at any number of threads",
        (
            ("private_llm/kernels/bits/cpu.py", END, '''

@compiled
def reverse_rows(x_at: Read, out_at: Written, rows: int, words: int, begin: int, end: int) -> None:
    """Row r of x to row rows - 1 - r of out."""
    x, out = table(x_at, rows, words), table(out_at, rows, words)
    for row in range(rows):
        for w in range(begin, end):
            out[rows - 1 - row, w] = x[row, w]
'''),
            ("private_llm/kernels/bits/triton.py", END, '''

@triton.jit
def reverse_rows_kernel(x, out, rows, words, BW: tl.constexpr):
    o_w, i_r = tl.program_id(0).to(tl.int64) * BW + tl.arange(0, BW), tl.program_id(1)
    m_w = o_w < words
    tl.store(out + (rows - 1 - i_r) * words + o_w, tl.load(x + i_r * words + o_w, mask=m_w), mask=m_w)


def reverse_rows(x: Tensor, out: Tensor) -> None:
    """See `ops.reverse_rows`."""
    reverse_rows_kernel[(triton.cdiv(x.shape[1], WORDS), x.shape[0])](x, out, *x.shape, BW=WORDS)
'''),
            ("private_llm/kernels/ops.py", END, '''

def reverse_rows(x: Tensor, out: Tensor) -> None:
    """Row r of x [rows, W] to row rows - 1 - r of out."""
    _words(cpu_bits.reverse_rows, x.shape[0] * _ROW_S, (x, out), (), tuple(x.shape))
'''),
        ),
        """
import os; os.environ["TRITON_INTERPRET"] = "1"
import torch
from private_llm.kernels import ops, parallel
from private_llm.kernels.bits import cpu
from private_llm.kernels.bits import triton as bits
from private_llm.kernels.steps import step_of
x = torch.randint(-(2**62), 2**62, (5, 300))
for threads in (1, 3):
    parallel.threads = lambda seconds: threads
    out = torch.empty_like(x)
    ops.reverse_rows(x, out)
    assert torch.equal(out, x.flip(0))
out = torch.empty_like(x)
bits.reverse_rows(x, out)
assert torch.equal(out, x.flip(0))
ops.reverse_rows(x.to("meta"), out.to("meta"))
assert step_of(cpu.reverse_rows)[0].address  # in programs, too
""",
    ),
    Extension(
        "cache policy", "the last few entries stay; by name in settings and commands",
        (
            ("private_llm/kv_cache/policies/policy.py", END, '''

@dataclass(frozen=True)
class LastFew(CachePolicy):
    """The last entries stay."""

    name = "last-few"
    kept: int = 4

    def entries(self, held: int, position: int, queries: int) -> int:
        return min(held, self.kept)

    @property
    def newest(self) -> int:
        return self.kept

    def after_step(self, facts: CacheFacts, mass: Tensor | None) -> Tensor | None:
        import torch

        held = facts.positions.shape[-1]
        return torch.arange(held)[-self.kept :].view(1, 1, -1) if held > self.kept else None
'''),
        ),
        """
import torch
from private_llm.config import PrivateConfig
from private_llm_hf import patch
from tests.hf import tiny
config = PrivateConfig.from_dict({"kv_cache": {"name": "last-few", "kept": 5}, "party_mode": "threads"})
with patch(tiny.build("llama"), config) as private:
    text = private.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=4, do_sample=False, use_cache=True)
assert text.shape == (1, 8)
""",
    ),
    Extension(
        "protocol", "two parties that hold the same in the clear, registered by a plug-in", (),
        """
import torch
from private_llm_hf import PrivateConfig, patch
from tests.hf import tiny
model = tiny.build("llama")
config = PrivateConfig(protocol="toy", insecure=True, plugins=("one_more",))
ids = torch.tensor([[5, 6, 7, 8]])
with torch.no_grad(), patch(model, config) as private:
    assert torch.equal(private.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))
""",
        """
from private_llm.protocols.registry import register
from tests.hf.test_registered_protocol import TOY

register(TOY)
""",
    ),
    Extension(
        "built-in protocol", "the same, in a file of its own beside `plain`", (
            (TOY, END, f'''"""Two parties that hold the same in the clear."""

from __future__ import annotations

import torch
from torch import Tensor

from private_llm.errors import ProtocolAbort
from private_llm.net.transport import Transport
from private_llm.protocols.plain import Plain, PlainClient
from private_llm.ring.ring import Ring


{TWINS}
'''),
            ("private_llm/protocol_facts.py", "    ProtocolFacts(\"plain\"", '''\
    ProtocolFacts(
        "toy", 2, Threat("toy", "protocol", "nobody", (("both parties", "everything"),), "a study", "protocol='toy'"),
        rings=(64,), hides=False,
    ),
'''),
            ("private_llm/protocols/registry.py", "from private_llm.protocols.trio.arithmetic",
             "from private_llm.protocols.toy import Twin, TwinClient, open_both\n"),
            ("private_llm/protocols/registry.py", "        ProtocolSpec(", '''\
        ProtocolSpec(
            protocol_facts("toy"), party=lambda setup: Twin(setup.party, setup.transport, setup.ring),
            client=TwinClient, open=open_both, hold=lambda config, party, masks, part: Share((part,)),
        ),
'''),
        ),
        """
import torch
from private_llm_hf import PrivateConfig, patch
from tests.hf import tiny
model = tiny.build("llama")
ids = torch.tensor([[5, 6, 7, 8]])
with torch.no_grad(), patch(model, PrivateConfig(protocol="toy", insecure=True)) as private:
    assert torch.equal(private.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))
""",
    ),
    Extension(
        "transport", "queues of this process, for a protocol and for a model", (),
        """
import threading, torch
import torch.nn.functional as F
import private_llm.nn
from one_more import Queues
from private_llm.config import PrivateConfig
from private_llm.net.transport import CLIENT
from private_llm.protocols.session import join, join_as_client
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
config, links = PrivateConfig(), Queues.links()
def party(number):
    session = join(config, number, Queues(number, links))
    x = SecretTensor(Fixed(session, session.protocol.receive_input((7,)), session.frac))
    session.protocol.reveal_to_client(F.relu(x).to_fixed().share)
threads = [threading.Thread(target=party, args=(number,), daemon=True) for number in range(3)]
for thread in threads: thread.start()
client = join_as_client(config, Queues(CLIENT, links))
x = torch.linspace(-3, 3, 7, dtype=torch.float64)
client.share(client.ring.encode(x, 18))
assert (client.ring.decode(client.open((7,)), 18) - F.relu(x)).abs().max() < 1e-4
for thread in threads: thread.join(60)
assert not any(thread.is_alive() for thread in threads)
from one_more import QueueMesh
from private_llm_hf import patch
from tests.hf import tiny
model, mesh, ids = tiny.build("llama"), QueueMesh(3), torch.tensor([[5, 6, 7, 8]])
with torch.no_grad(), patch(model, PrivateConfig(party_mode="threads"), mesh) as private:
    assert (private(ids).logits - model(ids).logits).abs().max() < 1e-2
assert {(0, 1), (0, 2), (1, 2), (2, 1), (CLIENT, 0), (0, CLIENT)} <= set(mesh.queues)
""",
        """
import queue
from collections import defaultdict

import torch
from torch import Tensor

from private_llm.net.local import LocalMesh
from private_llm.net.transport import Transport


class Queues(Transport):
    @staticmethod
    def links() -> defaultdict[tuple[int, int], queue.SimpleQueue[Tensor]]:
        return defaultdict(queue.SimpleQueue)

    def __init__(self, me: int, links: defaultdict[tuple[int, int], queue.SimpleQueue[Tensor]]) -> None:
        super().__init__(me)
        self._links = links

    def _send(self, to: int, tag: str, payload: Tensor) -> None:
        self._links[self.me, to].put(payload.clone())

    def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._links[frm, self.me].get(timeout=60).view(shape)

    def _recv_bytes(self, frm: int, tag: str, most: int) -> bytes:
        return self._links[frm, self.me].get(timeout=60).numpy().tobytes()

    def wait(self, frm: int) -> None:
        pass


class QueueMesh(LocalMesh):
    def __init__(self, parties: int) -> None:
        super().__init__(parties)
        self.queues = Queues.links()

    def transport(self, me: int) -> Queues:
        return Queues(me, self.queues)
""",
    ),
)  # fmt: skip


def added(extension: Extension, folder: Path) -> None:
    """A copy of the library and its tests in `folder`, with one more. Raises ValueError for a line that it lacks."""
    for name in ("private_llm", "tests", "scripts/fitting"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (ROOT / "integrations").iterdir():
        if path.is_dir() and path.name != "__pycache__":
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, text in extension.edits:
        (folder / name).touch()
        lines = (folder / name).read_text("utf-8").splitlines(keepends=True)
        at = next((n for n, line in enumerate(lines) if line.startswith(before)), None) if before else len(lines)
        if at is None:
            raise ValueError(f"{name}: no line begins with {before!r}")
        (folder / name).write_text("".join([*lines[:at], text, *lines[at:]]), "utf-8")
    if extension.plugin:
        (folder / "one_more").with_suffix(".py").write_text(extension.plugin, "utf-8")


def tried(extension: Extension) -> str:
    """What went wrong, an empty text if nothing did."""
    with tempfile.TemporaryDirectory(prefix="extension-") as folder:
        added(extension, Path(folder))
        paths = f"{folder}{os.pathsep}{folder}/scripts/fitting"
        done = subprocess.run(
            [sys.executable, "-c", extension.tries], env=os.environ | {"PYTHONPATH": paths}, cwd=folder,
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    return "" if done.returncode == 0 else done.stderr or f"exit code {done.returncode}"


def main() -> int:
    """Print the table; 1 if one does not work."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", help="; ".join(each.kind for each in EXTENSIONS))
    parser.add_argument("--tiny", action="store_true", help="do not try them")
    args = parser.parse_args()
    print("| one more | example | files | which |\n|---|---|---|---|")
    failed = 0
    for each in EXTENSIONS:
        if args.kinds and each.kind not in args.kinds:
            continue
        wrong = "" if args.tiny else tried(each)
        failed += bool(wrong)
        names = ", ".join(f"`{name}`" for name in each.names) or "one of your own, named in `plugins` or imported"
        print(f"| {each.kind} | {each.what} | {each.files} | {names} |")
        if wrong:
            print(wrong, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
