"""Names of devices, and which of them a party's process can use."""

import importlib
import threading
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from private_llm.errors import ConfigError, UnsupportedOp

ALONE = threading.RLock()  # held while a CUDA graph is captured, or kernels are timed, which would break the capture


def device_for(name: str, party: int) -> torch.device:
    """The device `name`; "cuda": GPU party modulo their number. Raises ConfigError for a GPU that is not there."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index if device.index is not None else party % max(count, 1)
    if index >= count:
        raise ConfigError(
            f"device: got {name!r}; this process sees {count} GPU(s) (a PyTorch with CUDA and CUDA_VISIBLE_DEVICES "
            "decide); use 'cpu' or a GPU that is there"
        )
    return torch.device("cuda", index)


def held_on(x: Tensor, device: torch.device) -> Tensor:
    """A public constant x, which must not change, kept on a device while x lives: no step waits for another copy."""
    if x.device == device:
        return x
    copies: dict[torch.device, Tensor] = x.__dict__.setdefault("_private_copies", {})
    found = copies.get(device)
    if found is None:
        found = copies[device] = x.to(device)
    return found


@cache
def triton_module(name: str) -> ModuleType:
    """Kernels of GPUs: "bits.triton" for example. Raises UnsupportedOp where Triton is not installed."""
    try:
        return importlib.import_module(f"private_llm.kernels.{name}")
    except ModuleNotFoundError as missing:
        raise UnsupportedOp(
            f"kernels on GPUs need {missing.name}, which is not installed; install private-llm[triton], or use the CPU"
        ) from missing
