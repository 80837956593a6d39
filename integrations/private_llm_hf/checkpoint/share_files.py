"""Share files: one safetensors file per party with its shares of a model, written and read tensor by tensor.

A file holds the party's mask seeds in its metadata (the format names their cipher) and, for the evaluators, one masked
tensor per weight; party 0's file is a header. It is as secret as the party (mode 0600). Metadata name format, party,
model, protocol and the sharing (a random number), so that a file of another one is refused; a digest catches damage.

Headers come first, laid out from the model's shapes, with space for the digest. Files are new, follow no link, and take
their names when all of them are whole: a sharing is there for all parties or for none, and one that was there before is
touched only if that is asked for.
"""

import contextlib
import hashlib
import json
import math
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from private_llm.config import PrivateConfig
from private_llm.errors import ConfigError, ShareFileError, undoing
from private_llm.net.roles import named
from private_llm.protocols.share import Share
from private_llm.protocols.weight_sharing import Dealer, assemble, keys_held, mask_cipher, pieces, sends_parts
from private_llm.ranges import Ranges
from private_llm.ring.prg import Seed
from private_llm.ring.ring import Ring
from private_llm_hf.checkpoint import share_path as share_path
from private_llm_hf.checkpoint.offload import OpenedFile
from private_llm_hf.checkpoint.weights import WeightList, encode_weight
from private_llm_hf.wire.codec import shown
from private_llm_hf.wire.commands import Description

FORMATS = {"private-llm share file 2": "aes", "private-llm share file 3": "chacha20"}  # with their masks' cipher
_AGREE = ("protocol", "ring", "frac_bits")
_BLANK = "0" * 64
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, ConfigError)
"""What reading JSON of another form than one's own raises."""


class ShareWriter:
    """Writes the files of all parties; use as a context manager and pass it each weight once, in any order."""

    def __init__(
        self, folder: Path, config: PrivateConfig, description: Description, wanted: WeightList, overwrite: bool = False
    ) -> None:
        """overwrite: replace another sharing's files. Raises ShareFileError if there are some and it is not set."""
        folder.mkdir(parents=True, exist_ok=True)
        self._config, self._ring = config, Ring(config.ring)
        self._dealer, self._ranges = Dealer(config), Ranges(description.ranges)
        self._missing = set(wanted.shapes)
        self.paths = [share_path(folder, party) for party in range(config.parties)]
        self._overwrite = overwrite
        if not overwrite:
            refuse_taken(*sorted(folder.glob("party*.safetensors")))  # a link to nowhere, too
        self._files: list[_Out] = []
        common = {
            "format": next(form for form, cipher in FORMATS.items() if cipher == mask_cipher(config)),
            "sharing": secrets.token_hex(16),
            "description": json.dumps(description.to_dict()),
            "agreement": json.dumps({key: getattr(config, key) for key in _AGREE}),
            "shapes": json.dumps(wanted.shapes),
        }
        with undoing(self._discard):
            for party, path in enumerate(self.paths):
                keys = json.dumps([seed.raw().hex() for seed in self._dealer.keys(party)])
                if overwrite:
                    partial_path(path).unlink(missing_ok=True)
                shapes = wanted.shapes if sends_parts(config, party) else {}
                metadata = {**common, "party": str(party), "keys": keys}
                self._files.append(_Out(partial_path(path), metadata, shapes, self._ring))

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Share one weight. Raises DomainError with its name if the ring cannot hold it."""
        sharing, frac = self._dealer.begin(name), self._ranges.frac_of_weight(name, self._config.frac_bits)
        for piece in pieces(tensor):
            elements = encode_weight(name, piece, self._ring, frac)
            for out, part in zip(self._files, sharing.deal(elements), strict=True):
                if part is not None:
                    out.append(name, part)
        self._missing.discard(name)

    def __enter__(self) -> "ShareWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._missing:
                missing = ", ".join(sorted(self._missing)[:20])
                raise ShareFileError(f"not every weight was shared; missing: {missing}")
            if kind is None:
                for out in self._files:
                    out.finish()
                self._publish()
        finally:
            self._discard()

    def _publish(self) -> None:
        with contextlib.ExitStack() as undo:
            for path in self.paths:
                if not self._overwrite:
                    os.close(_create(path))  # now the name is ours to replace, and nobody else's file
                    undo.callback(path.unlink, missing_ok=True)
            for path in self.paths:
                partial_path(path).replace(path)
            undo.pop_all()

    def _discard(self) -> None:
        """Close all files, and delete what has not taken its name."""
        for out in self._files:
            out.discard()


def _dtype(ring: Ring) -> str:
    return f"I{ring.bits}"  # as safetensors calls them


def partial_path(path: Path) -> Path:
    """Where a share file is written before it is whole."""
    return path.with_suffix(".partial")


def refuse_taken(*paths: Path) -> None:
    """Raises ShareFileError if one of them is there, even if it is a link to nowhere."""
    for path in paths:
        if os.path.lexists(path):
            raise _taken(path)


def _taken(path: Path) -> ShareFileError:
    return ShareFileError(
        f"{path} exists already: a sharing, or what one that was cut off has left, and no sharing is overwritten by "
        "itself; choose an empty folder, or say overwrite=True (`private-llm share --force`)"
    )


def _create(path: Path) -> int:
    """A new file that only its owner may open. Raises ShareFileError for a name that is taken, be it by a link."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise _taken(path) from None
    except OSError as error:
        raise ShareFileError(f"{path} cannot be written: {error.strerror}; choose another folder") from None


