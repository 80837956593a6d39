"""A model in memory as the parties will build it: from its class and configuration, with its weights.

What was changed after loading the parties cannot know. So the model is built again, without a copy of its weights, and
both compute one short text: where they agree, what was built again goes on; where not, the first module that differs
is named. What a short text does not show (a window, an eps, numbers of positions) is compared as it stands.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from private_llm.errors import PatchMismatch
from private_llm_hf.checkpoint.dense import first_line
from private_llm_hf.checkpoint.given_parts import pairs, part, strange_modules, value
from private_llm_hf.checkpoint.model_spec import sent_values
from private_llm_hf.checkpoint.same_outputs import EQUAL, difference, first_difference, generated, outputs, recorded
from private_llm_hf.checkpoint.sample_inputs import longer_inputs, sample_inputs
from private_llm_hf.checkpoint.weights import AS_GIVEN, STATISTICS, WeightList, dense_weight, skeleton, without_weights

_ELSEWHERE = 1e-2
"""As EQUAL, where accelerate moves the model between devices, whose kernels differ."""

_OF_TRAINING = ("training", "gradient_checkpointing", "activation_checkpointing", "name_or_path")
"""Attributes of modules that change nothing in evaluation."""

_SIZES = (
    "vocab_size", "vocab_size_per_layer_input", "num_embeddings", "padding_idx", "in_features", "out_features", "nf",
    "nx", "layer_idx",
)  # fmt: skip
"""Attributes that say what shapes of weights say, or only which gradients or caches are whose."""

_SHOWN = 5
_PLAIN = (float, int, bool, str, types.NoneType)
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
"""Ways of transformers to compute the same attention."""


def as_built(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """The model as its class and configuration make it, with the weights of `model`, in evaluation mode.

    config: that of `model`, or one that says the same. Sizes of the vocabulary, tied weights and the number of layers
    are taken from the model where the configuration says something else. Costs one forward each of six tokens; where a
    forward was replaced on an object, one of up to 512 as well, and two generated tokens, which show what differs only
    for such shapes, but not every condition that code may have. Weights are not copied. Raises PatchMismatch, with the
    module's name, where the two compute something else, hold other buffers or numbers (eps, scaling), or where weights
    are missing.
    """
    with AS_GIVEN:
        return _as_built(model, config)


def _as_built(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    _refuse_own_code(model)
    given = sample_inputs(model)
    config = _as_given(model, config)
    built = without_weights(type(model), _as_read(config))
    built.eval()
    strange = strange_modules(model, built)
    try:
        _take_weights(model, built)
    except PatchMismatch:
        _refuse_strange(model, strange)
        raise
    try:
        with _unpacked(model):
            wanted = outputs(model, given)
    except Exception as error:
        raise PatchMismatch(
            f"patch: this {type(model).__name__} does not run in the clear on a short text "
            f"({type(error).__name__}: {first_line(error)}); want a model that runs with {', '.join(given)}"
        ) from error
    _check_buffers(model, built)
    _check_numbers(model, built)
    allowed = (
        EQUAL if len({weight.device for weight in (*model.parameters(), *built.parameters())}) == 1 else _ELSEWHERE
    )
    found = difference(wanted, outputs(built, given), allowed)
    replaced = _replaced_forwards(model)
    if found is None and replaced:
        given = longer_inputs(config, given)
        found = _longer_difference(model, built, given, allowed)
        if found is not None:
            raise PatchMismatch(
                f"patch: forward of '{replaced[0]}' was replaced on this one object, and on a longer text, a token "
                f"alone or a step with a cache the model computes other values than its class ({found}), which parties "
                "and the private model run; remove it (del), or change the class"
            )
    if found is None:
        built.config = config
        return built
    _refuse_strange(model, strange)
    both = pairs(model, built)
    mine = recorded(model, {name: pair[0] for name, pair in both.items()}, given)
    theirs = recorded(built, {name: pair[1] for name, pair in both.items()}, given)
    name = first_difference(mine, theirs, allowed)
    raise PatchMismatch(
        f"patch: '{name or type(model).__name__}' ({type(both[name][1]).__name__}) does not compute what its class "
        f"and the model's configuration say, from which the parties build it ({found}); undo the change, or change the "
        "configuration and load the model again"
    )


def _longer_difference(
    model: PreTrainedModel, built: PreTrainedModel, given: dict[str, Tensor], allowed: float
) -> str | None:
    """What differs for a longer text, one of a token, and in steps with a cache; None if nothing does."""
    first = {name: value[:, :1] if name.endswith("input_ids") else value for name, value in given.items()}
    runs: list[tuple[Callable[..., dict[str, Tensor]], dict[str, Tensor]]] = [(outputs, given), (outputs, first)]
    if model.can_generate():
        runs.append((generated, given))
    for run, inputs in runs:
        try:
            with _unpacked(model):
                wanted = run(model, inputs)
        except Exception as error:  # noqa: BLE001 - a foreign forward may raise anything
            return f"{type(error).__name__}: {first_line(error)}"
        found = difference(wanted, run(built, inputs), allowed)
        if found is not None:
            return found
    return None


# -- what the configuration should say ------------------------------------------------------------------------------
def _as_given(model: PreTrainedModel, config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with the sizes that the model has."""
    bare = skeleton(type(model), config)
    text = config.get_text_config()
    changes: dict[str, object] = {}
    rows = _rows(model)
    if rows is not None and isinstance(getattr(text, "vocab_size", None), int) and rows != text.vocab_size:
        changes["vocab_size"] = rows
    layers = _layers(model, bare, getattr(text, "num_hidden_layers", None))
    if layers is not None:
        changes["num_hidden_layers"] = layers
        kinds = getattr(text, "layer_types", None)
        if isinstance(kinds, list):
            changes["layer_types"] = kinds[:layers]
    untied = any(_untied(model, name, source) for name, source in WeightList.of(bare).tied.items())
    own = config._attn_implementation
    if not changes and not untied and own in (None, *_ATTENTION):
        return config
    changed = copy.deepcopy(config)
    for name, size in changes.items():
        setattr(changed.get_text_config(), name, size)
    if untied:
        changed.tie_word_embeddings = changed.get_text_config().tie_word_embeddings = False
    if own not in (None, *_ATTENTION):
        changed._attn_implementation = "eager"
    return changed


