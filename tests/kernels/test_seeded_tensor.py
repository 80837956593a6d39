"""Tensors made from key streams: the elements of the ordinary stream, whatever is done with them; no way out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from private_llm.errors import DomainError, PlaintextLeak, UnsupportedOp
from private_llm.kernels import matmul, ops, parallel
from private_llm.kernels.matmul import amx as cpu_amx
from private_llm.kernels.matmul import seeded_cpu as cpu_seeded
from private_llm.kernels.parallel import addresses
from private_llm.kernels.prg import aes as cpu_aes
from private_llm.kernels.seeded_tensor import SeededTensor, StreamKey
from private_llm.kernels.trace_hook import TraceHook, traced_by
from private_llm.ring.prg import Prg, Seed
from private_llm.ring.ring import RING32, RING64, Ring
from tests.kernels import reference
from tests.kernels.cases import Draw

SEED = Seed(bytes(range(32)))
RINGS = (RING64, RING32)
needs_aes = pytest.mark.skipif(not cpu_aes.usable(), reason="this processor has no AES instructions")


@pytest.fixture(params=["instructions", "library"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By the processor's instructions, or as elsewhere."""
    if request.param == "library":
        monkeypatch.setattr(cpu_aes, "usable", lambda: False)
    elif not cpu_aes.usable():
        pytest.skip("this processor has no AES instructions")
    return str(request.param)


def both(ring: Ring, *shape: int, label: str = "w") -> tuple[SeededTensor, Tensor]:
    """The same elements as a piece of a stream, and from the stream that parties have drawn from so far."""
    return SEED.drawn(label, shape, ring), SEED.stream(label).elements(int(np.prod(shape)), ring).view(shape)


