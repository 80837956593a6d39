"""OfflineStores: what is stored comes back once, in order; the file says nothing, and damage is noticed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from private_llm.errors import ConfigError, ProtocolAbort, ShareFileError, TransportError
from private_llm.net import offline_store as module
from private_llm.net import wire
from private_llm.net.ledger import CONTROL
from private_llm.net.local import LocalMesh
from private_llm.net.offline_store import (
    OfflineStore,
    OfflineStoreTransport,
    OfflineTransport,
    pieces_of,
    store_call,
)
from private_llm.net.transport import MetaTransport

MESSAGES = [
    ("mul", torch.arange(-5, 6)),
    ("msb", torch.arange(7, dtype=torch.int32).view(7, 1)),
    ("empty", torch.empty(0, dtype=torch.int64)),
    ("bytes", torch.arange(200, dtype=torch.uint8)),
]


def append(store: OfflineStore, tag: str, payload: torch.Tensor) -> None:
    store.append(tag, payload.dtype, payload.numel(), pieces_of(payload))


def written(folder: Path) -> OfflineStore:
    """Two calls with the messages above."""
    store = OfflineStore(folder)
    for _ in range(2):
        for tag, payload in MESSAGES:
            append(store, tag, payload)
        store.end_call()
    return store


def read_call(store: OfflineStore) -> None:
    for tag, payload in MESSAGES:
        assert torch.equal(store.next(tag, tuple(payload.shape), payload.dtype), payload)
    store.finish_call()


def read_all(store: OfflineStore) -> None:
    read_call(store)
    read_call(store)


@pytest.mark.parametrize("piece", [16, 64, 1 << 24])
def test_messages_come_back(tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", piece)
    store = written(tmp_path)
    store.rewind()
    read_call(store)
    read_call(store)
    store.close()
    store.close()
    assert store.nbytes == 0


def test_a_tape_is_read_once(tmp_path: Path) -> None:
    store = written(tmp_path)
    store.rewind()
    with pytest.raises(ProtocolAbort, match="read once only: masks must never repeat"):
        store.rewind()
    store.close()


def test_no_two_pieces_look_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one message and of several: equal pieces under one nonce would be equal, and others tell their difference."""
    monkeypatch.setattr(module, "_PIECE", 64)
    store = OfflineStore(tmp_path)
    for _ in range(2):
        append(store, "zeros", torch.zeros(32, dtype=torch.int64))
    raw = os.pread(store._file.fileno(), store.nbytes, 0)
    store.close()
    messages = [raw[at + 64 : at + 64 + 4 * 80] for at in (0, 64 + 4 * 80)]
    assert len({message[at : at + 64] for message in messages for at in range(0, 4 * 80, 80)}) == 8


def test_the_file_has_no_name_and_looks_random(tmp_path: Path) -> None:
    """Chi-square of bytes, 255 degrees of freedom, p = 1e-9, for a constant message; two stores differ."""
    contents = []
    for _ in range(2):
        store = OfflineStore(tmp_path)
        append(store, "mul", torch.zeros(40_000, dtype=torch.int64))
        store.rewind()
        assert list(tmp_path.iterdir()) == []
        assert os.readlink(f"/proc/self/fd/{store._file.fileno()}").startswith(str(tmp_path))
        assert store.nbytes == 64 + 40_000 * 8 + 16
        contents.append(os.pread(store._file.fileno(), store.nbytes, 64))
        store.close()
    counts = np.bincount(np.frombuffer(contents[0], np.uint8), minlength=256)
    expected = len(contents[0]) / 256
    assert ((counts - expected) ** 2 / expected).sum() < 448
    assert contents[0] != contents[1]


@pytest.mark.parametrize("where", [0, 40, 63, 64, 90, -100, -1])
def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path, where: int) -> None:
    store = written(tmp_path)
    store.rewind()
    place, number = where % store.nbytes, store._file.fileno()
    os.pwrite(number, bytes([os.pread(number, 1, place)[0] ^ 1]), place)
    with pytest.raises((ShareFileError, TransportError)):
        read_all(store)
    store.close()


@pytest.mark.parametrize("left", [0, 30, 64, 100])
def test_a_cut_file_is_noticed(tmp_path: Path, left: int) -> None:
    store = written(tmp_path)
    store.rewind()
    os.ftruncate(store._file.fileno(), left)
    with pytest.raises(ShareFileError, match="damaged"):
        read_call(store)
    store.close()


@pytest.mark.parametrize(
    ("tag", "shape", "dtype"),
    [("and", (11,), torch.int64), ("mul", (10,), torch.int64), ("mul", (11,), torch.int32)],
)
def test_another_computation_is_noticed(tmp_path: Path, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    store = written(tmp_path)
    store.rewind()
    with pytest.raises(TransportError, match="preprocessing was made for another computation"):
        store.next(tag, shape, dtype)
    store.close()


def test_a_call_that_leaves_messages_is_noticed(tmp_path: Path) -> None:
    store = written(tmp_path)
    store.rewind()
    store.next("mul", (11,), torch.int64)
    with pytest.raises(TransportError, match="another computation"):
        store.finish_call()
    store.close()


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="store folder '/nowhere/at/all': No such file"):
        OfflineStore("/nowhere/at/all")