def _as_read(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration as parties read it: what was set on it may become something else on the way."""
    values = sent_values(config)
    read = AutoConfig.for_model(values.pop("model_type"), **values)
    read._attn_implementation = config._attn_implementation
    return read


def _rows(model: PreTrainedModel) -> int | None:
    """Tokens in the table of embeddings."""
    try:
        table = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return table.weight.shape[0] if isinstance(table, nn.Embedding) else None


def _layers(model: nn.Module, bare: nn.Module, count: object) -> int | None:
    """How many layers are left of those that the configuration counts; None for all of them."""
    for name, layers in bare.named_modules():
        mine = part(model, name)
        if isinstance(layers, nn.ModuleList) and isinstance(mine, nn.ModuleList) and len(layers) == count:
            return len(mine) if 0 < len(mine) < len(layers) else None
    return None


def _untied(model: nn.Module, name: str, source: str) -> bool:
    first, second = value(model, name), value(model, source)
    if first is None or second is None or first is second:
        return False
    return first.shape != second.shape or not torch.equal(_dense(name, first), _dense(source, second))


# -- modules and weights --------------------------------------------------------------------------------------------
def _refuse_strange(model: PreTrainedModel, strange: list[str]) -> None:
    if strange:
        more = f" and {len(strange) - _SHOWN} more" if len(strange) > _SHOWN else ""
        raise PatchMismatch(
            f"patch: {len(strange)} module(s) of this {type(model).__name__} are not those of its class: "
            f"{', '.join(strange[:_SHOWN])}{more}; the parties build it from its configuration alone, so load it "
            "without quantisation, merge its adapters, or undo the change"
        )


def _take_weights(model: PreTrainedModel, built: PreTrainedModel) -> None:
    """Give the weights of the one to the other, without a copy."""
    for name, owner, own in _surplus(model, built):
        raise PatchMismatch(
            f"patch: weight '{name}' is not in the model's configuration, from which the parties build it; want the "
            f"class as transformers loads it ({type(owner).__name__}.{own} would be lost)"
        )
    wanted = WeightList.of(built)
    made: dict[str, nn.Parameter] = {}
    empty: list[str] = []
    for name, shape in wanted.shapes.items():
        found = value(model, name)
        if found is None:
            empty.append(name)
            continue
        if tuple(found.shape) != shape:
            raise PatchMismatch(
                f"weight '{name}': got shape {tuple(found.shape)}; want {shape} by the model's configuration; change "
                "the size in the configuration (num_labels, hidden_size, ...) as it was changed in the model"
            )
        made[name] = nn.Parameter(_dense(name, found), requires_grad=False)
    if empty:
        raise PatchMismatch(
            f"patch: {len(empty)} weights of {type(model).__name__} have no values, such as {empty[0]}; load them first"
        )
    for name, source in wanted.tied.items():
        if _untied(model, name, source):
            raise PatchMismatch(
                f"the class {type(model).__name__} ties '{name}' to '{source}', but they hold different values here, "
                "which the parties cannot build; want one value for both"
            )
    if len({weight.device for weight in made.values()}) > 1:  # a model over several devices: together again
        made = {name: nn.Parameter(weight.detach().cpu(), requires_grad=False) for name, weight in made.items()}
    for path, module in built.named_modules(remove_duplicate=False):
        for own in (*module._parameters, *(STATISTICS if isinstance(module, _BatchNorm) else ())):
            name = f"{path}.{own}" if path else own
            taken = made.get(wanted.tied.get(name, name))
            if taken is not None and own in module._parameters:
                module._parameters[own] = taken
            elif taken is not None:
                module._buffers[own] = taken.detach()


def _dense(name: str, found: Tensor) -> Tensor:
    return dense_weight(name, found.detach() if type(found) in (Tensor, nn.Parameter) else found)


def _surplus(model: nn.Module, built: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Weights that somebody added to modules whose own weights are all there (pruning puts some in their place)."""
    for path, (mine, module) in pairs(model, built).items():
        if any(own not in mine._parameters and own not in mine._buffers for own in module._parameters):
            continue
        for own, found in (*mine._parameters.items(), *mine._buffers.items()):
            stored = found is not None and found.is_floating_point() and own not in mine._non_persistent_buffers_set
            if stored and own not in module._parameters and own not in module._buffers:
                yield (f"{path}.{own}" if path else own), mine, own


@contextmanager
def _unpacked(model: nn.Module) -> Iterator[None]:
    """Weights in classes of their own (torchao's, for instance) as plain ones inside: the values that are shared.

    Raises PatchMismatch with the weight's name if one cannot be made plain.
    """
    held = []
    try:
        for path, module in model.named_modules():
            for own, value in module.named_parameters(recurse=False):
                plain = dense_weight(f"{path}.{own}" if path else own, value)
                if plain is not value:
                    held.append((module, own, value))
                    module._parameters[own] = nn.Parameter(plain, requires_grad=False)
        yield
    finally:
        for module, own, value in held:
            module._parameters[own] = value


# -- what stands beside weights -------------------------------------------------------------------------------------
def _check_buffers(model: PreTrainedModel, built: PreTrainedModel) -> None:
    """Raise for buffers other than those of the configuration; `built` gets them in the model's own precision."""
    device = next(built.parameters()).device
    for path, module in built.named_modules(remove_duplicate=False):
        if isinstance(module, _BatchNorm):
            continue
        for own, wanted in module._buffers.items():
            name = f"{path}.{own}" if path else own
            found = value(model, name)
            if wanted is None and found is None:
                continue
            if wanted is None or found is None or not _same_buffer(found, wanted):
                raise PatchMismatch(
                    f"patch: buffer '{name}' is not what the model's configuration makes it, from which the parties "
                    "build it; undo the change, or change the configuration and load the model again"
                )
            module._buffers[own] = found.to(device)


def _same_buffer(found: Tensor, wanted: Tensor) -> bool:
    """Whether a buffer is the other, or what `half()` or `bfloat16()` left of it."""
    found = found.cpu()
    if found.shape != wanted.shape:
        return False
    if not wanted.is_floating_point():
        return torch.equal(found, wanted.to(found.dtype))
    rounded = [wanted.to(dtype).float() for dtype in (torch.float32, torch.float16, torch.bfloat16)]
    return any(torch.allclose(found.float(), each, rtol=1e-6, atol=0.0, equal_nan=True) for each in rounded)


def _check_numbers(model: PreTrainedModel, built: PreTrainedModel) -> None:
    """Raise for settings of modules (eps, scaling, windows) and functions other than those of the configuration."""
    for path, (mine, module) in pairs(model, built).items():
        if isinstance(module, nn.Dropout):
            continue
        for own, found in vars(mine).items():
            wanted = getattr(module, own, None)
            ignored = own.startswith("_") or "drop" in own or own in (*_OF_TRAINING, *_SIZES)
            if not ignored and hasattr(module, own) and _is_setting(found, wanted) and found != wanted:
                name = f"{path}.{own}" if path else own
                raise PatchMismatch(
                    f"patch: '{name}' is {_short(found)} here, and {_short(wanted)} by the model's configuration, from "
                    "which the parties build it; change the configuration instead, and load the model again"
                )


def _is_setting(found: object, wanted: object) -> bool:
    if isinstance(found, types.FunctionType | types.BuiltinFunctionType):
        return type(found) is type(wanted) and getattr(found, "__code__", found) is not getattr(wanted, "__code__", 0)
    return all(
        type(each) in _PLAIN or (isinstance(each, tuple) and all(type(item) in _PLAIN for item in each))
        for each in (found, wanted)
    )


def _short(found: object) -> str:
    return f"{found:g}" if type(found) is float else getattr(found, "__name__", None) or str(found)


def _refuse_own_code(model: nn.Module) -> None:
    """Raise for hooks and methods of the user's on modules: parties do not run them."""
    for name, module in model.named_modules():
        called = name or type(model).__name__
        if any(_of_user(hook) for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())):
            raise PatchMismatch(f"patch: '{called}' has a forward hook, which parties do not run; remove it")
        for own, found in vars(module).items():
            of_class = getattr(type(module), own, None)
            if own != "forward" and isinstance(found, Callable) and callable(of_class) and _of_user(found):  # type: ignore[arg-type]
                raise PatchMismatch(
                    f"patch: '{called}.{own}' was replaced on this one object, and parties and the private model run "
                    "the class's own; remove it (del), or call it on the private model"
                )


