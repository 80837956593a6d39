"""Norms whose output linear layers alone read: found by following it through a forward on the meta device.

A norm's weight can then be part of those layers (`folds.py`). A norm is none of them if its output goes anywhere
else (a sum, a product, an expert, the model's output), if a layer that reads it reads something else, too, or shares
its weight, if somebody looks at the norm's weight, if a module around it is replaced, or if the forward needs values.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from private_llm.config import PrivateConfig
from private_llm.nn.activations import ACTIVATIONS
from private_llm.ranges import Ranges
from private_llm.tensor.dispatch import TorchArg
from private_llm.tensor.fixed import READ_BITS
from private_llm_hf.checkpoint.sample_inputs import empty_inputs, tensors_in
from private_llm_hf.checkpoint.weights import skeleton
from private_llm_hf.kv_cache.model_checks import expands_latents
from private_llm_hf.models.architectures import architecture
from private_llm_hf.models.handlers import handler_of, match
from private_llm_hf.models.norms import CANNOT, spelled_norm

_SAME = {Tensor.contiguous, Tensor.to, Tensor.float, Tensor.detach, Tensor.unsqueeze, F.dropout, torch.dropout}
_SHAPED = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten}  # if the last dimension stays


def norm_readers(model_class: type[PreTrainedModel], config: PretrainedConfig) -> dict[str, tuple[str, ...]]:
    """The norms of a decoder that linear layers alone read, with these layers, of one run on the meta device."""
    if architecture(config).kind != "decoder":
        return {}
    found = _traced(model_class, config)
    return {} if found is None else found[0].readers(found[1])


def norms_read(model_class: type[PreTrainedModel], config: PretrainedConfig) -> dict[str, str]:
    """Linear layers of any model that read one norm and nothing else, with its name; one run on the meta device."""
    found = _traced(model_class, config)
    return {} if found is None else found[0].norms_of_layers()


def _traced(model_class: type[PreTrainedModel], config: PretrainedConfig) -> "tuple[_NormTrace, object] | None":
    """The trace of a forward, and what it returned; None if it does not run without values."""
    settings = copy.deepcopy(config)
    settings._attn_implementation = "eager"  # others look into the mask
    model = skeleton(model_class, settings)
    trace = _NormTrace(model)
    for module in model.modules():
        module.register_forward_pre_hook(trace.enter, with_kwargs=True)
        module.register_forward_hook(trace.leave)
    try:
        with torch.no_grad(), trace:
            return trace, model(**empty_inputs(config))
    except CANNOT:
        return None


class _NormTrace(TorchFunctionMode):
    """Follows the rows that norms return, from operation to operation."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        away = [n for n, part in model.named_modules() if _runs_otherwise(part) or expands_latents(part)]
        replaced = tuple(f"{name}." for name in away)  # what lies in modules that run otherwise at the parties
        shared = _shared(model)
        self._norms: dict[nn.Module, str] = {}
        self._layers: dict[nn.Module, str] = {}
        self._owners: dict[int, nn.Module] = {}
        for name, module in model.named_modules():
            if name.startswith(replaced) or any(id(value) in shared for value in module.parameters(recurse=False)):
                continue
            handler = handler_of(module)
            of_user = handler is not None and handler.settings is not None
            if not of_user and getattr(module, "weight", None) is not None and spelled_norm(module) is not None:
                self._norms[module] = name
            elif type(module) in (nn.Linear, Conv1D) and not _runs_otherwise(module):
                self._layers[module] = name
            else:
                continue
            self._owners |= {id(value): module for value in module.parameters(recurse=False)}
        self._running: list[nn.Module] = []
        self._rows: dict[int, tuple[Tensor, nn.Module]] = {}
        self._read: dict[nn.Module, set[nn.Module | None]] = {layer: set() for layer in self._layers}
        """What each layer reads: norms, and None for anything else."""
        self._lost: set[nn.Module] = set()  # norms whose output, or whose weight, goes somewhere else

    def enter(self, module: nn.Module, inputs: tuple[object, ...], named: Mapping[str, object]) -> None:
        self._running.append(module)
        if module in self._layers:
            self._read[module] |= {self._norm_of(value) for value in tensors_in((inputs, named))}

    def leave(self, module: nn.Module, _: object, output: object) -> None:
        self._running.pop()
        if module in self._norms:
            if isinstance(output, Tensor):
                self._rows[id(output)] = (output, module)
            else:
                self._lost.add(module)

    def __torch_function__(
        self, func: TorchArg, types: Sequence[type], args: Sequence[TorchArg] = (), kwargs: TorchArg = None
    ) -> TorchArg:
        out = func(*args, **(kwargs or {}))
        running = self._running[-1] if self._running else None
        given = list(tensors_in((args, kwargs or {})))
        for value in given:
            owner = self._owners.get(id(value))
            if owner is not None and owner is not running:  # somebody else looks at its weights
                if owner in self._norms:
                    self._lost.add(owner)
                else:
                    self._read[owner].add(None)
        told = out is not None and not any(True for _ in tensors_in(out))  # shapes and types, which are public
        if running in self._layers or told:
            return out
        norms = {norm for value in given if (norm := self._norm_of(value)) is not None}
        first = self._norm_of(args[0]) if args else None
        if first is not None and norms == {first} and _same_rows(func, args, out):
            self._rows[id(out)] = (out, first)
        else:
            self._lost |= norms
        return out

    def _norm_of(self, value: object) -> nn.Module | None:
        found = self._rows.get(id(value))
        return None if found is None else found[1]

    def norms_of_layers(self) -> dict[str, str]:
        only = {layer: next(iter(read)) for layer, read in self._read.items() if len(read) == 1}
        return {self._layers[layer]: self._norms[norm] for layer, norm in only.items() if norm is not None}

    def readers(self, output: object) -> dict[str, tuple[str, ...]]:
        """Of each norm that lost nothing the layers that read it. output: of the model."""
        lost = self._lost | {norm for value in tensors_in(output) if (norm := self._norm_of(value)) is not None}
        lost |= {norm for read in self._read.values() if len(read) > 1 for norm in read if norm is not None}
        found: dict[str, list[str]] = {}
        for layer, read in self._read.items():
            norm = next(iter(read), None)
            if norm is not None and norm not in lost:
                found.setdefault(self._norms[norm], []).append(self._layers[layer])
        return {norm: tuple(layers) for norm, layers in found.items()}


