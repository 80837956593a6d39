"""Weights on their way from a checkpoint (or a loaded model) into shares: one tensor at a time.

transformers' own loader reads a checkpoint, with its renames, conversions, shards and safe loading. A quantizer, its
entry point for that, sees each tensor as it is read, hands it to a sink and leaves an empty (meta) one, so there is no
second copy of the model. Tied weights are streamed once, under the name that the model ties them to.
"""

import copy
import hashlib
import inspect
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from private_llm.errors import DomainError, PatchMismatch, PrivateLLMError, listed
from private_llm.protocols.weight_sharing import pieces
from private_llm.ring.ring import Ring
from private_llm.tensor.dispatch import TorchArg

Sink = Callable[[str, Tensor], None]  # takes one named plaintext tensor; must not keep it

STATISTICS = ("running_mean", "running_var")  # buffers of batch norms that count as weights

_METHOD = "private-llm-share"

LOADING = threading.Lock()  # transformers patches its classes as it loads: two at once would leave models untied

AS_GIVEN = threading.Lock()  # held while a caller's model is in another state than it was given, and by who looks at it

POOLER = "add_pooling_layer"  # argument for whether there is a pooler, as a configuration says of a model built so


def _arguments(cls: type[PreTrainedModel], config: PretrainedConfig) -> dict[str, bool]:
    said = getattr(config, POOLER, None)
    return {POOLER: bool(said)} if said is not None and POOLER in inspect.signature(cls).parameters else {}


def skeleton(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A model's modules on the meta device. Raises PatchMismatch for a configuration that makes no model."""
    try:
        with torch.device("meta"), _Uninitialised():
            model = cls(config, **_arguments(cls, config))
    except PrivateLLMError:
        raise
    except ImportError as error:
        raise PatchMismatch(
            f"{cls.__name__}: a package is missing to build it (attention {config._attn_implementation!r}: "
            f"{str(error).splitlines()[0]}); parties need none for attention: model.set_attn_implementation('sdpa')"
        ) from error
    except Exception as error:  # a foreign constructor may raise anything
        raise PatchMismatch(
            f"{cls.__name__}: its configuration makes no model here ({type(error).__name__}: {error})"
        ) from error
    weights_of_buffers(model)
    model.eval()
    return model


def stored_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's own buffers that count as weights, as checkpoints hold them (BART's logit bias, routers' biases); not
    rotary frequencies, which ESM stores, and statistics of batch norms, which are folded.
    """
    if isinstance(module, _BatchNorm) or type(module).__name__.endswith("RotaryEmbedding"):
        return []
    held = ((n, v) for n, v in module._buffers.items() if v is not None and n not in module._non_persistent_buffers_set)
    return [(name, value) for name, value in held if value.is_floating_point()]


def weights_of_buffers(model: nn.Module) -> None:
    """Make parameters without values of a model's buffers that count as weights."""
    for module in model.modules():
        for name, value in stored_buffers(module):
            del module._buffers[name]
            empty = torch.empty_like(value, device="meta", dtype=torch.float32)
            module.register_parameter(name, nn.Parameter(empty, requires_grad=False))


_INITIALISERS = frozenset({
    "normal_", "uniform_", "trunc_normal_", "xavier_normal_", "xavier_uniform_", "kaiming_normal_", "kaiming_uniform_",
    "zero_", "zeros_", "ones_", "fill_", "constant_",
})  # fmt: skip


class _Uninitialised(TorchFunctionMode):
    """Initialisers leave out the meta device, where PyTorch takes up to a millisecond to do nothing."""

    def __torch_function__(
        self, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (), kwargs: TorchArg = None
    ) -> TorchArg:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _INITIALISERS:
            weight = args[0] if args else kwargs.get("tensor")
            if isinstance(weight, Tensor) and weight.is_meta:
                return weight
        return func(*args, **kwargs)


class WithoutWeights(_Uninitialised):
    """Layers get weights (`torch.empty`) on the meta device, and real buffers, which come from values. In one thread:
    accelerate's init_empty_weights patches the process, where other parties may be threads.
    """

    def __torch_function__(
        self, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (), kwargs: TorchArg = None
    ) -> TorchArg:
        if func is torch.empty:
            kwargs = {**(kwargs or {}), "device": "meta"}
        return super().__torch_function__(func, types, args, kwargs)


def without_weights(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """The module tree with real (public) buffers and without weights, tied as the configuration says: the parties'."""
    with WithoutWeights():
        model = cls(config, **_arguments(cls, config))
    weights_of_buffers(model)
    model.tie_weights()
    return model


@dataclass(frozen=True)
class WeightList:
    """What a model needs: shapes by name, and which names are tied to which of them."""

    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "WeightList":
        """All parameters of `model` (after `weights_of_buffers`), tied ones once, and the statistics of batch norms."""
        tied = dict(model.get_expanded_tied_weights_keys(all_submodels=True))
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False) if n not in tied}
        values = model.state_dict()
        norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
        statistics = [f"{norm}.{own}" for norm in norms for own in STATISTICS]
        return cls(shapes | {n: tuple(values[n].shape) for n in statistics if n in values}, tied)


WeightSource = Callable[[WeightList, Sink, bool], None]  # to the sink; True: without download (OSError without weights)