class _Out:
    """One safetensors file, written where its header says."""

    def __init__(self, path: Path, metadata: dict[str, str], shapes: dict[str, tuple[int, ...]], ring: Ring) -> None:
        self._path, self._metadata = path, metadata
        header: dict[str, Any] = {"__metadata__": {**metadata, "digest": _BLANK}}
        self._next: dict[str, int] = {}
        self._hashes: dict[str, hashlib.blake2b] = {}
        end = 0
        for name, shape in shapes.items():
            start = end
            end += math.prod(shape) * ring.bytes
            self._next[name] = start
            self._hashes[name] = hashlib.blake2b(digest_size=32)
            header[name] = {"dtype": _dtype(ring), "shape": list(shape), "data_offsets": [start, end]}
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        self._blank_at = 8 + raw.index(f'"digest": "{_BLANK}"'.encode()) + len('"digest": "')
        self._data_at = 8 + len(raw)
        self._file = os.fdopen(_create(path), "r+b")
        with undoing(self.discard):
            self._file.write(len(raw).to_bytes(8, "little") + raw)
            self._file.truncate(self._data_at + end)

    def append(self, name: str, part: Tensor) -> None:
        raw = part.contiguous().numpy().data
        self._hashes[name].update(raw)
        self._file.seek(self._data_at + self._next[name])
        self._file.write(raw)
        self._next[name] += raw.nbytes

    def finish(self) -> None:
        self._file.seek(self._blank_at)
        parts = {name: made.digest() for name, made in self._hashes.items()}
        self._file.write(_digest(self._metadata, parts).encode())
        self._file.close()

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written (a full disk) is not missed
            self._file.close()
        self._path.unlink(missing_ok=True)


def _digest(metadata: dict[str, str], parts: dict[str, bytes]) -> str:
    """Over all metadata but the digest itself, and every tensor."""
    stated = json.dumps({key: value for key, value in metadata.items() if key != "digest"}, sort_keys=True)
    data = b"".join(name.encode() + b"\0" + parts[name] for name in sorted(parts))
    return hashlib.blake2b(stated.encode() + b"\0" + data, digest_size=32).hexdigest()


