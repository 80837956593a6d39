"""Bytes of the tensors that are alive in this process, each memory counted once."""

from __future__ import annotations

import gc
import warnings

import torch


def live_bytes() -> int:
    """Of tensors on the CPU. Views and parameters count as the whole memory that they keep alive."""
    held: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects of other libraries warn when their type is asked for
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())
