"""Who reads the results of products, as calibration meets it: where products alone do, fewer of their bits are needed.

Results of linear layers, of products of two values and of fused attention are followed through activations that keep
their size and through new shapes, until something else reads them. A product below 2^s in ring elements is the same
number modulo 2^(s+3), so its factors need to be right in as many bits (`Fixed.mul`). What is met in calibration is a
hint: a product at the parties that needs more bits than it gets makes them right first. Products of two such results
(gate and up) meet factors with READ_BITS fractional bits, others with as many as weights or the configuration have.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from private_llm.config import PrivateConfig
from private_llm.ranges import Ranges
from private_llm.tensor.dispatch import TorchArg
from private_llm.tensor.fixed import READ_BITS
from private_llm_hf.checkpoint.norm_readers import tensors_in
from private_llm_hf.handlers import match

_KEEP = {
    F.relu, torch.relu, Tensor.relu, F.gelu, F.silu,
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
        self.factors: dict[str, set[str | None]] = {}
        """The modules whose results are factors of each product; None among them is a factor that is anything else."""
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
            ranges.modules[each]["output"] + _factor_bits(each, ranges, readers, followed, config)
            for each in readers.of[name] if each is not None
        )  # fmt: skip
    return Ranges(modules)


def _factor_bits(
    reader: str, ranges: Ranges, readers: ResultReaders, followed: set[str], config: PrivateConfig
) -> int:  # fmt: skip
    """Fractional bits of the other factor of a product."""
    if readers.factors[reader] <= followed:
        return min(config.frac_bits, READ_BITS)
    return ranges.modules[reader].get("weight", config.frac_bits)
