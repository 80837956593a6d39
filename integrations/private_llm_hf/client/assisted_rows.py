"""Which layers servers multiply, and whether the products that a model asks for follow from shapes alone.

Servers see which products there are, and how many rows each has. In most models that follows from the shapes of the
inputs. Where it depends on values (experts that compute chosen tokens, labels that are left out, early exits), servers
would learn of these.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers import Cache, EncoderDecoderCache, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from private_llm.errors import PatchMismatch, UnsupportedOp
from private_llm_hf.checkpoint.miniature import miniature
from private_llm_hf.checkpoint.sample_inputs import empty_inputs, longer_inputs, outputs, sample_inputs
from private_llm_hf.checkpoint.weights import skeleton
from private_llm_hf.models.norms import CANNOT

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MACS_AN_ELEMENT = 160
"""Multiply-adds for each element that travels, 32 a byte of five, from which on a convolution is worth it: a linear
layer of 480 inputs and outputs has as many."""


@cache
def _is_linear(kind: type[nn.Module]) -> bool:
    """Whether layers of this class compute x W^T + b: nn.Linear, Conv1D, and subclasses that a trial finds to do so."""
    if kind is NonDynamicallyQuantizableLinear:  # whose weight nn.MultiheadAttention reads itself
        return False
    if kind in (nn.Linear, Conv1D) or not issubclass(kind, nn.Linear):
        return kind in (nn.Linear, Conv1D)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            layer, x = kind(3, 4), torch.linspace(-1, 1, 6).view(2, 3)
            return torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
        except CANNOT:
            return False


def is_sent(layer: nn.Module) -> bool:
    """Whether servers multiply by this layer's weight: linear layers, and convolutions that are large for their bytes.

    Convolutions in groups and small ones have fewer multiply-adds a byte, and stay at the client.
    """
    if _is_linear(type(layer)):  # type: ignore[arg-type]  # classes are hashable
        return True
    if not isinstance(layer, CONVOLUTIONS) or type(layer) not in CONVOLUTIONS or layer.groups > 1:
        return False
    outputs, inputs = len(layer.weight), layer.weight[0].numel()
    return inputs * outputs >= _MACS_AN_ELEMENT * (inputs + 2 * outputs)


_CHOSEN = frozenset({"experts", "adapter_modules"})
"""Names of modules of which a forward uses some, by what it reads."""

Sides = tuple[int, int]
"""Outputs and inputs of a weight."""


def sent_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model whose weights servers hold, by name.

    Layers of experts and adapters stay at the client: how many rows each reads shows which were chosen.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if is_sent(module) and not _CHOSEN & {*name.split(".")}
    }  # fmt: skip


def sides_of(layer: nn.Module) -> Sides:
    """Of the matrix that a layer multiplies by."""
    weight = layer.get_parameter("weight")
    outputs = weight.shape[1 if isinstance(layer, Conv1D) else 0]
    return outputs, weight.numel() // outputs


ProductList = tuple[tuple[str, int], ...]
"""The products of a call in order: of which layers, and how many rows."""

_TRIALS = (1, 5, 7, 11, 13)
"""Numbers that inputs are multiplied by, so that five differ."""

_OTHER = "choose another protocol for such calls"


@dataclass
class _NotedCall:
    model: nn.Module
    shapes: int
    asked: list[tuple[str, int]] = field(default_factory=list)


class RowCounts:
    """Remembers what calls asked for, by the shapes of their inputs; a later one that asks for anything else ends.

    So servers learn of the first call of each shape what it asks for, and of later ones that they differ at most.
    Costs a microsecond a product, and some 200 bytes for each new shape.
    """

    def __init__(self) -> None:
        self._known: dict[int, ProductList] = {}
        self._equal: dict[ProductList, ProductList] = {}  # most steps ask for the same
        self._running = threading.local()

    def watch(self, model: nn.Module) -> None:
        """Note the calls of a model, and those of models in it, which `generate` calls by themselves."""
        for name, module in model.named_modules():
            if isinstance(module, PreTrainedModel):
                module.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True)
                module.register_forward_hook(self._end, always_call=True)

    def asks(self, layers: str, rows: int) -> None:
        """Before a product is asked for. Raises UnsupportedOp if a call of the same shapes asked for another."""
        call = self._call
        if call is None:
            return
        known, place = self._known.get(call.shapes), len(call.asked)
        if known is not None and known[place : place + 1] != ((layers, rows),):
            self._running.call = None
            raise UnsupportedOp(
                f"{layers}: {rows} row(s), where a call with inputs of the same shapes asked for something else, so "
                f"that servers would learn of values; {_OTHER}"
            )
        call.asked.append((layers, rows))

    @property
    def _call(self) -> _NotedCall | None:
        found: _NotedCall | None = getattr(self._running, "call", None)
        return found

    def _begin(self, name: str, model: nn.Module, args: object, kwargs: object) -> None:
        call = self._call
        if call is None or call.model is model:  # the same again: it was interrupted
            shapes = hash((name, torch.is_inference_mode_enabled(), _shapes((args, kwargs))))
            self._running.call = _NotedCall(model, shapes)

    def _end(self, model: nn.Module, args: object, made: object) -> None:
        call = self._call
        if call is None or call.model is not model:
            return
        self._running.call = None
        if made is None:  # it raised an error
            return
        asked = tuple(call.asked)
        known = self._known.setdefault(call.shapes, self._equal.setdefault(asked, asked))
        if len(known) > len(asked):
            raise UnsupportedOp(
                f"{type(model).__name__}: {len(asked)} products, where a call with inputs of the same shapes asked for "
                f"{len(known)}, so that servers learn of values; {_OTHER}"
            )


def _shapes(value: object) -> Hashable:
    """What is public of a model's arguments: shapes of tensors, how full a cache is, and numbers and words."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.is_inference()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, EncoderDecoderCache):
        return tuple(map(_shapes, (value.self_attention_cache, value.cross_attention_cache, value.is_updated)))
    if isinstance(value, Cache):
        return frozenset(map(_layer_shape, value.layers))
    if isinstance(value, Mapping):
        return tuple((_shapes(key), _shapes(each)) for key, each in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_shapes, value))
    return type(value).__name__


