"""Folders of corrections: a block is claimed once, whatever else runs, crashes or forks; rows are handed out once."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from private_llm.assisted import corrections
from private_llm.assisted.corrections import BlockFacts, CorrectionFolder, Corrections, mask_label
from private_llm.assisted.fixed_point import lines_digest
from private_llm.assisted.masks import mask
from private_llm.errors import ConfigError, CorrectionsUsedUp, ProtocolAbort, ShareFileError
from private_llm.kernels import ops

LINES = {
    "wide": torch.randint(-9, 9, (7, 5), dtype=torch.int16),
    "odd": torch.randint(-9, 9, (4, 3), dtype=torch.int16),
}


def filled(path: Path, *blocks: int, preparer: str = "") -> CorrectionFolder:
    """A folder with blocks of so many rows."""
    folder = CorrectionFolder.made(path)
    for rows in blocks:
        facts = BlockFacts.fresh(rows, {name: lines_digest(each) for name, each in LINES.items()}, preparer, 16)
        products = {
            name: ops.narrow_matmul(mask(facts.key, mask_label(name), rows, each.shape[1]), each, rows).view(rows, -1)
            for name, each in LINES.items()
        }
        folder.add(facts, products)
    return folder


def session(folder: CorrectionFolder, **more: object) -> Corrections:
    made = Corrections(folder.path, **{"announce": lambda _: True, **more})  # type: ignore[arg-type]
    for name, lines in LINES.items():
        made.expect(name, lines_digest(lines), lines.shape[1])
    return made


def in_fork(run: Callable[[], str]) -> str:
    """What a fork of this process says before it ends; "" for one that died."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, run().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    os.waitpid(child, 0)
    return text


def test_rows_come_once_and_with_their_products(tmp_path: Path) -> None:
    """In whatever pieces they are taken, also where a row has an odd number of elements."""
    made = session(filled(tmp_path / "c", 6, 5))
    for name, lines in LINES.items():
        taken = [made.take(name, rows) for rows in (1, 2, 4, 1, 3)]
        for each in taken:
            assert torch.equal(each.products.view(-1), ops.narrow_matmul(each.masks, lines, len(each.masks)))
            assert each.source == "the preparation by this machine"
        masks = torch.cat([each.masks for each in taken])
        assert len(masks.unique()) == masks.numel()
    assert made.left() == 0
    assert list((tmp_path / "c").iterdir()) == []


def test_what_is_left_and_used_is_told(tmp_path: Path) -> None:
    made = session(filled(tmp_path / "c", 3, 3))
    assert made.left() == 6
    made.take("wide", 4)
    assert made.left() == 2
    with pytest.raises(CorrectionsUsedUp, match=r"'wide' wants 3 rows; this session used 4, and 2 are left .*prepare"):
        made.take("wide", 3)
    made.take("odd", 6)
    filled(tmp_path / "c", 3)
    assert made.take("wide", 3).masks.shape == (3, 5)


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    folder = filled(tmp_path / "c", 2)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.path.iterdir()] == [0o600]
    folder.path.chmod(0o750)
    with pytest.raises(ConfigError, match="others may open"):
        CorrectionFolder.made(folder.path)


def test_sessions_take_different_blocks(tmp_path: Path) -> None:
    folder = filled(tmp_path / "c", *[1] * 30)

    def claim_all() -> str:
        names = []
        while (found := folder.claim(lambda _: None)) is not None:
            names.append(found[0].name)
        return " ".join(names)

    with ThreadPoolExecutor(2) as pool:  # each waits for a process of its own
        mine, theirs = (said.split() for said in pool.map(in_fork, [claim_all] * 2))
    assert len({*mine, *theirs}) == len(mine) + len(theirs) == 30


