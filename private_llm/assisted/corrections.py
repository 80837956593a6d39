"""Products of masks that were made beforehand, so that one server suffices while a model runs: a folder of blocks.

A block has a random name, a key of masks that nothing else uses, and W r for so many mask rows r of every weight W. A
session claims a block: it renames the file, which one session alone can do, reads and deletes it, and the folder is
synced, all before the first row is used. A crash in between loses the block. Within a session the streams of masks run
forward only, so each row is given out once. A folder or machine that was restored from a copy brings blocks back:
the online server, which gets masked rows, is told the name of each block and refuses one that it has heard before.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from private_llm.errors import ConfigError, CorrectionsUsedUp, ProtocolAbort, ShareFileError, undoing
from private_llm.forks import Origin
from private_llm.net.addresses import parse_address
from private_llm.ring.prg import Prg, Seed
from private_llm.ring.ring import Ring

_BLOCK = re.compile(r"[0-9a-f]{32}-(\d+)\.safetensors")
"""A block's name, and its rows."""
_MOST_HEADER = 1 << 26

_OLD_S = 86400.0
"""Age of files that nobody writes or reads any more."""

_KEPT = 256
"""Rows of a weight, or as many as the largest call had, that wait in memory at most; those of before are dropped."""


@dataclass(frozen=True)
class BlockFacts:
    """What a block says of itself. name: a digest of key. rows: of every weight. key: of its masks (`mask_label`).
    digests: of the weights. preparer: the address of who computed it; "" for the client's own machine. weight_bits:
    `PrivateConfig.weight_bits`.
    """

    name: str
    rows: int
    key: Seed
    digests: Mapping[str, str]
    preparer: str
    weight_bits: int = 16

    @classmethod
    def fresh(cls, rows: int, digests: Mapping[str, str], preparer: str, weight_bits: int) -> "BlockFacts":
        """Of a new block."""
        key = Seed.fresh()
        return cls(_name_of(key), rows, key, digests, preparer, weight_bits)


def _name_of(key: Seed) -> str:
    """The name of the block with this key, so that no key comes under two names."""
    return hashlib.sha256(b"block of corrections" + key.raw()).hexdigest()[:32]


class CorrectionFolder:
    """A folder of blocks, which any number of sessions and preparations may use at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def made(cls, path: str | Path) -> "CorrectionFolder":
        """The folder, its owner's alone, without what crashes left. Raises ConfigError for one that others may open."""
        folder = cls(path)
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.path.stat().st_mode & 0o077:
            raise ConfigError(f"corrections: others may open {path}; want a folder of mode 0700 (chmod 700 {path})")
        for left in (*folder.path.glob("*.part"), *folder.path.glob("*.claimed")):
            with contextlib.suppress(FileNotFoundError):  # another session's, which just ended with it
                if time.time() - left.stat().st_mtime > _OLD_S:
                    left.unlink()
        return folder

    def rows(self) -> int:
        """Of every weight, in blocks that nobody claimed."""
        return sum(rows for _, rows in self._waiting())

    def _waiting(self) -> list[tuple[Path, int]]:
        named = ((path, _BLOCK.fullmatch(path.name)) for path in self.path.glob("*"))
        return sorted((path, int(found[1])) for path, found in named if found)

    def add(self, facts: BlockFacts, products: Mapping[str, Tensor]) -> None:
        """Store a block: by weight its products, packed, uint8 [rows, 5 or 4 outputs]. Whole, or not at all."""
        said = {
            "name": facts.name, "key": facts.key.raw().hex(), "preparer": facts.preparer,
            "digests": json.dumps(dict(facts.digests)), "weight_bits": str(facts.weight_bits),
        }  # fmt: skip
        path = self.path / f"{facts.name}-{facts.rows}.safetensors"
        part = path.with_suffix(".part")
        with undoing(lambda: part.unlink(missing_ok=True)):
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(save(dict(products), said))
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
        sync_folder(self.path)

    def facts(self) -> BlockFacts | None:
        """Of the block that is claimed next, if there is one. Raises ShareFileError for a damaged file."""
        for path, rows in self._waiting():
            with contextlib.suppress(FileNotFoundError):  # another session claimed it
                return _read(path, rows)[0]
        return None

    def claim(self, fits: Callable[[BlockFacts], None]) -> tuple[BlockFacts, dict[str, Tensor]] | None:
        """A block that is here no more, and that nobody else gets; None if there is none left.

        fits: raises for a block that shall stay. Raises ShareFileError for a damaged file.
        """
        for path, rows in self._waiting():
            with contextlib.suppress(FileNotFoundError):  # another session was faster
                fits(_read(path, rows)[0])
                mine = path.with_name(f"{path.stem}.{secrets.token_hex(4)}.claimed")
                path.rename(mine)
                sync_folder(self.path)
                try:
                    return _read(mine, rows, whole=True)
                finally:
                    mine.unlink(missing_ok=True)
                    sync_folder(self.path)
        return None


