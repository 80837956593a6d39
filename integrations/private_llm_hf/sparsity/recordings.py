"""Inputs and activity of a site on disk: float16 rows and packed bits in two files that are mapped, not read.

A folder of a site holds inputs.f16 [rows, width], active.bits [rows, ceil(units / 8)] (little-endian bits) and, once
complete, site.json. 2 width + units / 8 bytes a position.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from private_llm.errors import ConfigError, DomainError
from private_llm_hf.sparsity.sites import Site

VERSION = 1
_INPUTS, _BITS, _FACTS = "inputs.f16", "active.bits", "site.json"
_LARGEST = 65504.0


class RecordingWriter:
    """Appends positions to a new recording; complete after `with`. A recording that was there is replaced."""

    def __init__(self, folder: Path, site: Site, facts: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FACTS).unlink(missing_ok=True)
        self._folder, self._site, self._facts, self.rows = folder, site, facts, 0
        self._inputs = (folder / _INPUTS).open("wb")
        self._bits = (folder / _BITS).open("wb")

    def add(self, inputs: Tensor, active: Tensor) -> None:
        """Rows [N, width] and bool [N, units]. Raises DomainError for inputs that float16 cannot hold, or NaN."""
        if inputs.shape != (len(active), self._site.width) or active.shape[1] != self._site.units:
            raise DomainError(
                f"site '{self._site.name}': got inputs {tuple(inputs.shape)} and activity {tuple(active.shape)}; want "
                f"[N, {self._site.width}] and [N, {self._site.units}]"
            )
        if not bool((inputs.abs() <= _LARGEST).all()):
            raise DomainError(f"site '{self._site.name}': an input is NaN or above {_LARGEST:g}; is the model sound?")
        self._inputs.write(inputs.to("cpu", torch.float16).contiguous().numpy().tobytes())
        self._bits.write(np.packbits(active.cpu().numpy(), axis=1, bitorder="little").tobytes())
        self.rows += len(active)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        self._inputs.close()
        self._bits.close()
        if kind is None:
            facts = {"version": VERSION, "site": self._site.to_dict(), "rows": self.rows, **self._facts}
            (self._folder / _FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")


class Recording:
    """A complete recording. Rows are read when asked for. Raises ConfigError for a folder that holds none."""

    def __init__(self, folder: Path) -> None:
        path = folder / _FACTS
        if not path.exists():
            raise ConfigError(f"{folder}: no complete recording; record the activity of a model first")
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts.get("version") != VERSION:
            raise ConfigError(f"{folder}: recording of version {facts.get('version')!r}; want {VERSION}: record again")
        self.site = Site.from_dict(facts["site"])
        self.model: str = facts["model"]
        self.tolerance: float = facts["tolerance"]
        self._rows: int = facts["rows"]
        self._inputs = self._map(folder / _INPUTS, np.float16, self.site.width)
        self._bits = self._map(folder / _BITS, np.uint8, -(-self.site.units // 8))

    def __len__(self) -> int:
        return self._rows

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs, float32 [N, width], and activity, bool [N, units], of these row numbers [N]."""
        picked = rows.numpy()
        bits = np.unpackbits(self._bits[picked], axis=1, count=self.site.units, bitorder="little")
        return torch.from_numpy(self._inputs[picked]).float(), torch.from_numpy(bits).bool()

    def batches(self, rows: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """`read`, some rows at a time."""
        for part in rows.split(size):
            yield self.read(part)

    def _map(self, path: Path, kind: type[Any], width: int) -> npt.NDArray[Any]:
        size = self._rows * width * np.dtype(kind).itemsize
        if path.stat().st_size != size:
            raise ConfigError(f"{path}: {path.stat().st_size} bytes; want {size}: record again")
        if not size:
            return np.zeros((self._rows, width), kind)
        return np.memmap(path, kind, "r", shape=(self._rows, width))


def recordings(folder: Path) -> list[Recording]:
    """All complete recordings below a folder, in the order in which the model runs them.

    Raises ConfigError if there are none, and for incomplete ones or those of another version.
    """
    order = json.loads((folder / "order.json").read_text(encoding="utf-8")) if (folder / "order.json").exists() else []
    if not order:
        raise ConfigError(f"{folder}: no recordings; record the activity of a model first")
    return [Recording(folder / name) for name in order]
