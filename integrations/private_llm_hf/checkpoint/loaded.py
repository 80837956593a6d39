"""A model in memory as the parties will build it: from its class and configuration, with its weights.

What was changed after loading the parties cannot know. So the model is built again, without a copy of its weights, and
both compute one short text: where they differ, the first such module is named. What a short text does not show (a
window, an eps, numbers of positions) is compared as it stands.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from private_llm.errors import PatchMismatch, listed
from private_llm_hf.checkpoint import given_parts, sample_inputs, weights
from private_llm_hf.checkpoint.dense import first_line
from private_llm_hf.checkpoint.given_parts import pairs, part, value
from private_llm_hf.checkpoint.model_spec import sent_values
from private_llm_hf.checkpoint.own_code import of_user, replaced_forwards
from private_llm_hf.checkpoint.sample_inputs import difference, evaluating, outputs, recorded
from private_llm_hf.models.architectures import require_inputs

_ELSEWHERE = 1e-2  # as EQUAL, where accelerate moves the model between devices, whose kernels differ

_SHOWN = 5


def as_built(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    """The model as its class and configuration make it, with the weights of `model`, in evaluation mode.

    config: that of `model`, or one that says the same. Sizes of the vocabulary, tied weights and the number of layers
    are taken from the model where the configuration says something else. Costs one forward each of six tokens; where a
    forward was replaced on an object, or attention is a function of somebody's own, one of up to 512 as well, and two
    generated tokens, which show what differs only for such shapes, but not every condition that code may have. Weights
    are not copied. Raises PatchMismatch, with the module's name, where the two consist of other classes, compute
    something else, hold other buffers, settings (eps, scaling) or configurations, or where weights are missing.
    """
    with weights.AS_GIVEN, evaluating(model):
        return _as_built(model, config)


def _as_built(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    given = _inputs(model)
    config = _as_given(model, config)
    sent = sent_values(config)
    try:
        read = AutoConfig.for_model(sent.pop("model_type"), **sent)  # as parties do: settings may change
    except Exception as error:  # a foreign configuration may raise anything
        raise PatchMismatch(
            f"patch: {type(config).__name__} does not read what it writes ({type(error).__name__}: "
            f"{first_line(error)}); use AutoPrivate....from_pretrained() with the folder of this model"
        ) from error
    read._attn_implementation = config._attn_implementation
    built = weights.without_weights(type(model), read)
    built.eval()
    strange = given_parts.strange_modules(model, built)
    if strange:
        raise PatchMismatch(
            f"patch: {len(strange)} module(s) of this {type(model).__name__} are not those of its class: "
            f"{listed(strange, _SHOWN)}; the parties build it from its configuration alone, so load it without "
            "quantisation, merge its adapters, or undo the change"
        )
    _take_weights(model, built)
    replaced = [f"forward of '{name}'" for name in replaced_forwards(model)]
    attention = _own_attention(model)
    if attention is not None:
        replaced.append(f"attention function {attention!r}")
    if given is None:
        return _untried(model, built, config, replaced)
    try:
        with _unpacked(model):
            wanted = outputs(model, given)
    except Exception as error:
        given_parts.check_settings(model, built)
        raise PatchMismatch(
            f"patch: this {type(model).__name__} does not run in the clear on a short text "
            f"({type(error).__name__}: {first_line(error)}); want a model that runs with {', '.join(given)}"
        ) from error
    given_parts.check_buffers(model, built)
    made = outputs(built, given)
    given_parts.check_settings(model, built)
    devices = {weight.device for weight in (*model.parameters(), *built.parameters())}
    allowed = sample_inputs.EQUAL if len(devices) == 1 else _ELSEWHERE
    found = difference(wanted, made, allowed)
    if found is None and replaced:
        given = sample_inputs.longer_inputs(config, given)
        found = _longer_difference(model, built, given, allowed)
        if found is not None:
            raise PatchMismatch(
                f"patch: {replaced[0]} is somebody's own, and on a longer text, a token alone or a step with a cache "
                f"the model computes other values than its class ({found}), which parties and the private model run; "
                "remove it (del), or change the class"
            )
    if found is None:
        built.config = config
        return built
    both = pairs(model, built)
    mine = recorded(model, {name: pair[0] for name, pair in both.items()}, given)
    theirs = recorded(built, {name: pair[1] for name, pair in both.items()}, given)
    name = sample_inputs.first_difference(mine, theirs, allowed)
    raise PatchMismatch(
        f"patch: '{name or type(model).__name__}' ({type(both[name][1]).__name__}) does not compute what its class "
        f"and the model's configuration say, from which the parties build it ({found}); undo the change, or change the "
        "configuration and load the model again"
    )


def _inputs(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """What a model can be tried on; None for those of sound, or of texts with images, which no shares are made of."""
    with suppress(PatchMismatch):
        require_inputs(type(model), model.config)
        return sample_inputs.sample_inputs(model)
    return None


def _untried(
    model: PreTrainedModel, built: PreTrainedModel, config: PretrainedConfig, replaced: list[str]
) -> PreTrainedModel:
    """The built model, compared as it stands. Raises PatchMismatch as `as_built`, and for what was replaced."""
    if replaced:
        raise PatchMismatch(
            f"patch: {replaced[0]} is somebody's own, and no inputs are known on which to compare this "
            f"{type(model).__name__} with its class; remove it (del), or change the class"
        )
    given_parts.check_buffers(model, built)
    given_parts.check_settings(model, built)
    built.config = config
    return built


def _longer_difference(
    model: PreTrainedModel, built: PreTrainedModel, given: dict[str, Tensor], allowed: float
) -> str | None:
    """What differs for a longer text, one of a token, and in steps with a cache; None if nothing does."""
    first = {name: value[:, :1] if name.endswith("input_ids") else value for name, value in given.items()}
    runs: list[tuple[Callable[..., dict[str, Tensor]], dict[str, Tensor]]] = [(outputs, given), (outputs, first)]
    if model.can_generate():
        runs.append((sample_inputs.generated, given))
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
    bare = weights.skeleton(type(model), config)
    text = config.get_text_config()
    changes: dict[str, object] = {}
    with suppress(NotImplementedError, AttributeError):
        table, stated = model.get_input_embeddings(), text.vocab_size
        if isinstance(table, nn.Embedding) and isinstance(stated, int) and len(table.weight) != stated:
            changes["vocab_size"] = len(table.weight)
    layers = _layers(model, bare, getattr(text, "num_hidden_layers", None))
    if layers is not None:
        changes["num_hidden_layers"] = layers
        kinds = getattr(text, "layer_types", None)
        if isinstance(kinds, list):
            changes["layer_types"] = kinds[:layers]
    untied = any(_untied(model, name, source) for name, source in weights.WeightList.of(bare).tied.items())
    own = _own_attention(model)
    pooled = part(model, "pooler") is not None
    repooled = weights.POOLER in inspect.signature(type(model)).parameters and pooled == (part(bare, "pooler") is None)
    if not changes and not untied and own is None and not repooled:
        return config
    changed = copy.deepcopy(config)
    for name, size in changes.items():
        setattr(changed.get_text_config(), name, size)
    if untied:
        changed.tie_word_embeddings = changed.get_text_config().tie_word_embeddings = False
    if own is not None:
        changed._attn_implementation = "sdpa" if own == "eager" else "eager"
    if repooled:
        changed.add_pooling_layer = pooled
    return changed


def _own_attention(model: PreTrainedModel) -> str | None:
    """The name under which attention is a function of somebody's own, also in place of transformers'; None if not."""
    name = model.config._attn_implementation
    used = [each[name] for each in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS) if name in each.valid_keys()]
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():  # "eager": the function in the file of the class
        used.append(getattr(sys.modules[type(model).__module__], "eager_attention_forward", None))
    own = name not in (None, *given_parts.ATTENTION) or any(each is not None and of_user(each) for each in used)
    return name if own else None


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
def _take_weights(model: PreTrainedModel, built: PreTrainedModel) -> None:
    """Give the weights of the one to the other, without a copy."""
    for path, (mine, module) in pairs(model, built).items():
        known = {*module._parameters, *module._buffers}
        held = {**mine._parameters, **mine._buffers}
        if not held.keys() >= module._parameters.keys():
            continue  # pruning puts some in their place
        for own, found in held.items():
            stored = found is not None and found.is_floating_point() and own not in mine._non_persistent_buffers_set
            if stored and own not in known:
                raise PatchMismatch(
                    f"patch: weight '{path}{'.' if path else ''}{own}' is not in the model's configuration, from which "
                    "the parties build it; want the class as transformers loads it "
                    f"({type(mine).__name__}.{own} would be lost)"
                )
    wanted = weights.WeightList.of(built)
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
        for own in (*module._parameters, *(weights.STATISTICS if isinstance(module, _BatchNorm) else ())):
            name = f"{path}.{own}" if path else own
            taken = made.get(wanted.tied.get(name, name))
            if taken is not None and own in module._parameters:
                module._parameters[own] = taken
            elif taken is not None:
                module._buffers[own] = taken.detach()


def _dense(name: str, found: Tensor) -> Tensor:
    return weights.dense_weight(name, found.detach() if type(found) in (Tensor, nn.Parameter) else found)


@contextmanager
def _unpacked(model: nn.Module) -> Iterator[None]:
    """Weights in classes of their own as plain ones inside. Raises PatchMismatch with the name where none can."""
    held = []
    try:
        for path, module in model.named_modules():
            for own, value in module.named_parameters(recurse=False):
                plain = weights.dense_weight(f"{path}.{own}" if path else own, value)
                if plain is not value:
                    held.append((module, own, value))
                    module._parameters[own] = nn.Parameter(plain, requires_grad=False)
        yield
    finally:
        for module, own, value in held:
            module._parameters[own] = value
