"""Running a model on text or images and recording, at every site, the input and what became active."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from private_llm.errors import DomainError
from private_llm_hf.checkpoint.model_spec import describe
from private_llm_hf.sparsity.activity import HeadActivity, active_neurons
from private_llm_hf.sparsity.recordings import RecordingWriter
from private_llm_hf.sparsity.sites import Site

_MASKS = ("attention_mask", "decoder_attention_mask")


def record(
    model: PreTrainedModel, sites: Iterable[Site], batches: Iterable[Mapping[str, Any]], folder: Path,
    tolerance: float = 0.1, most_rows: int | None = None, seen: Callable[[int], None] | None = None,
) -> int:  # fmt: skip
    """Write a recording of each site below `folder`; returns the positions of the longest.

    batches: arguments of the model's calls, rows of one length without padding. seen: called with the positions so far
    after each. Memory holds one batch. Raises DomainError for padded rows and for inputs that float16 cannot hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(sites)
    (folder / "order.json").unlink(missing_ok=True)
    facts = {"model": describe(type(model), model.config).model, "tolerance": tolerance}
    with ExitStack() as stack:
        writers = [stack.enter_context(RecordingWriter(folder / site.name, site, facts)) for site in wanted]
        for site, writer in zip(wanted, writers, strict=True):
            _listen(model, site, writer, tolerance, most_rows, stack)
        was_training = model.training
        model.eval()
        stack.callback(model.train, was_training)
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


def share_of_zeros(
    model: PreTrainedModel, sites: Iterable[Site], batches: Iterable[Mapping[str, Any]]
) -> dict[str, float]:
    """By name of each feed-forward site, the share of neurons that do not reach the next layer. Keeps nothing."""
    blocks = [site for site in sites if site.kind == "ffn"]
    counts = {site.name: [0, 0] for site in blocks}
    with ExitStack() as stack, torch.no_grad():
        for site in blocks:

            def look(_: nn.Module, received: tuple[Any, ...], found: list[int] = counts[site.name]) -> None:
                found[0] += int((received[0] == 0).sum())
                found[1] += received[0].numel()

            stack.callback(model.get_submodule(site.writer).register_forward_pre_hook(look).remove)
        was_training = model.training
        model.eval()
        for batch in batches:
            model(**batch)
        model.train(was_training)
    return {name: zeros / max(1, total) for name, (zeros, total) in counts.items()}


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
            raise DomainError(f"{name}: got padded rows; want rows of one length, as padding is no text to learn from")