def _layer_shape(layer: object) -> Hashable:
    length = int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else None
    return type(layer).__name__, length, str(getattr(layer, "has_previous_state", None))


def refuse_chosen_rows(model_class: type[PreTrainedModel], config: PretrainedConfig) -> None:
    """Raises PatchMismatch if a small model of this class asks for other rows for other inputs of the same shapes.

    Where no small model can be made or run, nothing is known, and `RowCounts` finds it at run.
    """
    try:
        small = miniature(model_class, config)
        given = longer_inputs(small.config, sample_inputs(small))
        found = [_rows(small, {name: _other(value, small.config, n) for name, value in given.items()}) for n in _TRIALS]
    except (PatchMismatch, *CANNOT):
        return
    differing = [name for each in found for name in each if any(one.get(name) != each[name] for one in found)]
    if differing:
        raise PatchMismatch(
            f"{model_class.__name__}: how many rows {differing[0]!r} computes depends on values, so servers would "
            f"learn of these; {_OTHER}"
        )


def uses_a_token(model_class: type[PreTrainedModel], config: PretrainedConfig) -> int:
    """How many rows of corrections a token takes: as often as the layer that runs most runs in a forward (ALBERT).

    1 where no forward runs without values.
    """
    model, uses = skeleton(model_class, config), Counter[nn.Module]()
    for layer in sent_layers(model).values():
        layer.register_forward_pre_hook(lambda layer, _: uses.update([layer]))
    with torch.no_grad(), contextlib.suppress(PatchMismatch, *CANNOT):
        model(**empty_inputs(config))
    return max(uses.values(), default=1)


def _other(value: Tensor, config: PretrainedConfig, n: int) -> Tensor:
    """Another text, or another image, of the same shape."""
    if value.is_floating_point():
        return (value * n).sin()
    vocabulary: int = config.get_text_config().vocab_size
    first = min(3, vocabulary - 1)
    return first + value * n % (vocabulary - first)


def _rows(model: PreTrainedModel, given: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """How many rows each linear layer reads in each of its calls."""
    found: dict[str, list[int]] = {}

    def note(name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.setdefault(name, []).append(args[0].numel() // args[0].shape[-1])

    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in sent_layers(model).items()]
    try:
        outputs(model, given)
    finally:
        for hook in hooks:
            hook.remove()
    return found