def _read(path: Path, rows: int, whole: bool = False) -> tuple[BlockFacts, dict[str, Tensor]]:
    """whole: with its products. By one open file, as sessions beside this one rename it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ShareFileError(f"{path}: {error.strerror}; delete it") from None
    with os.fdopen(descriptor, "rb") as file:
        try:
            begin = 8 + int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(begin, _MOST_HEADER) - 8))
            said = header.pop("__metadata__")
            key, digests = Seed(bytes.fromhex(said["key"])), json.loads(said["digests"])
            if os.fstat(file.fileno()).st_size != begin + max(each["data_offsets"][1] for each in header.values()):
                raise ValueError("it is not whole")
            if said["name"] != _name_of(key) or not path.name.startswith(said["name"]):
                raise ValueError("its name is not that of its key")
            if any(each["dtype"] != "U8" or each["shape"][0] != rows for each in header.values()):
                raise ValueError(f"it has not {rows} rows of bytes of each weight")
            bits = int(said.get("weight_bits", 16))
            facts = BlockFacts(said["name"], rows, key, {**digests}, said["preparer"], bits)
            if header.keys() != facts.digests.keys():
                raise ValueError("it lacks products of a weight")
            file.seek(0)
            return facts, load(file.read()) if whole else {}
        except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise ShareFileError(f"{path}: no block of corrections, or a damaged one ({error}); delete it") from None


def _places(hosts: Collection[str]) -> set[object]:
    """Addresses under all their names, as far as they can be looked up."""
    found: set[object] = {host.lower() for host in hosts}
    for host in hosts:
        with contextlib.suppress(OSError):
            found |= {each[4][:2] for each in socket.getaddrinfo(*parse_address(host), type=socket.SOCK_STREAM)}
    return found


def sync_folder(path: Path) -> None:
    """Let what was renamed, made or deleted in a folder outlast a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mask_label(name: str) -> str:
    """The label of a weight's masks in every block: a weight's name may be too long for one."""
    return hashlib.sha256(name.encode()).hexdigest()


class _MaskRows:
    """The rows of one weight in a block that nobody took yet."""

    def __init__(self, masks: Prg, products: Tensor, inputs: int, preparer: str) -> None:
        self._masks, self._products, self._inputs, self.preparer = masks, products, inputs, preparer
        self._odd = torch.empty(0, dtype=torch.int64)  # streams give two elements at a time
        self.left = len(products)

    def take(self, rows: int) -> tuple[Tensor, Tensor]:
        count, left = rows * self._inputs, self.left - rows
        first, self.left = len(self._products) - self.left, 0  # whoever is interrupted here loses all of them
        short = count - len(self._odd)
        drawn = torch.cat([self._odd, self._masks.elements(short + short % 2, Ring(64))])
        self._odd, self.left = drawn[count:], left
        return drawn[:count].view(rows, self._inputs), self._products[first : first + rows]


@dataclass(frozen=True)
class TakenRows:
    """masks: int64 [rows, inputs]. by_row: their products, packed, uint8 [rows, 5 or 4 outputs]. source: of these."""

    masks: Tensor
    by_row: Tensor
    source: str

    @property
    def products(self) -> Tensor:
        """As a server sends them, flat."""
        return self.by_row.reshape(-1)

    def part(self, first: int, rows: int) -> "TakenRows":
        """At most so many of them."""
        end = first + rows
        return TakenRows(self.masks[first:end], self.by_row[first:end], self.source)