class Collector:
    """Checks a stream of named tensors against a `WeightList` and passes each weight on once."""

    def __init__(self, wanted: WeightList, sink: Sink) -> None:
        self._wanted, self._sink = wanted, sink
        self._tie_sources = set(wanted.tied.values())
        self._digest: dict[str, tuple[str, bytes]] = {}
        self._seen: set[str] = set()
        self.error: PrivateLLMError | None = None

    def take(self, name: str, tensor: Tensor) -> None:
        """One tensor of the stream. Raises PatchMismatch for a wrong shape or tied weights that differ."""
        target = self._wanted.tied.get(name, name)
        if target not in self._wanted.shapes:
            return
        if tuple(tensor.shape) != self._wanted.shapes[target]:
            raise PatchMismatch(
                f"weight '{name}': got shape {tuple(tensor.shape)}; want {self._wanted.shapes[target]} (the "
                "checkpoint does not belong to this configuration)"
            )
        if target in self._tie_sources:
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            digest = hashlib.blake2b(raw.data, digest_size=32).digest()
            first, known = self._digest.setdefault(target, (name, digest))
            if known != digest:
                raise PatchMismatch(
                    f"the configuration ties '{name}' to '{first}', but the checkpoint holds different values; "
                    "set tie_word_embeddings=False in the configuration"
                )
        if target not in self._seen:
            self._seen.add(target)
            self._sink(target, tensor.detach())

    def finish(self) -> None:
        """Raises what was noted, and PatchMismatch if weights are missing."""
        if self.error is not None:
            raise self.error from None
        missing = sorted(set(self._wanted.shapes) - self._seen)
        if missing:
            raise PatchMismatch(
                f"the checkpoint lacks {len(missing)} weight(s): {listed(missing)}; load a checkpoint that was "
                "trained with this head, or patch() a model whose weights you have set"
            )


def stream_loaded(model: PreTrainedModel, wanted: WeightList, sink: Sink, local: bool = True) -> None:
    """Pass on every weight of a model that is already in memory, a `WeightSource` without a download."""
    collector = Collector(wanted, sink)
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point():
            collector.take(name, dense_weight(name, value))
    collector.finish()


def dense_weight(name: str, value: Tensor) -> Tensor:
    """A weight as a plain tensor, also one of another class (torchao's) that can `dequantize`; else PatchMismatch."""
    if type(value) in (Tensor, nn.Parameter, nn.Buffer):
        return value
    if type(value).dequantize is not Tensor.dequantize:
        plain = value.dequantize()
        if type(plain) is Tensor:
            return plain
    raise PatchMismatch(
        f"weight '{name}': got a {type(value).__name__}, which cannot be made a plain tensor; want the model in float "
        "or half precision"
    )


def stream_checkpoint(
    cls: type[PreTrainedModel], source: str, config: PretrainedConfig, wanted: WeightList, sink: Sink, **hf: object
) -> None:
    """Pass on every weight of a checkpoint (folder or hub id; safetensors or bin; sharded or not) as it is read."""
    collector = Collector(wanted, sink)
    settings = copy.deepcopy(config)
    try:
        with LOADING:
            plain = {**hf, "dtype": torch.float32}  # of half precision, torch's default would be half in other threads
            cls.from_pretrained(source, config=settings, quantization_config=_StreamConfig(collector), **plain)
    except _Refused:
        pass
    collector.finish()


class WeightsDigest:
    """A sink for weights that keeps SHA-256 of their names, shapes and float32 values, in whatever order they come."""

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}

    def __call__(self, name: str, tensor: Tensor) -> None:
        """One weight."""
        made = hashlib.sha256(json.dumps([name, list(tensor.shape)]).encode())
        for piece in pieces(tensor.detach()):  # in pieces: a half-precision tensor needs no second copy
            made.update(piece.to("cpu", torch.float32).contiguous().numpy().data)
        self._parts[name] = made.digest()

    def text(self) -> str:
        """Over all weights so far."""
        return hashlib.sha256(b"".join(self._parts[name] for name in sorted(self._parts))).hexdigest()


def encode_weight(name: str, tensor: Tensor, ring: Ring, frac: int) -> Tensor:
    """A weight as ring elements. Raises DomainError with the weight's name for NaN, infinities and overflow."""
    try:
        return ring.encode(tensor, frac)
    except DomainError as error:
        raise DomainError(f"weight '{name}': {error}") from None


@register_quantization_config(_METHOD)
class _StreamConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Carries the collector to the quantizer; transformers may copy or print it, the collector stays one object."""

    def __init__(self, collector: Collector | None = None, **_: object) -> None:
        self.quant_method = _METHOD
        self.collector = collector

    def __deepcopy__(self, memo: dict[int, Any]) -> "_StreamConfig":
        return _StreamConfig(self.collector)

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": _METHOD}  # nothing else belongs into a saved configuration


class _Refused(BaseException):
    """Ends transformers' loading: it notes every Exception of a conversion, and goes on reading all other weights."""


class _Take(ConversionOps):  # type: ignore[misc]
    """Hands each tensor to the collector and leaves an empty one in the model."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector

    def convert(self, input_dict: dict[str, Any], **_: object) -> dict[str, Any]:
        tensors = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        for name, tensor in tensors.items():
            try:
                self.collector.take(name, tensor)
            except PrivateLLMError as error:
                self.collector.error = error
                raise _Refused from None
        return {n: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for n, tensor in tensors.items()}


@register_quantizer(_METHOD)
class _StreamQuantizer(HfQuantizer):  # type: ignore[misc]
    """Makes from_pretrained stream: every floating-point tensor goes to the collector."""

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: object) -> bool:
        return bool(model.get_parameter_or_buffer(param_name).is_floating_point())  # the rest is left to the model

    def get_quantize_ops(self) -> ConversionOps:
        return _Take(self.quantization_config.collector)

    def is_serializable(self) -> bool:
        return False  # the emptied model is thrown away

    is_trainable = False