def _replaced_forwards(model: nn.Module) -> list[str]:
    """Modules whose forward a user replaced on the object, or within what accelerate or a compiler put around it."""
    return [
        name or type(model).__name__
        for name, module in model.named_modules()
        for own in ("forward", "_old_forward")
        if own in vars(module) and any(map(_of_user, _around(vars(module)[own], type(module).forward)))
    ]


def _around(code: Any, of_class: object) -> Iterator[Any]:  # noqa: ANN401 - a function, method or partial
    """Functions around that of the class, from the outermost; all of them if it is not within."""
    while code is not None:
        function = getattr(code, "__func__", code)
        if function is of_class:
            return
        yield from _around(function.func, of_class) if isinstance(function, functools.partial) else (function,)
        code = getattr(function, "__wrapped__", getattr(function, "_torchdynamo_orig_callable", None))


def _of_user(code: Any) -> bool:  # noqa: ANN401 - a hook or a method
    """Whether code is not that of torch, transformers, accelerate or peft, which put some on modules themselves.

    functools.wraps gives a function another's `__module__`; its globals stay those of the file that it is from.
    """
    function = getattr(code, "__func__", code)
    home = getattr(function, "__globals__", {}).get("__name__") or getattr(code, "__module__", None)
    home = home or type(code).__module__
    return str(home).partition(".")[0] not in ("torch", "transformers", "accelerate", "peft")
