"""Share files: what one party holds, on disk; wrong, foreign or damaged files are refused."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from private_llm_hf.api import AutoPrivateModel, AutoPrivateModelForCausalLM, share_checkpoint
from private_llm_hf.checkpoint.model_spec import ModelSpec
from private_llm_hf.checkpoint.offload import OpenedFile
from private_llm_hf.checkpoint.share_files import ShareFile, _digest, share_path
from private_llm_hf.checkpoint.weights import stream_loaded
from safetensors import safe_open

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, DomainError, ShareFileError
from tests.hf import tiny
from tests.hf.compare import shares_of
from tests.hf.conftest import PLAIN, TRIO

PARTY_FILES = [0, 1, 2]


@pytest.fixture(scope="module")
def shared(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    share_checkpoint(str(checkpoint), folder, TRIO)
    return folder


def test_the_three_files_add_up_to_the_weights(shared: Path) -> None:
    files = [shares_of(ShareFile.open(share_path(shared, p), TRIO, p)) for p in PARTY_FILES]
    model, state = tiny.build("llama"), dict[str, torch.Tensor]()
    spec = ModelSpec.of(type(model), model.config, fold_norms_too=True)
    stream_loaded(model, spec.source, spec.folding(state.__setitem__))
    assert set(files[0]) == set(files[1]) == set(files[2]) == set(state)
    for name, weight in state.items():
        a1, a2 = files[0][name].parts
        masked2, first = files[1][name].parts  # x + a2, a1
        masked1, second = files[2][name].parts  # x + a1, a2
        assert torch.equal(first, a1)
        assert torch.equal(second, a2)
        encoded = torch.round(weight.double() * 2**18).to(torch.int64)
        assert torch.equal(masked2 - a2, encoded)
        assert torch.equal(masked1 - a1, encoded)


def test_sizes_and_rights(shared: Path) -> None:
    count = sum(value.numel() for value in tiny.build("llama").parameters())
    sizes = [share_path(shared, p).stat().st_size for p in PARTY_FILES]
    assert sizes[0] < 10_000, "party 0's masks come from seeds"
    assert all(count * 8 <= size < count * 8 + 16_000 for size in sizes[1:])
    assert all(stat.S_IMODE(share_path(shared, p).stat().st_mode) == 0o600 for p in PARTY_FILES)


def test_the_users_folder_holds_no_weights(shared: Path) -> None:
    assert sorted(p.name for p in (shared / "client").iterdir()) == ["config.json", "generation_config.json"]


def test_a_file_of_another_party(shared: Path) -> None:
    with pytest.raises(ShareFileError, match="belongs to party 1; this is party 2"):
        ShareFile.open(share_path(shared, 1), TRIO, 2)


@pytest.mark.parametrize("change", [{"ring": 32, "frac_bits": 12}, {"frac_bits": 16}])
def test_a_file_for_other_settings(shared: Path, change: dict[str, int]) -> None:
    with pytest.raises(ShareFileError, match=r"made for other settings: .*frac_bits=18"):
        ShareFile.open(share_path(shared, 1), replace(TRIO, **change), 1)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ShareFileError, match="no such file"):
        ShareFile.open(tmp_path / "party0.safetensors", TRIO, 0)


@pytest.mark.parametrize("where", [0, 100, 400, 2000, 0.5, -1])
def test_one_damaged_byte(shared: Path, tmp_path: Path, where: float) -> None:
    raw = bytearray(share_path(shared, 1).read_bytes())
    position = int(where * len(raw)) if isinstance(where, float) else where
    raw[position] ^= 1
    damaged = share_path(tmp_path, 1)
    damaged.write_bytes(raw)
    with pytest.raises(ShareFileError):
        ShareFile.open(damaged, TRIO, 1)


def test_a_truncated_file(shared: Path, tmp_path: Path) -> None:
    raw = share_path(shared, 2).read_bytes()
    share_path(tmp_path, 2).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ShareFileError, match="damaged"):
        ShareFile.open(share_path(tmp_path, 2), TRIO, 2)


def test_an_ordinary_checkpoint_is_no_share_file(checkpoint: Path) -> None:
    with pytest.raises(ShareFileError, match="got format 'pt'"):
        ShareFile.open(checkpoint / "model.safetensors", TRIO, 1)


def test_two_sharings_differ(checkpoint: Path, shared: Path, tmp_path: Path) -> None:
    share_checkpoint(str(checkpoint), tmp_path, TRIO)
    one, two = (ShareFile.open(share_path(folder, 1), TRIO, 1) for folder in (shared, tmp_path))
    assert one.sharing != two.sharing
    first, second = (shares_of(file)["lm_head.weight"].parts for file in (one, two))
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_bad_weight_leaves_no_files(tmp_path: Path) -> None:
    model = tiny.build("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(DomainError, match=r"weight 'lm_head.weight'"):
        share_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "out", TRIO)
    assert list((tmp_path / "out").iterdir()) == []


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_sharing_is_not_overwritten_by_itself(checkpoint: Path, tmp_path: Path) -> None:
    share_checkpoint(str(checkpoint), tmp_path, TRIO)
    before = snapshot(tmp_path)
    with pytest.raises(ShareFileError, match=r"client exists already: .*private-llm share --force"):
        share_checkpoint(str(checkpoint), tmp_path, TRIO)
    (tmp_path / "client").rename(tmp_path / "handed over")
    with pytest.raises(ShareFileError, match=r"party0\.safetensors exists already"):
        share_checkpoint(str(checkpoint), tmp_path, TRIO)
    (tmp_path / "handed over").rename(tmp_path / "client")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("left", [*PARTY_FILES, 3])
def test_one_file_of_a_sharing_is_enough_to_refuse(checkpoint: Path, tmp_path: Path, left: int) -> None:
    """Before a weight is read; also the file of a fourth party."""
    share_path(tmp_path, left).write_text("another sharing's")
    seen: list[str] = []
    with pytest.raises(ShareFileError, match=f"party{left}.safetensors exists already"):
        share_checkpoint(str(checkpoint), tmp_path, TRIO, progress=lambda name, *_: seen.append(name))
    assert not seen
    assert snapshot(tmp_path) == {f"party{left}.safetensors": b"another sharing's"}


def test_a_sharing_is_replaced_on_request(checkpoint: Path, tmp_path: Path) -> None:
    share_checkpoint(str(checkpoint), tmp_path, TRIO)
    first = ShareFile.open(share_path(tmp_path, 0), TRIO, 0).sharing
    share_path(tmp_path, 1).chmod(0o644)
    share_checkpoint(str(checkpoint), tmp_path, TRIO, overwrite=True)
    sharings = {ShareFile.open(share_path(tmp_path, p), TRIO, p).sharing for p in PARTY_FILES}
    assert len(sharings) == 1
    assert first not in sharings
    assert stat.S_IMODE(share_path(tmp_path, 1).stat().st_mode) == 0o600
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("ending", ["partial", "safetensors"])
def test_no_share_is_written_through_a_link(checkpoint: Path, tmp_path: Path, ending: str) -> None:
    """Somebody who may write to the folder put a link where a file will be made."""
    victim, out = tmp_path / "victim", tmp_path / "out"
    out.mkdir()
    victim.write_text("precious")
    link = out / f"party1.{ending}"
    link.symlink_to(victim)
    with pytest.raises(ShareFileError, match=f"party1.{ending} exists already"):
        share_checkpoint(str(checkpoint), out, TRIO)
    assert list(out.iterdir()) == [link]
    share_checkpoint(str(checkpoint), out, TRIO, overwrite=True)
    assert victim.read_text() == "precious"
    assert not share_path(out, 1).is_symlink()


def test_a_link_to_nowhere_is_no_free_name(checkpoint: Path, tmp_path: Path) -> None:
    share_path(tmp_path, 2).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ShareFileError, match=r"party2\.safetensors exists already"):
        share_checkpoint(str(checkpoint), tmp_path, TRIO)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_anyone_may_read_is_not_filled(checkpoint: Path, tmp_path: Path) -> None:
    """A file that was cut off, or was put there to be read later: its rights would stay as they are."""
    waiting = tmp_path / "party2.partial"
    waiting.touch(0o666)
    with pytest.raises(ShareFileError, match=r"party2\.partial exists already: .*cut off"):
        share_checkpoint(str(checkpoint), tmp_path, TRIO)
    with waiting.open("rb") as reader:
        share_checkpoint(str(checkpoint), tmp_path, TRIO, overwrite=True)
        assert reader.read() == b""
    assert all(stat.S_IMODE(share_path(tmp_path, p).stat().st_mode) == 0o600 for p in PARTY_FILES)


def test_a_name_taken_meanwhile_leaves_no_sharing(checkpoint: Path, tmp_path: Path) -> None:
    """All files take their names, or none."""

    def meanwhile(name: str, done: int, total: int) -> None:
        if done == total:
            share_path(tmp_path, 2).write_text("another's")

    with pytest.raises(ShareFileError, match=r"party2\.safetensors exists already"):
        share_checkpoint(str(checkpoint), tmp_path, TRIO, progress=meanwhile)
    assert snapshot(tmp_path) == {"party2.safetensors": b"another's"}


@pytest.mark.parametrize("error", [OSError("no tokenizer today"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(
        "private_llm_hf.checkpoint.checkpoint.Checkpoint.generation_config", failing
    )  # behind the last weight
    with pytest.raises(type(error)):
        share_checkpoint(str(checkpoint), tmp_path, TRIO)
    assert snapshot(tmp_path) == {}
    monkeypatch.undo()
    assert share_checkpoint(str(checkpoint), tmp_path, TRIO), "and the next try finds the folder free"


def test_an_old_sharing_survives_a_failed_new_one(tmp_path: Path) -> None:
    model = tiny.build("llama")
    model.save_pretrained(tmp_path / "checkpoint")
    share_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "out", TRIO)
    before = snapshot(tmp_path / "out")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(DomainError, match=r"weight 'lm_head.weight'"):
        share_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "out", TRIO, overwrite=True)
    assert snapshot(tmp_path / "out") == before


def test_large_tensors_go_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("private_llm.protocols.weight_sharing.PIECE", 256)
    tiny.build("opt").save_pretrained(tmp_path / "checkpoint")
    share_checkpoint(str(tmp_path / "checkpoint"), tmp_path, TRIO)
    parts = [shares_of(ShareFile.open(share_path(tmp_path, p), TRIO, p)) for p in PARTY_FILES]
    for name, weight in tiny.build("opt").state_dict().items():
        if name in parts[0]:
            masked, mask = parts[1][name].parts[0], parts[0][name].parts[1]
            assert torch.equal(masked - mask, torch.round(weight.double() * 2**18).to(torch.int64))
    assert not (tmp_path / "client" / "tokenizer.json").exists(), "a checkpoint without tokenizer gets none"


def test_progress_and_other_heads(tmp_path: Path) -> None:
    tiny.build("bert").save_pretrained(tmp_path / "checkpoint")
    seen: list[tuple[str, int, int]] = []
    paths = share_checkpoint(
        str(tmp_path / "checkpoint"), tmp_path / "out", PLAIN, AutoPrivateModel, lambda *line: seen.append(line)
    )
    assert len(paths) == 1
    assert [done for _, done, _ in seen] == list(range(1, seen[0][2] + 1))


def test_public_weights_need_no_share_files(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="weights='public'"):
        share_checkpoint(str(checkpoint), tmp_path, PrivateConfig(weights="public"), AutoPrivateModelForCausalLM)


def test_the_header_is_plain_safetensors(shared: Path) -> None:
    with safe_open(share_path(shared, 1), framework="pt") as stored:
        metadata = stored.metadata()
        assert json.loads(metadata["description"])["class"] == "LlamaForCausalLM"
        assert stored.get_tensor("lm_head.weight").dtype == torch.int64


def test_a_link_where_the_client_s_folder_belongs_is_refused(tmp_path: Path) -> None:
    source, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    tiny.build("llama").save_pretrained(source)
    elsewhere.mkdir()
    (tmp_path / "shares").mkdir()
    (tmp_path / "shares" / "client").symlink_to(elsewhere)
    with pytest.raises(ShareFileError, match="is a link or a file"):
        share_checkpoint(str(source), tmp_path / "shares", overwrite=True)
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shapes", "[]"),
        ("shapes", '{"lm_head.weight": [-1, 64]}'),
        ("shapes", '{"lm_head.weight": ["x"]}'),
        ("keys", '["zz"]'),
        ("keys", "[]"),
        ("keys", "[" * 5000),
        ("agreement", "{}"),
        ("description", '{"class": 3, "config": {}, "model": "", "ranges": {}}'),
        ("description", '{"class": "X", "config": {}, "model": "", "ranges": {"x": 1}}'),
        ("party", "\x1b[2J"),
        ("sharing", None),
    ],
)
def test_a_header_of_another_program_with_a_digest_that_fits(
    shared: Path, tmp_path: Path, name: str, text: str | None
) -> None:
    path = tmp_path / "party1.safetensors"
    raw = share_path(shared, 1).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    metadata = header["__metadata__"]
    metadata.pop(name)
    metadata |= {} if text is None else {name: text}
    metadata["digest"] = _digest(metadata, OpenedFile(share_path(shared, 1)).digests())
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[8 + size :])
    with pytest.raises(ShareFileError, match="its header is malformed"):
        ShareFile.open(path, TRIO, 1)


def _flip(path: Path, name: str) -> None:
    """One bit of a weight, and the times of the file as before."""
    before, place = path.stat(), OpenedFile(path).entries[name][2]
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _cut(path: Path, name: str) -> None:
    os.truncate(path, OpenedFile(path).entries[name][2])


def _rewrite(path: Path, name: str) -> None:
    path.write_bytes(path.read_bytes())


@pytest.mark.parametrize("change", [_flip, _cut, _rewrite])
@pytest.mark.parametrize("first", [True, False])
def test_a_change_under_a_party_is_noticed(
    shared: Path, tmp_path: Path, change: Callable[[Path, str], None], first: bool
) -> None:
    path = Path(shutil.copy(share_path(shared, 1), share_path(tmp_path, 1)))
    file = ShareFile.open(path, TRIO, 1)
    name = next(iter(file.shapes))
    if not first:
        file.weight(name)
    change(path, name)
    with pytest.raises(ShareFileError, match=r"was changed while it was in use|became shorter while it was in use"):
        file.weight(name)


def test_a_mapped_file_is_changed_without_its_times(shared: Path, tmp_path: Path) -> None:
    """A page that was written before is written again, and no time changes; the digest does."""
    path = Path(shutil.copy(share_path(shared, 1), share_path(tmp_path, 1)))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[-1] = mapped[-1]
        opened = ShareFile.open(path, TRIO, 1)
        last = max(opened.stored.entries, key=lambda name: opened.stored.entries[name][2])
        mapped[-1] ^= 1
        with pytest.raises(ShareFileError, match="was changed while it was in use"):
            opened.weight(last)


def test_another_file_of_the_same_name_is_not_read(shared: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(share_path(shared, 1), share_path(tmp_path, 1)))
    file = ShareFile.open(path, TRIO, 1)
    want = shares_of(ShareFile.open(share_path(shared, 1), TRIO, 1))
    (tmp_path / "other").write_bytes(bytes(path.stat().st_size))
    (tmp_path / "other").replace(path)
    for name, share in shares_of(file).items():
        assert all(torch.equal(part, other) for part, other in zip(share.parts, want[name].parts, strict=True))


@pytest.mark.timeout(10)
def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes((1 << 40).to_bytes(8, "little"))
    with pytest.raises(ShareFileError, match="damaged or unknown"):
        ShareFile.open(tmp_path / "short", TRIO, 1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        OpenedFile(tmp_path / "pipe")
