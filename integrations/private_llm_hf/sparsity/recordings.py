"""Inputs and activity of a site on disk: float16 rows and packed bits in two files that are mapped, not read.

A folder of a site holds inputs.f16 [rows, width], active.bits [rows, ceil(units / 8)] (little-endian bits) and, once
complete, site.json. 2 width + units / 8 bytes a position.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from private_llm.errors import ConfigError, DomainError
from private_llm_hf.checkpoint.model_spec import describe
from private_llm_hf.checkpoint.sample_inputs import evaluating
from private_llm_hf.sparsity.predictor import HeadActivity, active_neurons
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
    """Recordings below a folder, as the model runs them. Raises ConfigError for none, incomplete and other ones."""
    order = json.loads((folder / "order.json").read_text(encoding="utf-8")) if (folder / "order.json").exists() else []
    if not order:
        raise ConfigError(f"{folder}: no recordings; record the activity of a model first")
    return [Recording(folder / name) for name in order]


# -- Running a model on text or images and recording, at every site, the input and what became active -----------------
_MASKS = ("attention_mask", "decoder_attention_mask")


def record(
    model: PreTrainedModel, sites: Iterable[Site], batches: Iterable[Mapping[str, Any]], folder: Path,
    tolerance: float = 0.1, most_rows: int | None = None, seen: Callable[[int], None] | None = None,
) -> int:  # fmt: skip
    """Write recordings of sites below `folder`; the positions of the longest. batches: arguments of calls, unpadded.
    seen: told the positions so far. In memory: one batch. Raises DomainError for padding, and beyond float16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(sites)
    (folder / "order.json").unlink(missing_ok=True)
    facts = {"model": describe(type(model), model.config).model, "tolerance": tolerance}
    with ExitStack() as stack:
        writers = [stack.enter_context(RecordingWriter(folder / site.name, site, facts)) for site in wanted]
        for site, writer in zip(wanted, writers, strict=True):
            _listen(model, site, writer, tolerance, most_rows, stack)
        stack.enter_context(evaluating(model))
        device = next(model.parameters()).device
        for batch in batches:
            _refuse_padding(batch)
            with torch.no_grad():
                model(**{name: v.to(device) if isinstance(v, Tensor) else v for name, v in batch.items()})
            rows = max(writer.rows for writer in writers)
            if seen is not None:
                seen(rows)
            if most_rows is not None and min(writer.rows for writer in writers) >= most_rows:
                break
    (folder / "order.json").write_text(json.dumps([site.name for site in wanted]), encoding="utf-8")
    return max(writer.rows for writer in writers)


def _listen(
    model: PreTrainedModel, site: Site, writer: RecordingWriter, tolerance: float, most: int | None, stack: ExitStack
) -> None:
    """Hooks: the first reader brings the input, what the writer layer receives tells the activity."""
    last = model.get_submodule(site.writer)
    find = active_neurons if site.kind == "ffn" else HeadActivity(last, site.units, tolerance)
    inputs: list[Tensor] = []

    def begin(_: nn.Module, received: tuple[Any, ...]) -> None:
        inputs.append(received[0].flatten(0, -2))

    def end(_: nn.Module, received: tuple[Any, ...]) -> None:
        left = None if most is None else max(0, most - writer.rows)
        writer.add(inputs.pop()[:left], find(received[0].flatten(0, -2))[:left])

    stack.callback(model.get_submodule(site.readers[0]).register_forward_pre_hook(begin).remove)
    stack.callback(last.register_forward_pre_hook(end).remove)


def _refuse_padding(batch: Mapping[str, Any]) -> None:
    for name in _MASKS:
        mask = batch.get(name)
        if isinstance(mask, Tensor) and not bool(mask.bool().all()):
            raise DomainError(f"{name}: got padded rows; want rows of one length, without padding")
