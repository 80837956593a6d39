"""What two models that should be one compute on the same inputs, and the first module in which they differ."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig, PreTrainedModel

EQUAL = 1e-5
"""Largest difference between two runs of the same code, as a part of the largest value: sums in another order."""


def outputs(model: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor that one forward returns, by name, in float32 on the CPU; the model's mode stays as it was.

    Inputs go to where the weights lie. A model that was compiled runs without its compiler.
    """
    weights = [value for value in model.parameters() if not value.is_meta]
    device = weights[0].device if weights else torch.device("cpu")
    dtype = next((value.dtype for value in weights if value.is_floating_point()), torch.float32)
    moved = {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in given.items()}
    with torch.no_grad(), evaluating(model), _eager():
        made = model(**moved, return_dict=True)
    named = made.items() if isinstance(made, Mapping) else enumerate(_leaves(made))
    return {str(name): _seen(value) for name, value in named if isinstance(value, Tensor)}


def generated(model: PreTrainedModel, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As `outputs`, of the two tokens that the model says after a text: the second is a step behind the cache."""
    device = next((value.device for value in model.parameters() if not value.is_meta), torch.device("cpu"))
    settings = GenerationConfig(
        max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    ids = given["input_ids"].to(device)
    with torch.no_grad(), evaluating(model), _eager():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return {f"logits of step {step}": _seen(value) for step, value in enumerate(made.logits)}


def difference(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], allowed: float = EQUAL) -> str | None:
    """What differs, in words; None if nothing does. allowed: as a part of the largest value of each tensor."""
    for name in sorted(set(wanted) | set(found)):
        if name not in wanted or name not in found:
            return f"only one of the two returns {name}"
        if not _same(wanted[name], found[name], allowed):
            if wanted[name].shape != found[name].shape:
                return f"{name} has shape {tuple(wanted[name].shape)} and {tuple(found[name].shape)}"
            error = float((wanted[name] - found[name]).abs().nan_to_num(float("inf")).max())
            return f"{name} differs by {error:.3g}"
    return None


Calls = dict[str, tuple[list[Tensor], list[Tensor]]]
"""Inputs and outputs of modules by name, in the order in which they end."""


def first_difference(first: Calls, second: Calls, allowed: float = EQUAL) -> str:
    """The innermost module that makes another output of the same first input; "" for the whole model.

    Masks come after it, and ways to compute the same attention take them in different forms.
    """
    differing = [name for name in second if name in first and not _alike(first[name][1], second[name][1], allowed)]
    begun = (name for name in differing if _alike(first[name][0][:1], second[name][0][:1], allowed))
    return next(begun, differing[0] if differing else "")


def recorded(model: nn.Module, parts: Mapping[str, nn.Module], given: Mapping[str, Tensor]) -> Calls:
    """The first call of each of these modules in one forward of the model."""
    calls: Calls = {}
    handles: list[RemovableHandle] = []

    def keep(name: str) -> Any:  # noqa: ANN401 - a hook
        def hook(module: nn.Module, args: object, kwargs: object, made: object) -> None:
            seen = ([_seen(value) for value in _leaves((args, kwargs))], [_seen(value) for value in _leaves(made)])
            calls.setdefault(name, seen)

        return hook

    try:
        for name, part in parts.items():
            handles.append(part.register_forward_hook(keep(name), with_kwargs=True))
        outputs(model, given)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _alike(first: list[Tensor], second: list[Tensor], allowed: float) -> bool:
    return len(first) == len(second) and all(_same(a, b, allowed) for a, b in zip(first, second, strict=True))


def _same(first: Tensor, second: Tensor, allowed: float) -> bool:
    if first.shape != second.shape:
        return False
    if first.numel() == 0:
        return True
    size = float(first[first.isfinite()].abs().max()) if bool(first.isfinite().any()) else 0.0
    return torch.allclose(first, second, rtol=0.0, atol=allowed * size, equal_nan=True)


def _seen(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float32, copy=True)  # the model may go on in place


def _leaves(value: object) -> list[Tensor]:
    """The tensors in arguments or results, in order; caches and other objects are left out."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    return []


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and afterwards in its own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _eager() -> contextlib.AbstractContextManager[object]:
    """Without the compiler; a process that has not loaded it has compiled nothing."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    made: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return made