@pytest.mark.parametrize("stop", ["_read", "sync_folder", "announce"])
def test_a_crash_loses_a_block_and_no_later_session_gets_it(
    stop: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = filled(tmp_path / "c", 4)

    def crash(*_: object, **more: object) -> object:
        if stop == "_read" and not more:
            return original(*_)
        os._exit(1)

    original = corrections._read

    def claim() -> str:
        if stop == "announce":
            session(folder, announce=crash).take("odd", 1)
        else:
            monkeypatch.setattr(corrections, stop, crash)
            folder.claim(lambda _: None)
        return "went on"

    assert in_fork(claim) == ""
    assert folder.rows() == 0
    assert folder.claim(lambda _: None) is None
    with pytest.raises(CorrectionsUsedUp):
        session(folder).take("odd", 1)


def test_a_fork_takes_nothing_that_its_parent_claimed(tmp_path: Path) -> None:
    made = session(filled(tmp_path / "c", 4))
    made.take("wide", 1)

    def take() -> str:
        try:
            made.take("wide", 1)
        except ProtocolAbort as error:
            return str(error)
        return "went on"

    assert "before this process was forked" in in_fork(take)
    made.take("wide", 1)


def test_a_restored_folder_is_found_by_the_server(tmp_path: Path) -> None:
    folder, heard = filled(tmp_path / "c", 2), set[str]()

    def new(block: str) -> bool:
        known = block in heard
        heard.add(block)
        return not known

    shutil.copytree(folder.path, tmp_path / "copy")
    session(folder, announce=new).take("odd", 1)
    shutil.rmtree(folder.path)
    shutil.copytree(tmp_path / "copy", folder.path)
    with pytest.raises(ProtocolAbort, match="restored from a copy"):
        session(folder, announce=new).take("odd", 1)


def test_other_weights_and_the_servers_own_blocks_stay_where_they_are(tmp_path: Path) -> None:
    folder = filled(tmp_path / "c", 2, preparer="a:1")
    other = Corrections(folder.path, lambda _: True)
    with pytest.raises(ShareFileError, match="another checkpoint: weight 'odd' differs"):
        other.expect("odd", lines_digest(LINES["odd"] + 1), 3)
    fewer = Corrections(folder.path, lambda _: True)
    fewer.expect("odd", lines_digest(LINES["odd"]), 3)
    with pytest.raises(ShareFileError, match="weight 'wide' differs"):
        fewer.take("odd", 1)
    with pytest.raises(ConfigError, match="a:1 made corrections"):
        session(folder, online=("a:1",))
    assert folder.rows() == 2
    assert session(folder, online=("b:1",)).take("odd", 1).source == "the preparation by a:1"


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = filled(tmp_path / "c", 2)
    path = next(folder.path.iterdir())
    path.write_bytes(path.read_bytes()[:-9])
    (folder.path / "notes-1.safetensors").write_text("no block")
    assert folder.rows() == 2
    with pytest.raises(ShareFileError, match=rf"{path.name}: no block of corrections, or a damaged one"):
        session(folder)


def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = CorrectionFolder.made(tmp_path / "c")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        filled(folder.path, 2)
    assert list(folder.path.iterdir()) == []


def test_what_crashes_left_is_deleted_when_it_is_old(tmp_path: Path) -> None:
    folder = filled(tmp_path / "c", 2)
    for name, age in (("a.claimed", 1e5), ("b.part", 1e5), ("c.part", 0)):
        (folder.path / name).touch()
        os.utime(folder.path / name, (time.time() - age,) * 2)
    CorrectionFolder.made(folder.path)
    assert [path.name for path in folder.path.iterdir() if path.suffix != ".safetensors"] == ["c.part"]
    assert folder.rows() == 2


def test_rows_that_no_call_reads_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrections, "_KEPT", 4)
    made = session(filled(tmp_path / "c", *[3] * 8))
    for _ in range(12):
        made.take("wide", 2)
    assert made._held("odd") < 4 + 3
    assert made.left() == 0
    made.take("odd", 4)


def edited(path: Path, change: Callable[[dict[str, str], dict[str, torch.Tensor]], None]) -> None:
    """A block whose header and products somebody changed."""
    with safe_open(path, "pt") as file:
        said, products = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(said, products)
    path.write_bytes(save(products, said))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda said, products: said.update(name="0" * 32), "its name is not that of its key"),
        (lambda said, products: said.update(key="00" * 32), "its name is not that of its key"),
        (lambda said, products: said.update(key=""), "want 32"),
        (lambda said, products: said.update(digests="7"), "mapping"),
        (lambda said, products: products.pop("odd"), "lacks products of a weight"),
        (lambda said, products: products.update(odd=products["odd"][:1]), "has not 2 rows"),
        (lambda said, products: products.update(odd=products["odd"].int()), "has not 2 rows of bytes"),
    ],
)
def test_edited_blocks_are_named_before_they_are_claimed(
    tmp_path: Path, change: Callable[[dict[str, str], dict[str, torch.Tensor]], None], why: str
) -> None:
    folder = filled(tmp_path / "c", 2)
    path = next(folder.path.iterdir())
    edited(path, change)
    with pytest.raises(ShareFileError, match=rf"{path.name}: no block of corrections, or a damaged one \(.*{why}"):
        session(folder)
    assert path.exists()


def test_a_key_comes_under_one_name(tmp_path: Path) -> None:
    folder = filled(tmp_path / "c", 2)
    path = next(folder.path.iterdir())
    path.rename(path.with_name(f"{'a' * 32}-2.safetensors"))
    with pytest.raises(ShareFileError, match="its name is not that of its key"):
        session(folder)


def test_links_and_folders_of_others_are_refused(tmp_path: Path) -> None:
    folder = filled(tmp_path / "c", 2)
    path = next(folder.path.iterdir())
    path.rename(tmp_path / path.name)
    path.symlink_to(tmp_path / path.name)
    with pytest.raises(ShareFileError, match="delete it"):
        session(folder)
    folder.path.chmod(0o755)
    with pytest.raises(ConfigError, match="others may open"):
        session(folder)


def test_the_servers_own_blocks_are_known_under_other_names(tmp_path: Path) -> None:
    folder = filled(tmp_path / "c", 2, preparer="localhost:7")
    for name in ("127.0.0.1:7", "LOCALHOST:7"):
        with pytest.raises(ConfigError, match="localhost:7 made corrections"):
            session(folder, online=(name,))
    session(folder, online=("127.0.0.1:8",))


def test_an_interrupted_call_loses_its_block_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = filled(tmp_path / "c", 3, 4)
    made, cat = session(folder), torch.cat

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    made.take("wide", 1)
    monkeypatch.setattr(torch, "cat", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.take("wide", 1)
    monkeypatch.setattr(torch, "cat", cat)
    taken = made.take("wide", 2)
    assert torch.equal(taken.products.view(-1), ops.narrow_matmul(taken.masks, LINES["wide"], 2))
