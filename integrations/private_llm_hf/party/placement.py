"""Where a party's layers lie: on GPUs, in main memory, or on disk, from where a layer is read whenever it runs.

Accelerate plans (`infer_auto_device_map`, with the bytes that shares really take) and its hooks on modules do the
rest: inputs move to the device of the module that runs, weights on disk are read before it and dropped after it.
Nothing of this is visible to other parties: messages, rounds and results are the same for every placement.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import get_balanced_memory, get_max_memory, infer_auto_device_map, send_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from private_llm.config import PLANNED, PrivateConfig
from private_llm.errors import ConfigError
from private_llm.kernels.address import memory_bytes
from private_llm.kernels.devices import device_for
from private_llm.kernels.seeded_tensor import makes_fast
from private_llm.protocols.registry import protocol_spec
from private_llm.protocols.session import Session
from private_llm.protocols.weight_sharing import bytes_at_rest, keys_held, mask_cipher, sends_parts
from private_llm.ranges import Ranges
from private_llm.ring.prg import Seed
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.checkpoint.offload import Offloaded
from private_llm_hf.checkpoint.share_files import ShareFile

_LOG = logging.getLogger("private_llm")
FILLED = 0.9  # part of a device's free memory that may be filled with weights; activations and caches need the rest
LARGE = 256 << 20  # bytes of whole shares from which seeds are faster than memory, read from beyond the caches


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
Weights = dict[str, Fixed | Tensor | Offloaded]  # by the model's own parameter names


def weights_of_file(session: Session, share_file: ShareFile) -> Weights:
    """The weights of a share file, each read when it is needed; the session learns whether masks stay seeds. Local."""
    session.numerics.lazy_masks = keeps_seeds(session, share_file.shapes.values(), share_file.cipher)
    warn_of_copies(session, share_file.keys)
    ranges = Ranges(share_file.description.ranges)

    def read(name: str) -> Fixed:
        share = share_file.weight(name, session.numerics.lazy_masks)
        return Fixed(session, share, ranges.frac_of_weight(name, session.frac))

    return {name: Offloaded(shape, functools.partial(read, name)) for name, shape in share_file.shapes.items()}


def weights_of_model(session: Session, model: PreTrainedModel, offloaded: Mapping[str, Offloaded]) -> Weights:
    """The shares of another session's model, same memory or file. Local. offloaded: those on disk, as first read."""
    found = dict(model.named_parameters())
    if any(value.is_meta for value in found.values()):
        return {n: Offloaded(v.shape, functools.partial(_again, session, v)) for n, v in offloaded.items()}
    return {name: used_in(session, value) for name, value in found.items()}


def used_in(session: Session, value: Fixed | Tensor) -> Fixed | Tensor:
    """A weight of another session's model, or a public one, for this session; nothing is copied."""
    if isinstance(value, SecretTensor):
        value = value.value(full=True)
    return Fixed(session, value.share, value.frac) if isinstance(value, Fixed) else value.detach()


def _again(session: Session, value: Offloaded) -> Fixed | Tensor:
    return used_in(session, value.read())


DISK = "disk"

PlacedValue = Fixed | SecretTensor | Tensor | Offloaded