def _runs_otherwise(module: nn.Module) -> bool:
    handler = handler_of(module)
    return handler is not None and handler.make is not None


def _shared(model: PreTrainedModel) -> set[int]:
    places = dict(model.named_parameters(remove_duplicate=False))
    uses = Counter(id(value) for value in places.values())
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    names = {*tied, *tied.values()}
    return {id(value) for name, value in places.items() if uses[id(value)] > 1 or name in names}


def _same_rows(func: TorchArg, args: Sequence[TorchArg], out: TorchArg) -> bool:
    """Whether a result consists of rows of the first argument, each as it was."""
    if not isinstance(out, Tensor) or out.dim() == 0 or out.shape[-1] != args[0].shape[-1]:
        return False
    if func is Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(part is Ellipsis or isinstance(part, int | slice) for part in index)
    return func in _SAME or func in _SHAPED


# -- who reads the results of products: where products alone do, fewer of their bits are needed -----------------------
# Results of linear layers, of products of two values and of fused attention are followed through activations that keep
# their size and through new shapes, until something else reads them. A product below 2^s in ring elements is the same
# number modulo 2^(s+3), so its factors need to be right in as many bits (`Fixed.mul`). What is met in calibration is a
# hint: a product at the parties that needs more bits than it gets makes them right first. Products of two such results
# (gate and up) meet factors with READ_BITS fractional bits, others with as many as weights or the configuration have.
_KEEP = {
    *(op for made in ACTIVATIONS if made.keeps_size for op in made.ops),
    F.dropout, torch.dropout, Tensor.to, Tensor.float, Tensor.contiguous, Tensor.detach, Tensor.view, Tensor.reshape,
    torch.reshape, Tensor.flatten, torch.flatten, Tensor.transpose, torch.transpose, Tensor.permute, torch.permute,
    Tensor.unsqueeze, Tensor.squeeze, Tensor.chunk, torch.chunk, Tensor.split, torch.split, torch.functional.split,
    Tensor.__getitem__,
}  # fmt: skip
"""Activations no larger than their argument, and what moves entries."""