def _facts(metadata: dict[str, str]) -> tuple[dict[str, tuple[int, ...]], tuple[Seed, ...], Description]:
    shapes = {name: tuple(shape) for name, shape in json.loads(metadata["shapes"]).items()}
    if not all(type(size) is int and 0 <= size < 1 << 40 for shape in shapes.values() for size in shape):
        raise ValueError("sizes out of range")
    cipher = FORMATS[metadata["format"]]
    keys = tuple(Seed(bytes.fromhex(raw), cipher) for raw in json.loads(metadata["keys"]))
    description = Description.from_dict(json.loads(metadata["description"]))
    kinds = (type(description.class_), type(description.config), type(description.model))
    if kinds != (str, dict, str):
        raise TypeError("a description of other types")
    Ranges(description.ranges)
    if not all(type(name) is str for names in description.folded.values() for name in names):
        raise TypeError("names of folded norms of other types than text")
    return shapes, keys, description


def _unlike(path: Path, why: str) -> ShareFileError:
    return ShareFileError(
        f"{path.name}: its header is malformed ({why}); want a share file of this program, so make it again"
    )


@dataclass(frozen=True)
class ShareFile:
    """A checked share file of one party; weights are read when they are asked for, of the file that was checked."""

    path: Path
    config: PrivateConfig
    party: int
    description: Description
    sharing: str
    shapes: dict[str, tuple[int, ...]]
    keys: tuple[Seed, ...]
    stored: OpenedFile

    @classmethod
    def open(cls, path: Path, config: PrivateConfig, party: int) -> "ShareFile":
        """Check everything about a file. Raises ShareFileError saying what does not fit."""
        if not path.is_file():
            raise ShareFileError(f"{path.name}: no such file; make share files with `private-llm share`")
        try:
            stored = OpenedFile(path)
            metadata = stored.metadata
            form = metadata.get("format")
            parts = stored.digests() if form in FORMATS else {}
        except (OSError, *_MALFORMED) as error:
            raise ShareFileError(f"{path.name}: damaged or unknown ({type(error).__name__}); copy it again") from None
        if form not in FORMATS:
            raise ShareFileError(f"{path.name}: got format {shown(form)}; want {' or '.join(map(repr, FORMATS))}")
        if _digest(metadata, parts) != metadata.get("digest"):
            raise ShareFileError(f"{path.name} is damaged: its data does not match its digest; copy it again")
        stored.check()
        try:
            settings, sharing, owner = json.loads(metadata["agreement"]), metadata["sharing"], int(metadata["party"])
            given = {key: settings[key] for key in _AGREE}
            shapes, keys, description = _facts(metadata)
        except _MALFORMED as error:
            raise _unlike(path, type(error).__name__) from None
        if owner != party:
            raise ShareFileError(named(config, f"{path.name} belongs to party {owner}; this is party {party}"))
        here = {key: getattr(config, key) for key in _AGREE}
        wrong = [f"{key}={shown(given[key])} (here {here[key]!r})" for key in _AGREE if given[key] != here[key]]
        if wrong:
            raise ShareFileError(f"{path.name} was made for other settings: {', '.join(wrong)}")
        ring = Ring(config.ring)
        found = {name: (kind, shape, size) for name, (kind, shape, _, size) in stored.entries.items()}
        wanted = {name: (_dtype(ring), shape, math.prod(shape) * ring.bytes) for name, shape in shapes.items()}
        if found != (wanted if sends_parts(config, party) else {}) or len(keys) != keys_held(config, party):
            raise _unlike(path, "it has other weights or keys than it says")
        return cls(path, config, party, description, sharing, shapes, keys, stored)

    @property
    def cipher(self) -> str | None:
        """The cipher of its masks; None without masks."""
        return self.keys[0].cipher if self.keys else None

    def weight(self, name: str, seeds: bool = False) -> Share:
        """This party's share of one weight: read, and masked from seeds (anew at every reading, for matrices with
        `seeds`, see `weight_sharing.assemble`). Raises ShareFileError if the file has changed since it was opened.
        """
        shape, received = self.shapes[name], None
        self.stored.check()
        if name in self.stored.entries:
            received = self.stored.read(name, Ring(self.config.ring).dtype)
        return assemble(self.config, self.party, list(self.keys), received, shape, name, seeds)