def test_party_zero_runs_ahead_and_party_two_reads_later(tmp_path: Path) -> None:
    mesh = LocalMesh(3, timeout=5)
    helper, keeper, other = (mesh.transport(party) for party in (0, 2, 1))
    ahead = OfflineTransport(helper)
    for tag, payload in MESSAGES:
        ahead.send(2, tag, payload)
    ahead.end_call([2])
    store = OfflineStore(tmp_path)
    beats: list[int] = []
    store_call(keeper, 0, store, lambda: beats.append(1))
    store.rewind()
    assert len(beats) == len(MESSAGES)
    links = OfflineStoreTransport(keeper, 0, store, lambda: "cpu")
    for tag, payload in MESSAGES:
        assert torch.equal(links.recv(0, tag, tuple(payload.shape), payload.dtype), payload)
    other.send(2, "mul", MESSAGES[0][1])
    assert torch.equal(links.recv(1, "mul", (11,), torch.int64), MESSAGES[0][1])
    # what is booked: the messages as ever, announcements apart
    size = sum(payload.numel() * payload.element_size() for _, payload in MESSAGES)
    booked = {tag: n for (_, tag, to), n in helper.ledger.sent.items() if to == 2}
    assert booked.pop(CONTROL) == 64 * (len(MESSAGES) + 1)
    assert sum(booked.values()) == size
    store.close()


def test_nothing_is_heard_while_running_ahead() -> None:
    ahead = OfflineTransport(LocalMesh(3, timeout=1).transport(0))
    with pytest.raises(TransportError, match="there is nothing to receive"):
        ahead.recv(255, "input", (1,), torch.int64)
    with pytest.raises(TransportError, match="waits for nobody"):
        ahead.wait(1)


def test_an_announcement_takes_no_memory_and_no_more_disk_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper that announces 16 GiB: refused when the disk has no room, otherwise received piece by piece."""
    asked: list[int] = []
    count = wire.MAX_PAYLOAD // 8

    class Announcing(MetaTransport):
        def _recv(self, frm: int, tag: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            asked.append(shape[0] * dtype.itemsize)
            if tag != module.ANNOUNCED:
                raise TransportError("the helper stopped")
            header = wire.encode(wire.FrameKind.DATA, 0, bytes(8), 0, "mul", torch.int64, count)
            return torch.frombuffer(bytearray(header), dtype=torch.uint8)

    store = OfflineStore(tmp_path)
    room = os.statvfs_result((4096, 4096, 0, 0, 1 << 20, 0, 0, 0, 0, 255))
    monkeypatch.setattr(module.os, "fstatvfs", lambda _: room)
    with pytest.raises(ShareFileError, match=r"a message of 17179869184 bytes .* has room for 4294967296"):
        store_call(Announcing(2), 0, store, lambda: None)
    assert asked == [wire.HEADER_BYTES]
    room = os.statvfs_result((4096, 4096, 0, 0, 1 << 30, 0, 0, 0, 0, 255))
    with pytest.raises(TransportError, match="the helper stopped"):
        store_call(Announcing(2), 0, store, lambda: None)
    assert max(asked) == module._PIECE
    store.close()


@pytest.mark.parametrize("trouble", ["", "room", "disk"])
def test_what_does_not_fit_is_dropped_and_the_links_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    mesh = LocalMesh(3, timeout=5)
    ahead, store = OfflineTransport(mesh.transport(0)), OfflineStore(tmp_path)
    for tag, payload in MESSAGES:
        ahead.send(2, tag, payload)
    ahead.end_call([2])
    mesh.transport(0).send(2, "next", torch.zeros(1, dtype=torch.int64))
    if trouble == "disk":
        room = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
        monkeypatch.setattr(module.os, "fstatvfs", lambda _: room)
    keeper = mesh.transport(2)
    problem = store_call(keeper, 0, store, room=8 if trouble == "room" else 1 << 20)
    wanted = {"": "None", "room": "more than the 8 bytes", "disk": "the disk of the store has room for 0"}
    assert wanted[trouble] in str(problem)
    keeper.recv(0, "next", (1,), torch.int64)
    if not trouble:
        store.rewind()
        read_call(store)
    store.close()


def test_large_messages_go_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 64)
    mesh = LocalMesh(3, timeout=5)
    ahead, store = OfflineTransport(mesh.transport(0)), OfflineStore(tmp_path)
    for tag, payload in MESSAGES:
        ahead.send(2, tag, payload)
    ahead.end_call([2])
    store_call(mesh.transport(2), 0, store, lambda: None)
    store.rewind()
    read_call(store)
    store.close()