class ResultReaders:
    """The products that read each module's results; None among them is anything else."""

    def __init__(self, model: nn.Module) -> None:
        self.of: dict[str, set[str | None]] = {}
        self.factors: dict[str, set[str | None]] = {}  # by product the modules of its factors; None: anything else
        self._gelus = {module for module in model.modules() if match("gelus", module) is not None}
        self._inside: list[nn.Module] = []
        self._results: dict[int, tuple[weakref.ref[Tensor], set[str]]] = {}

    def enter(self, module: nn.Module) -> None:
        """A module begins. What a GELU that is spelled by hand does inside is nobody's business."""
        if module in self._gelus:
            self._inside.append(module)

    def leave(self, module: nn.Module, inputs: object, output: object) -> None:
        """A module has ended."""
        if module in self._gelus:
            self._inside.pop()
            self._follow(self._sources(inputs), output)

    def see(
        self, func: TorchArg, args: Sequence[TorchArg], kwargs: TorchArg, out: TorchArg, scope: str, multiplies: bool
    ) -> None:  # fmt: skip
        """An operation ran in the module `scope`. multiplies: it is a product whose size is noted."""
        if self._inside or not any(True for _ in tensors_in(out)):  # shapes and types are no values
            return
        sources, attends = self._sources((args, kwargs)), func is F.scaled_dot_product_attention
        if func in _KEEP:
            self._follow(sources, out)
        else:
            for source in sources:
                self.of.setdefault(source, set()).add(scope if multiplies else None)
        if multiplies:
            for factor in tensors_in((args, kwargs)):
                self.factors.setdefault(scope, set()).update(self._sources(factor) or {None})
        if attends:  # whose results may have the session's bits
            self.factors.setdefault(scope, set()).add(None)
        if multiplies or attends:
            self._follow({scope}, out)

    def forget(self) -> None:
        """The run is over: drop the tensors that were followed."""
        self._results.clear()

    def _sources(self, value: object) -> set[str]:
        found = ((each, self._results.get(id(each))) for each in tensors_in(value))
        return {name for each, known in found if known is not None and known[0]() is each for name in known[1]}

    def _follow(self, sources: set[str], out: object) -> None:
        if sources:
            for each in tensors_in(out):
                self._results[id(each)] = (weakref.ref(each), sources)  # which keeps no activation in memory


def with_readers(ranges: Ranges, readers: ResultReaders, config: PrivateConfig) -> Ranges:
    """`ranges`, with `read` for modules whose results are read by products alone, of known sizes."""
    modules = ranges.to_dict()
    followed = {
        name for name, found in readers.of.items()
        if name in modules and all(each is not None and "output" in ranges.modules.get(each, {}) for each in found)
    }  # fmt: skip
    for name in followed:
        modules[name]["read"] = max(
            ranges.modules[each]["output"]
            + (
                min(config.frac_bits, READ_BITS) if readers.factors[each] <= followed
                else ranges.modules[each].get("weight", config.frac_bits)  # of the other factor
            )
            for each in readers.of[name] if each is not None
        )  # fmt: skip
    return Ranges(modules)
