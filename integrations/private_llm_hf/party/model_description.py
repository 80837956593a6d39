"""What a client announces of a model or an input, checked before anything of it is built or allocated.

A party that holds no share file builds what its client describes. It does so only if

  1. the model type is one that `architecture()` accepts, and the class is one of that type;
  2. every whole number of the configuration is one that a model may have;
  3. the model made of it, on the meta device where nothing has memory, stays below a number of weights and bytes of
     buffers;
  4. its weights fit into this machine's memory; what then arrives must be these weights, in these shapes.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from private_llm.errors import PatchMismatch, TransportError
from private_llm.kernels.address import memory_bytes
from private_llm.tensor.dispatch import TorchArg
from private_llm_hf.checkpoint.folds import fold_batch_norms, fold_norms
from private_llm_hf.checkpoint.model_spec import accepted_class
from private_llm_hf.checkpoint.weights import WeightList, weights_of_buffers
from private_llm_hf.kv_cache.attention_interface import register
from private_llm_hf.models.sparse_blocks import attach_predictors
from private_llm_hf.party.model import party_config
from private_llm_hf.wire.commands import Description, Weight

LARGEST_NUMBER = 1 << 24  # in a configuration; the longest contexts of today have 10 million positions
MOST_LISTED = 1 << 16  # labels, or repetitions of layers, that a configuration spells out when it is made
MOST_TENSORS = 20_000  # tensors that building a model may ask for; a model of 405 B parameters has 1200 weights
MOST_BUFFERS = 1 << 30  # bytes of public buffers that a model may have
MOST_INPUTS = 1 << 28  # elements of one secret input: 65,536 embedded tokens of width 4096, or 1780 images of 224 x 224

Shapes = dict[str, tuple[int, ...]]


def validate_model_description(description: Description, bytes_each: int, whole: bool = True) -> Shapes:
    """Shapes of the model's weights, by name. bytes_each: of one here. whole: all must fit into memory at once, else
    each alone. Raises PatchMismatch for a model that this library does not run, or machine not hold.
    """
    config, name = description.config, description.class_
    cls = accepted_class(name, config)
    _check_numbers(config, "")
    register()
    with torch.device("meta"), _Counting():
        model: PreTrainedModel = cls(party_config(config, cls))
    weights_of_buffers(model)
    fold_batch_norms(model)
    fold_norms(model, description.folded)
    attach_predictors(model)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    if buffers > MOST_BUFFERS:
        raise PatchMismatch(f"{name}: this configuration makes {buffers} bytes of buffers; want at most {MOST_BUFFERS}")
    shapes = WeightList.of(model).shapes
    sizes = [math.prod(shape) * bytes_each for shape in shapes.values()]
    needed, room = sum(sizes) if whole else max(sizes, default=0), memory_bytes()
    if needed > room:
        raise PatchMismatch(
            f"{name}: its {'weights need' if whole else 'largest weight needs'} {needed} bytes here, and this machine "
            f"has {room}; take a larger machine, a share file, or an offload_folder"
        )
    return shapes


def take_described(wanted: Shapes, header: Weight) -> tuple[int, ...]:
    """The shape of the weight that `header` announces; it is not wanted any more. Raises PatchMismatch for another."""
    name, shape = header.name, header.shape
    expected = wanted.pop(name, None)
    if expected is None:
        raise PatchMismatch(f"weight {name!r}: the announced model lacks it, or it came before; share the model again")
    if shape != expected:
        raise PatchMismatch(f"weight '{name}': got shape {str(list(shape))[:80]}; want {list(expected)}")
    return expected


def validate_input_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a secret input. Raises TransportError for one that no input has."""
    if not shape or min(shape) < 1 or math.prod(shape) > MOST_INPUTS:
        raise TransportError(
            f"input: got shape {str(list(shape))[:80]}; want positive sizes, at most {MOST_INPUTS} elements"
        )
    return shape


def _check_numbers(value: object, key: str, depth: int = 0) -> None:
    """Raise PatchMismatch for numbers larger than any model's; counts of layers and labels multiply lists."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_numbers(inner, str(name))
    elif isinstance(value, list):
        if depth and len(value) > MOST_LISTED:
            raise PatchMismatch(f"configuration: {key[:80]!r} may not list more than {MOST_LISTED}")
        for inner in value:
            _check_numbers(inner, key, depth + 1)
    elif isinstance(value, int) and "theta" not in key:  # bases of rotary embeddings
        counts = depth > 1 or key == "num_labels"
        most = MOST_LISTED if counts else LARGEST_NUMBER
        if abs(value) > most:
            raise PatchMismatch(f"configuration: {key[:80]!r} may not be above {most}")


class _Counting(TorchFunctionMode):
    """Counts the tensors that building a model asks for."""

    _FRESH = frozenset({torch.empty, torch.ones, torch.zeros})

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def __torch_function__(
        self, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (), kwargs: TorchArg = None
    ) -> Tensor | TorchArg:
        """Count. Raises PatchMismatch when it is too many."""
        if func in self._FRESH:
            self._count += 1
            if self._count > MOST_TENSORS:
                raise PatchMismatch(f"configuration: it makes more than {MOST_TENSORS} weights")
        return func(*args, **(kwargs or {}))