class Placement:
    """The device of each module of a party's model. Raises ConfigError for a device_map of other modules or devices."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        named = session.config.device_map
        if named is None or session.device == "meta":
            named = {"": session.device}
        elif not isinstance(named, Mapping):
            named = planned_map(model, session)
        else:
            _check_names(model, named)
        self._places = {name: str(where) for name, where in named.items()}
        gpus = sorted({where for where in self._places.values() if where.startswith("cuda")})
        self._main = gpus[0] if gpus else session.device
        computing = {*self._places.values(), self._main} - {DISK}
        self._devices = {where: device_for(where, session.party) for where in computing}
        self._offloaded: dict[nn.Module, dict[str, Offloaded]] = {}
        self._grouped: set[nn.Module] = set()
        self.on_disk: set[str] = set()  # names of the weights that are on disk while they are not used

    def where(self, path: str) -> str | None:
        """What the map says about a module or parameter: the entry with the longest fitting name, if any."""
        while path and path not in self._places:
            path = path.rpartition(".")[0]
        return self._places.get(path)

    def device(self, path: str) -> torch.device:
        """Where a module computes; without an entry, or on disk, that is the first GPU of the map, or `device`."""
        where = self.where(path)
        return self._devices[self._main if where in (None, DISK) else where]

    # -- weights ------------------------------------------------------------------------------------------------
    def settle(self, places: Sequence[tuple[str, nn.Module, str]], value: PlacedValue) -> None:
        """Put a weight where its modules (path, module, name) lie. Raises ConfigError for one on disk that is not."""
        ready: dict[torch.device, nn.Parameter] = {}
        for path, module, own in places:
            if self.where(path) == DISK:
                if not isinstance(value, Offloaded):
                    raise ConfigError(
                        f"device_map puts '{path}' on disk, but no disk is known: give the party its share file, or "
                        "name an offload_folder for weights that come from the client"
                    )
                self._offloaded.setdefault(module, {})[own] = value
                self.on_disk.add(path)
                continue
            device = self.device(path)
            if device not in ready:
                ready[device] = parameter(value, device)
            module._parameters[own] = ready[device]

    def reader(
        self, paths: Sequence[str], layers: Sequence[nn.Module]
    ) -> Callable[[nn.Module], tuple[Tensor, Tensor | None]] | None:
        """Reads weight and bias of layers on disk that are one product, or None. Raises ConfigError for mixed ones."""
        places = {self.where(path) for path in paths}
        if len(places) > 1:
            raise ConfigError(
                f"device_map puts {', '.join(paths)} in different places ({', '.join(sorted(map(str, places)))}), but "
                "they are computed as one product; put them in one place"
            )
        if places != {DISK}:
            return None
        self._grouped.update(layers)
        device = self.device(paths[0])

        def read(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
            made = {own: parameter(value, device) for own, value in self._offloaded[layer].items()}
            return made["weight"], made.get("bias")

        return read

    # -- hooks --------------------------------------------------------------------------------------------------
    def attach(self, model: nn.Module) -> None:
        """Move buffers, and make modules fetch inputs and stored weights; on GPUs plain inputs meet plain weights."""
        several = len(self._devices) > 1
        for path, module in model.named_modules():
            device = self.device(path)
            for own, buffer in module._buffers.items():
                if buffer is not None and device.type != "meta":  # public values stay real when costs are counted
                    module._buffers[own] = buffer.to(device)
            stored = {} if module in self._grouped else self._offloaded.get(module, {})
            plain = any(not isinstance(p, SecretTensor) for p in module._parameters.values() if p is not None)
            move = (several or (plain and device.type == "cuda")) and self.where(path) is not None
            if move or stored:
                add_hook_to_module(module, _PlacementHook(device, move, stored))


class _PlacementHook(ModelHook):  # type: ignore[misc]
    """Before a module runs, its inputs come to `device` and its stored weights are read; afterwards these go."""

    def __init__(self, device: torch.device, move: bool, stored: Mapping[str, Offloaded]) -> None:
        self._device, self._move, self._offloaded = device, move, stored
        self._empty: dict[str, nn.Parameter | None] = {}

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:  # noqa: ANN401
        for own, value in self._offloaded.items():
            self._empty.setdefault(own, module._parameters[own])
            module._parameters[own] = parameter(value, self._device)
        if self._move:
            args, kwargs = send_to_device(args, self._device), send_to_device(kwargs, self._device)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:  # noqa: ANN401
        module._parameters.update(self._empty)
        return output


def parameter(value: PlacedValue, device: torch.device) -> nn.Parameter:
    """A weight as a parameter on `device`."""
    if isinstance(value, Offloaded):
        value = value.read()
    if isinstance(value, Fixed):
        value = SecretTensor(value)
    return nn.Parameter(value if value.device == device or device.type == "meta" else value.to(device), False)


# -- plans ------------------------------------------------------------------------------------------------------
def planned_map(model: nn.Module, session: Session) -> dict[str, str]:
    """Accelerate's device map by the bytes of this party's shares. Raises ConfigError for a max_memory it refuses."""
    config = session.config
    one = torch.zeros(1, dtype=session.ring.dtype)
    parts = 1 if config.weights == "public" else len(session.protocol.public(one).parts)
    if session.numerics.lazy_masks:
        parts = sends_parts(config, session.party)
    held = parts * session.ring.bytes + (4 if config.weights == "public" else 0)  # public: float32, and its ring form
    share = 4 / max(held, 1) * (1 if config.max_memory else FILLED)  # the model without weights has 4 bytes an element
    memory = {where: int(size * share) for where, size in free_memory(config).items()}
    whole = list(getattr(model, "_no_split_modules", None) or ())
    if config.device_map != PLANNED[-1]:
        memory = get_balanced_memory(model, memory, whole, low_zero=config.device_map == "balanced_low_0")
    found = infer_auto_device_map(model, memory, whole)
    return {name: f"cuda:{where}" if isinstance(where, int) else str(where) for name, where in found.items()}


def _check_names(model: nn.Module, named: Mapping[str, object]) -> None:
    """Raises ConfigError for entries without a module and for weights without an entry."""
    unknown = sorted(set(named) - {name for name, _ in model.named_modules()})
    if unknown:
        raise ConfigError(
            f"device_map: {type(model).__name__} has no module {', '.join(unknown[:5])}; names are those of "
            "model.named_modules()"
        )
    left = [n for n, _ in model.named_parameters() if not any(k in ("", n) or n.startswith(f"{k}.") for k in named)]
    if left:
        raise ConfigError(f"device_map: no device for {', '.join(left[:5])}; add an entry, or '' for all the rest")
