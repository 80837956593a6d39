"""A checkpoint is read while another thread computes: the default dtype of torch is of the process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from private_llm_hf.checkpoint.weights import WeightList, skeleton, stream_checkpoint
from transformers import AutoConfig

from private_llm.kernels import ops
from tests.hf import tiny


def test_streaming_half_precision_changes_no_dtype_of_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers makes that of a checkpoint torch's default meanwhile, and kernels wrote beyond half-sized memory."""
    model = tiny.build("llama")
    model.half().save_pretrained(tmp_path)
    config, cls, change = AutoConfig.from_pretrained(tmp_path), type(model), torch.set_default_dtype
    assert config.dtype is torch.float16
    seen: set[torch.dtype] = set()

    def changed(dtype: torch.dtype) -> None:
        seen.add(dtype)
        change(dtype)

    monkeypatch.setattr(torch, "set_default_dtype", changed)
    stream_checkpoint(cls, str(tmp_path), config, WeightList.of(skeleton(cls, config)), lambda *_: None)
    assert seen <= {torch.float32}


def test_kernels_do_not_read_the_default_dtype() -> None:
    rows, outputs, inputs = 2, 3, 4
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        made, _ = ops.open_rows(
            (torch.zeros(5 * rows * outputs, dtype=torch.uint8),) * 2, torch.zeros(rows, inputs, dtype=torch.int64),
            torch.zeros(2, outputs, dtype=torch.int64), torch.zeros(2, inputs, dtype=torch.int64),
            torch.ones(rows, dtype=torch.float64), torch.ones(outputs, dtype=torch.float64), 5,
        )  # fmt: skip
    finally:
        torch.set_default_dtype(before)
    assert made.dtype is torch.float32
