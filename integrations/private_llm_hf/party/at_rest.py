"""Whether a party's masks of weights stay seeds while no layer uses them: as it is told, where memory is short, or
where it is faster.

Each party decides for itself: messages, rounds and results are the same either way.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping

from accelerate.utils import get_max_memory
from torch import Tensor
from transformers import PreTrainedModel

from private_llm.config import PLANNED, PrivateConfig
from private_llm.errors import ConfigError
from private_llm.kernels.address import memory_bytes
from private_llm.kernels.seeded_tensor import makes_fast
from private_llm.protocols.registry import protocol_spec
from private_llm.protocols.session import Session
from private_llm.protocols.weight_sharing import bytes_at_rest, keys_held, mask_cipher
from private_llm.ranges import Ranges
from private_llm.ring.prg import Seed
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.checkpoint.offload import Offloaded
from private_llm_hf.checkpoint.share_files import ShareFile

_LOG = logging.getLogger("private_llm")
FILLED = 0.9
"""Part of a device's free memory that may be filled with weights; activations and caches need the rest."""


LARGE = 256 << 20
"""Bytes of whole shares from which seeds are faster than memory, which is then read from beyond the caches."""


def keeps_seeds(session: Session, shapes: Iterable[tuple[int, ...]], cipher: str | None = None) -> bool:
    """Whether this party keeps seeds instead of masks of secret weights of these shapes. Local.

    cipher: of the masks, default: as `mask_cipher` says. On GPUs masks in memory are read faster than they are made, so
    there "auto" keeps seeds where memory is too short alone. Raises ConfigError for a max_memory that accelerate does
    not take.
    """
    config = session.config
    if config.weights_at_rest != "auto":
        return config.weights_at_rest == "seeds"
    if config.weights == "public" or config.sparsity is not None or not keys_held(config, session.party):
        return False
    if isinstance(config.device_map, Mapping):
        return "disk" in config.device_map.values()
    shapes = list(shapes)
    whole = sum(bytes_at_rest(config, session.party, shape, False) for shape in shapes)
    by_aes = (cipher or mask_cipher(config)) == "aes"
    return whole > _room(session) or (whole >= LARGE and by_aes and _faster(session, shapes))


def warn_of_copies(session: Session, keys: Iterable[Seed]) -> None:
    """Say in the log that this party's masks are made in main memory for a GPU at each use, where that is so. Local."""
    on_gpu = session.device.startswith("cuda") and session.numerics.lazy_masks
    if on_gpu and any(key.cipher == "aes" for key in keys):
        _LOG.warning(
            "weights_at_rest: masks of these weights are AES streams, which no GPU makes, so each use makes them in "
            "main memory and copies them to %s; share the weights with prg='chacha20' (`private-llm share "
            "--prg chacha20`), or keep them with weights_at_rest='resident'", session.device,
        )  # fmt: skip


def _faster(session: Session, shapes: Iterable[tuple[int, ...]]) -> bool:
    """Whether products make masks tile by tile (one at a time, of matrices), and as fast as memory is read."""
    config = session.config
    one_at_a_time = len(protocol_spec(config.protocol).mask_holders) == 2 and config.matmul == "masked"
    here = session.device == "cpu" and config.device_map is None and config.ring == 64
    return one_at_a_time and here and makes_fast() and all(len(shape) <= 2 for shape in shapes)


def _room(session: Session) -> float:
    """Bytes of memory that this party's weights may take where its settings put them."""
    config, free = session.config, free_memory(session.config)
    if config.device_map in PLANNED:
        return sum(free.values()) * (1 if config.max_memory else FILLED)
    where = session.device
    return FILLED * free[int(where.rpartition(":")[2] or 0) if where.startswith("cuda") else "cpu"]


def free_memory(config: PrivateConfig) -> dict[int | str, int]:
    """Bytes that a party may use of each device, or those of `max_memory`: of what parties that run on one machine
    share (main memory, and a GPU where there are fewer of them), this one's part. Raises ConfigError for a max_memory
    that accelerate does not take.
    """
    limits = None
    if config.max_memory is not None:
        limits = {_number(where): size for where, size in config.max_memory.items()}
    try:
        free: dict[int | str, int] = get_max_memory(limits)
    except ValueError as error:
        raise ConfigError(f"max_memory: {error}") from None
    if limits is None:
        together = 1 if config.party_mode in ("remote", "distributed") else config.parties
        free["cpu"] = min(free["cpu"], memory_bytes()) // together
        gpus = [where for where in free if isinstance(where, int)]
        each_its_own = config.device == "cuda" and config.device_map is None
        for gpu in gpus:
            free[gpu] //= -(-together // len(gpus)) if each_its_own else together
    return free


def _number(device: int | str) -> int | str:
    """GPUs by number, as Accelerate names them."""
    return int(str(device).removeprefix("cuda:")) if str(device).startswith("cuda:") else device


# -- A party's weights where they are already: in its share file, or in a model that it built before ------------------
Weights = dict[str, Fixed | Tensor | Offloaded]
"""By the model's own parameter names."""


def weights_of_file(session: Session, share_file: ShareFile) -> Weights:
    """The weights of a share file for a session; each is read when it is needed. Local."""
    warn_of_copies(session, share_file.keys)
    ranges = Ranges(share_file.description.ranges)
    return {
        name: Offloaded(shape, functools.partial(_from_file, session, share_file, name, ranges))
        for name, shape in share_file.shapes.items()
    }


def weights_of_model(session: Session, model: PreTrainedModel, offloaded: Mapping[str, Offloaded]) -> Weights:
    """The shares of a model that was built for another session: the same memory or file, used in this one. Local.

    offloaded: its weights as they were before it was built, if some of them stay on disk.
    """
    found = dict(model.named_parameters())
    if any(value.is_meta for value in found.values()):
        return {n: Offloaded(v.shape, functools.partial(_again, session, v)) for n, v in offloaded.items()}
    return {name: used_in(session, value) for name, value in found.items()}


def used_in(session: Session, value: Fixed | Tensor) -> Fixed | Tensor:
    """A weight of another session's model, or a public one, for this session; nothing is copied."""
    if isinstance(value, SecretTensor):
        value = value.value(full=True)
    return Fixed(session, value.share, value.frac) if isinstance(value, Fixed) else value.detach()


def _from_file(session: Session, share_file: ShareFile, name: str, ranges: Ranges) -> Fixed:
    return Fixed(
        session, share_file.weight(name, session.numerics.lazy_masks), ranges.frac_of_weight(name, session.frac)
    )


def _again(session: Session, value: Offloaded) -> Fixed | Tensor:
    return used_in(session, value.read())