@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 1000, (1 << 36) + 5])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 63, 64, 65, 511, 4099])
def test_any_bytes_of_a_stream(by: str, start: int, count: int) -> None:
    """Against AES of the counter, block by block; and not a byte beyond."""
    key = bytes(range(16))
    room = np.full(count + 64, 7, dtype=np.uint8)
    StreamKey(key).fill(start, room[:count])
    assert (room[count:] == 7).all()
    first = start // 16
    cipher = Prg(key)
    if start < 1 << 20:
        whole = np.empty((start + count + 15) // 16 * 16, dtype=np.uint8)
        cipher.fill(whole)
        assert np.array_equal(room[:count], whole[start : start + count])
    else:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        ecb = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        blocks = b"".join(ecb.update((first + i).to_bytes(16, "big")) for i in range(count // 16 + 2))
        assert room[:count].tobytes() == blocks[start % 16 :][:count]


@needs_aes
def test_large_ones_are_made_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "threads", lambda seconds: 3)
    drawn, held = both(RING64, 37, 1001)
    assert torch.equal(drawn.made(), held)


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "t": lambda x: x.t(),
    "mT": lambda x: x.mT,
    "transposed twice": lambda x: x.transpose(0, 1).transpose(-2, -1),
    "rows": lambda x: x[3:9],
    "of none": lambda x: x[4:4],
    "steps": lambda x: x[::2],
    "a row": lambda x: x[-2],
    "columns": lambda x: x[:, 1:3],
    "split": lambda x: x.split([5, 0, x.shape[0] - 5]),
    "split of equals": lambda x: x.split(4),
    "columns of a turned one": lambda x: x.t().split([2, x.shape[0] - 2], dim=1),
    "joined": lambda x: torch.cat([x[4:], x[:4], x[2:3]]),
    "joined sideways": lambda x: torch.cat([x, x], dim=1),
    "joined with another": lambda x: torch.cat([x, torch.zeros(2, x.shape[1], dtype=x.dtype)]),
    "chosen rows": lambda x: torch.cat([x[4:], x[:4]]).index_select(0, torch.tensor([5, 6, 7, 0, 0, 10])),
    "gathered": lambda x: ops.gather_rows(x, torch.tensor([5, 6, 7, 0, 0, 10])),
    "sum": lambda x: x + x.t().t() - 3 * x,
    "reshaped": lambda x: x.reshape(-1),
    "expanded": lambda x: x.expand(2, *x.shape),
    "contiguous": lambda x: x.t().contiguous(),
    "moved": lambda x: x.to("cpu"),
    "converted": lambda x: x.to(torch.int16),
    "copied": lambda x: x.clone(),
    "detached": lambda x: x.detach(),
}


def parts(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_as_if_it_were_in_memory(way: str, ring: Ring, mode: Callable[[], Any]) -> None:
    drawn, held = both(ring, 11, 7)
    with mode():
        for mine, theirs in zip(parts(WAYS[way](drawn)), parts(WAYS[way](held)), strict=True):
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
            assert torch.equal(mine.contiguous(), theirs)


def test_what_makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, _ = both(RING64, 11, 7)
    monkeypatch.setattr(StreamKey, "fill", lambda *_: pytest.fail("made"))
    for name in ("t", "mT", "transposed twice", "rows", "a row", "split", "columns of a turned one", "joined", "moved"):
        assert all(isinstance(x, SeededTensor) for x in parts(WAYS[name](drawn))), name
    assert (drawn.is_cpu, drawn.stride(), drawn.numel(), len(drawn)) == (True, (7, 1), 77, 11)


def test_three_dimensions() -> None:
    drawn, held = both(RING64, 3, 5, 4)
    assert isinstance(drawn[1], SeededTensor)
    assert torch.equal(drawn[1].t().contiguous(), held[1].t())
    assert torch.equal(drawn.transpose(1, 2).contiguous(), held.transpose(1, 2))
    assert torch.equal(ops.ring_matmul(held.mT, drawn), ops.ring_matmul(held.mT, held))


def test_it_is_never_changed() -> None:
    drawn, held = both(RING64, 4, 3)
    for change in (
        lambda: drawn.add_(1),
        lambda: drawn.__setitem__(0, 1),
        lambda: torch.add(held, held, out=drawn),
        lambda: drawn.zero_(),
        lambda: torch.ops.aten.add_.Tensor(drawn, held),
    ):
        with pytest.raises(UnsupportedOp, match="cannot be changed in place"):
            change()
    assert torch.equal(drawn.made(), held)


def test_no_way_out() -> None:
    drawn, held = both(RING64, 4, 3)
    number = str(held[0, 0].item())
    for text in (repr(drawn), str(drawn), f"{drawn}", repr(drawn.slices), repr(drawn.slices[0].key)):
        assert number not in text
        assert "<secret>" in text or "shape=(4, 3)" in text
    for thing in (drawn, drawn.slices[0].key):
        with pytest.raises(PlaintextLeak):
            pickle.dumps(thing)
    assert copy.deepcopy(drawn) is drawn


def test_it_has_no_address() -> None:
    drawn, _ = both(RING64, 4, 3)
    with pytest.raises(UnsupportedOp, match="no memory"):
        drawn.data_ptr()
    with pytest.raises(ValueError, match="not contiguous"):
        addresses(drawn)


def test_streams_of_chacha(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that holds for AES; a product on a CPU makes some lines at a time by the library."""
    seed = Seed(bytes(range(32)), "chacha20")
    monkeypatch.setattr(matmul, "_AT_ONCE", 40)
    for ring in RINGS:
        drawn, held = seed.drawn("w", (11, 7), ring), seed.stream("w").elements(77, ring).view(11, 7)
        for way in WAYS.values():
            for mine, theirs in zip(parts(way(drawn)), parts(way(held)), strict=True):
                assert torch.equal(mine.contiguous(), theirs)
        x = Draw("x").ring(ring, 3, 7)
        assert torch.equal(ops.ring_matmul(x, drawn.mT), reference.ring_matmul(x, held.mT))
    key = drawn.slices[0].key
    assert (key.rounds, repr(key)) == (None, "StreamKey(<secret>)")
    assert key.words(torch.device("cpu")) is key.words(torch.device("cpu"))
    with pytest.raises(PlaintextLeak):
        pickle.dumps(key)
    with pytest.raises(UnsupportedOp, match="AES stream on cuda:0"):
        SEED.drawn("w", (2, 2), RING64).slices[0].key.words(torch.device("cuda:0"))


# -- products ---------------------------------------------------------------------------------------------------
SIZES = (
    (1, 1, 1), (1, 300, 40), (16, 16, 16), (17, 15, 33), (130, 257, 65), (5, 530, 16), (40, 31, 7), (3, 1030, 130),
    (2, 49, 301), (65, 129, 200), (1, 512, 128), (0, 4, 4), (3, 0, 4), (3, 4, 0),
)  # fmt: skip
"""Rows of x, inner size, columns: odd ones, tails of every block, and none."""


@pytest.fixture(params=["byte tiles", "register tiles", "no instructions"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way to multiply."""
    if request.param == "byte tiles" and not (cpu_amx.usable() and cpu_aes.usable()):
        pytest.skip("this processor has no byte tiles (AMX)")
    if request.param == "register tiles":
        monkeypatch.setattr(cpu_amx, "usable", lambda: False)
    if request.param == "no instructions":
        monkeypatch.setattr(cpu_aes, "usable", lambda: False)
    return str(request.param)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("ring", RINGS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_products(
    turned: bool, size: tuple[int, int, int], ring: Ring, threads: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against plain torch on the whole; y in one piece, and cut and joined, so that lines begin within a block."""
    monkeypatch.setattr(parallel, "threads", lambda seconds: threads)
    rows, inner, columns = size
    y, held = both(ring, *((columns, inner) if turned else (inner, columns)), label=str(size))
    x, onto = Draw("x").ring(ring, rows, inner), Draw("onto").ring(ring, rows, columns)
    cut = len(y) // 3
    for drawn, whole in ((y, held), (torch.cat([y[cut:], y[:cut]]), torch.cat([held[cut:], held[:cut]]))):
        there, expected = (drawn.t(), whole.t()) if turned else (drawn, whole)
        assert isinstance(there, SeededTensor)
        wanted = reference.ring_matmul(x, expected)
        assert torch.equal(ops.ring_matmul(x, there), wanted)
        assert torch.equal(matmul.product(x, there, onto.clone()), wanted + onto)


@pytest.mark.parametrize("turned", [False, True])
def test_products_write_nothing_of_the_size_of_y(turned: bool, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole is never made; without instructions, at most some lines at a time."""
    made: list[int] = []
    fill = StreamKey.fill
    monkeypatch.setattr(StreamKey, "fill", lambda key, start, out: (made.append(out.size), fill(key, start, out))[1])
    monkeypatch.setattr(matmul, "_AT_ONCE", 1 << 12)
    y, held = both(RING64, 600, 70)
    x = Draw("x").ring(RING64, 20, 70 if turned else 600)
    assert torch.equal(ops.ring_matmul(x, y.t() if turned else y), ops.ring_matmul(x, held.t() if turned else held))
    assert max(made, default=0) <= (8 << 12 if kernel == "no instructions" else 0)


def test_a_batch_a_pair_and_listed_rows(kernel: str) -> None:
    first, held = both(RING64, 30, 50)
    second, other = both(RING64, 30, 50, label="v")
    x, z = Draw("x").ring(RING64, 2, 3, 50), Draw("z").ring(RING64, 2, 3, 50)
    expected = reference.ring_matmul_pair(x, held.t(), z, other.t())
    assert torch.equal(ops.ring_matmul_pair(x, first.t(), z, second.t()), expected)
    assert torch.equal(ops.ring_matmul_pair(x, first.t(), z, other.t()), expected)
    assert torch.equal(ops.ring_matmul(first, x.mT), reference.ring_matmul(held, x.mT))
    listed = torch.tensor([4, 5, 6, 29, 0, 0])
    assert torch.equal(ops.ring_matmul_rows(x[0], first, listed), reference.ring_matmul_rows(x[0], held, listed))
    lines = Draw("l").ring(RING64, 3, 6)
    assert torch.equal(ops.ring_matmul_lines(lines, first, listed), reference.ring_matmul_lines(lines, held, listed))


class Seen(TraceHook):
    """Kernels, and how many tensors were read by something else."""

    def __init__(self) -> None:
        self.kernels: list[object] = []
        self.read = 0

    def addressed(self, tensors: Sequence[Tensor]) -> None:
        """Nothing."""

    def launched(self, kernel: Callable[..., None], arguments: Sequence[Any]) -> None:
        """Keep it."""
        self.kernels.append(kernel)

    def escaped(self, x: Tensor) -> None:
        """Count it."""
        self.read += 1

    def masks_drawn(self, stream: object, out: Tensor) -> None:
        """Nothing."""


@needs_aes
@pytest.mark.parametrize("turned", [True, False])
def test_who_watches_is_told_of_kernels_and_of_masks_that_are_made_whole(turned: bool) -> None:
    drawn, known = both(RING64, 40, 24)
    drawn, known = (drawn.mT, known.mT) if turned else (drawn, known)
    x, seen = torch.arange(3 * known.shape[0]).view(3, -1), Seen()
    with traced_by(seen):
        made = matmul.product(x, drawn)
        assert seen.kernels == [cpu_seeded.in_register_tiles]
        assert not seen.read
        assert torch.equal(drawn + 1, known + 1)
        assert seen.read == 1
    assert torch.equal(made, reference.ring_matmul(x, known))


@needs_aes
@pytest.mark.parametrize(("turned", "rows"), [(True, 1), (True, 5), (False, 1), (False, 5)])
def test_register_tiles_stay_in_their_scratch(turned: bool, rows: int) -> None:
    """As in a recorded step, whose scratch is as large as needed: not a byte beyond."""
    inner, columns, start, guard = 1100, 1101, 3, 64
    room = np.full(2 * guard + cpu_seeded.REGISTER_BYTES + 64, 7, dtype=np.uint8)
    at = guard - (room.ctypes.data + guard) % 64 + 64
    x = torch.arange(rows * inner).view(rows, inner)
    out = torch.zeros((rows, columns), dtype=torch.int64)
    key = StreamKey(bytes(range(16)))
    cpu_seeded.in_register_tiles(
        x.data_ptr(), inner, key.rounds, start, turned, rows, inner, columns, 0, columns, out.data_ptr(), columns,
        room.ctypes.data + at, np.uint64(0),
    )  # fmt: skip
    whole = np.empty(inner * columns, dtype=np.int64)
    key.fill(8 * start, whole.view(np.uint8))
    y = torch.from_numpy(whole).view(columns, inner).mT if turned else torch.from_numpy(whole).view(inner, columns)
    assert torch.equal(out, reference.ring_matmul(x, y))
    assert (room[:at] == 7).all()
    assert (room[at + cpu_seeded.REGISTER_BYTES :] == 7).all()


def test_products_refuse_what_does_not_fit() -> None:
    y, _ = both(RING64, 30, 50)
    for x in (torch.zeros(3, 30, dtype=torch.int64), torch.zeros(3, 50, dtype=torch.int32)):
        with pytest.raises(DomainError, match="ring_matmul: got"):
            ops.ring_matmul(x, y.t())