class Corrections:
    """What one session takes from a folder: masks and their products, each row once. Not thread-safe."""

    def __init__(
        self, folder: str | Path, announce: Callable[[str], bool], online: Collection[str] = (), weight_bits: int = 16
    ) -> None:
        """announce: tells the online server the name of a block; whether it is new there. online: its address, from
        which no block is taken, because it knows the masks of those that it made. weight_bits: of this session.
        """
        self._weight_bits = weight_bits
        self.folder, self._announce, self._online = CorrectionFolder.made(folder), announce, online
        self._origin = Origin()
        self.digests: dict[str, str] = {}
        self._inputs: dict[str, int] = {}
        self._ready: dict[str, deque[_MaskRows]] = {}
        self._used: Counter[str] = Counter()
        self._most = _KEPT

    def expect(self, name: str, digest: str, inputs: int) -> None:
        """A weight that rows will be taken of: its digest (`lines_digest`) and how many inputs it has.

        Raises ShareFileError naming it if what is stored belongs to another, ConfigError for blocks of the server's.
        """
        self.digests[name], self._inputs[name] = digest, inputs
        self._ready[name] = deque()
        found = self.folder.facts()
        if found is not None:
            self._check(found, [name])

    def _check(self, found: BlockFacts, names: Collection[str]) -> None:
        if found.weight_bits != self._weight_bits:
            raise ShareFileError(
                f"{self.folder.path} holds corrections for weights of {found.weight_bits} bits, and weight_bits is "
                f"{self._weight_bits}; prepare with the same weight_bits in a folder of its own"
            )
        other = [name for name in names if found.digests.get(name) != self.digests.get(name)]
        if other:
            raise ShareFileError(
                f"{self.folder.path} holds corrections of another checkpoint: weight {other[0]!r} differs; prepare "
                "for this model in a folder of its own"
            )
        if found.preparer and _places([found.preparer]) & _places(self._online):
            raise ConfigError(
                f"hosts: {found.preparer} made corrections in {self.folder.path}, so it knows these masks and must not "
                "see rows under them; want another server"
            )

    def left(self) -> int:
        """Rows that this session may still take of every weight."""
        return self.folder.rows() + min((self._held(name) for name in self._ready), default=0)

    def _held(self, name: str) -> int:
        return sum(rows.left for rows in self._ready[name])

    def take(self, name: str, rows: int) -> TakenRows:
        """So many rows of a weight.

        Raises CorrectionsUsedUp, and takes nothing, if there are fewer; ProtocolAbort in a fork and for a block that
        was used before; else as `expect`.
        """
        self._origin.demand("what this session took of its corrections")
        held, self._most = self._held(name), max(rows, self._most)
        if held + (self.folder.rows() if held < rows else 0) < rows:
            raise self._used_up(name, rows)
        while self._held(name) < rows:
            self._claim(name, rows)
        taken, preparers = [], []
        for count, first in self._first(name, rows):
            taken.append(first.take(count))
            preparers.append(first.preparer or "this machine")
        self._used[name] += rows
        masks, products = zip(*taken, strict=True)
        source = f"the preparation by {' and '.join(dict.fromkeys(preparers))}"
        return TakenRows(torch.cat(masks), torch.cat(products), source)

    def _first(self, name: str, rows: int) -> Iterator[tuple[int, _MaskRows]]:
        ready = self._ready[name]
        while rows:
            if not ready[0].left:
                ready.popleft()
                continue
            count = min(rows, ready[0].left)
            yield count, ready[0]
            rows -= count

    def _claim(self, name: str, rows: int) -> None:
        claimed = self.folder.claim(lambda facts: self._check(facts, {*facts.digests, *self.digests}))
        if claimed is None:
            raise self._used_up(name, rows)
        facts, products = claimed
        if not self._announce(facts.name):
            raise ProtocolAbort(
                f"a block of corrections in {self.folder.path} was used before, so that folder or this machine was "
                "restored from a copy; masks must never repeat: delete the folder and prepare anew"
            )
        for each, ready in self._ready.items():
            ready.append(
                _MaskRows(facts.key.stream(mask_label(each)), products[each], self._inputs[each], facts.preparer)
            )
            while each != name and self._held(each) - ready[0].left >= self._most:  # a head reads one row of a prompt
                ready.popleft()

    def _used_up(self, name: str, rows: int) -> CorrectionsUsedUp:
        return CorrectionsUsedUp(
            f"corrections: {name.partition('+')[0]!r} wants {rows} rows; this session used {self._used[name]}, and "
            f"{self._held(name) + self.folder.rows()} are left in {self.folder.path}. Make more with `private-llm "
            f"prepare MODEL --corrections {self.folder.path} --tokens N`, then call again"
        )
