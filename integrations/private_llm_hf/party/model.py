"""One party's model: HuggingFace's own module tree and forward, with this party's shares as parameters.

No plaintext weight is ever here: the tree is built without weights, then every parameter is set to a share
(or, with weights="public", to the public tensor). Norms and hand-spelled activations are replaced by modules that call
one protocol; attention and masks are in `kv_cache`, and every module books its cost under its own name.
"""

import copy
import functools
import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

import private_llm.nn  # noqa: F401 - completes the table of operations
from private_llm.errors import PatchMismatch, listed
from private_llm.kernels.address import trim_allocator
from private_llm.kv_cache.policies.policy import CachePolicy
from private_llm.nn.linear import SharedInput, can_share
from private_llm.protocols.session import Session
from private_llm.protocols.share import Share
from private_llm.replay.modules import repeated
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor
from private_llm_hf.checkpoint.folds import NONE_FOLDED, Folded, fold_batch_norms, fold_norms
from private_llm_hf.checkpoint.model_spec import accepted_class
from private_llm_hf.checkpoint.weights import without_weights
from private_llm_hf.kv_cache.attention_interface import register
from private_llm_hf.kv_cache.cache import RepeatedLayer, SecretCache, SecretEncoderDecoderCache
from private_llm_hf.kv_cache.model_checks import expanded, expands_latents, windowed_layers
from private_llm_hf.models.architectures import attention_of, table
from private_llm_hf.models.handlers import embedding_first, handler_of, is_esm, match
from private_llm_hf.models.sparse_blocks import attach_predictors, make_sparse
from private_llm_hf.party.placement import PlacedValue, Placement
from private_llm_hf.patch_plan import make_patch_plan

_HOLES = 1 << 23  # weights whose joining leaves holes worth returning: 64 MB of each part of a share, in 64 bits

AnyValue = TypeVar("AnyValue", bound=PlacedValue)


def build_party_model(
    config: Mapping[str, Any], class_name: str, parameters: MutableMapping[str, AnyValue], session: Session,
    progress: Callable[[], None] = lambda: None, folded: Folded = NONE_FOLDED,
) -> PreTrainedModel:  # fmt: skip
    """A model of transformers' class `class_name` whose parameters are this party's shares.

    `parameters` maps the model's own parameter names (tied ones once, under the name they are tied to) to shares. It
    is emptied: a weight that becomes part of a larger one (query, key and value) is not kept beside it.
    Modules lie where the session's device_map says. `progress` is called after each weight, and later whenever a
    module runs. folded: norms whose weights are part of other layers. The result also has `new_cache()`. Raises
    PatchMismatch for modules without a rule and missing, surplus or misshapen weights, ConfigError for a device_map
    that does not fit.
    """
    model = empty_model(config, class_name, folded)
    make_patch_plan(model, session.config)
    _replace_modules(model)
    placement = Placement(model, session)
    _set_parameters(model, parameters, placement, progress)
    _check_complete(model, session, placement.on_disk)
    model.new_cache = functools.partial(new_cache, model, session.config.kv_cache)
    grouped = _share_inputs(model, session, placement)
    make_sparse(model, session, placement.on_disk)
    _repeat_modules(model, session, grouped)
    for name, module in model.named_modules():
        if name and not isinstance(module, _CONTAINERS):
            module.forward = _followed(module.forward, session, name, progress)
    placement.attach(model)
    return model.eval()


def meta_parameters(model: PreTrainedModel, session: Session) -> dict[str, Fixed | Tensor]:
    """Weights without values for an `empty_model`: what `build_party_model` takes in a meta session.

    Public weights that meet secrets only (matrices, filters, the table of tokens) have no memory. Others also meet
    public values (positions, masks), so they are real: zeros that take the memory of one number.
    """
    if session.config.weights == "public":
        products = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d, Conv1D))]
        if model.main_input_name == "input_ids":
            products.append(model.get_input_embeddings())
        large = {id(m.weight) for m in products}
        zero = torch.zeros(())
        return {n: p.detach() if id(p) in large else zero.expand(p.shape) for n, p in model.named_parameters()}
    count = len(session.protocol.public(torch.zeros(1, dtype=session.ring.dtype, device="meta")).parts)
    made: dict[str, Fixed | Tensor] = {}
    for name, value in model.named_parameters():
        parts = [torch.empty(value.shape, dtype=session.ring.dtype, device="meta") for _ in range(count)]
        made[name] = Fixed(session, Share(tuple(parts)), session.numerics.ranges.frac_of_weight(name, session.frac))
    return made


def release(model: nn.Module) -> None:
    """Let go of all that a model holds, at once: forwards that were replaced would keep it for many sessions."""
    for module in list(model.modules()):
        vars(module).clear()


def new_cache(model: PreTrainedModel, policy: CachePolicy) -> SecretCache | SecretEncoderDecoderCache:
    """An empty KV cache for this model (with two stacks it keeps all: `make_patch_plan` refuses another policy)."""
    if model.config.is_encoder_decoder:
        return SecretEncoderDecoderCache()
    return SecretCache(policy, windowed_layers(model.config))


# -- the bare tree ---------------------------------------------------------------------------------------------
def empty_model(config: Mapping[str, Any], class_name: str, folded: Folded = NONE_FOLDED) -> PreTrainedModel:
    """The module tree with public buffers, norms `folded`. Raises PatchMismatch as `architecture()`, first of all."""
    cls = accepted_class(class_name, config)
    register()
    model = without_weights(cls, party_config(config, cls))
    fold_batch_norms(model)
    fold_norms(model, folded)
    attach_predictors(model)
    return model


def party_config(config: Mapping[str, Any], cls: type[PreTrainedModel]) -> PretrainedConfig:
    """A configuration for a party: private attention, float32 outside, no cache unless one is passed."""
    values = copy.deepcopy(dict(config))
    settings = AutoConfig.for_model(values.pop("model_type", ""), **values)
    settings._attn_implementation = attention_of(settings.model_type, cls)
    settings.dtype = torch.float32
    settings.use_cache = False
    if getattr(settings, "output_router_logits", False):
        settings.output_router_logits = False  # routing stays secret
    return settings


# -- replacing ----------------------------------------------------------------------------------------------
def _replace_modules(model: nn.Module) -> None:
    """Children before parents: a private module may keep a child of the module that it stands for."""
    for parent in reversed(list(model.modules())):
        for name, child in list(parent.named_children()):
            handler = handler_of(child)
            if handler is not None and handler.make is not None:
                setattr(parent, name, handler.make(child))
        places = match("pool_first", parent)
        if places is not None:
            _pool_first(parent, *places.split())
        if is_esm(parent):
            vars(parent)["forward"] = functools.partial(embedding_first, parent)
        if expands_latents(parent):
            vars(parent)["expand_kv"] = functools.partial(expanded, parent)


def _pool_first(parent: nn.Module, relu: str, pool: str) -> None:
    """Let a max pool go before the ReLU that it follows: the same function, with fewer comparisons."""
    held = [parent.get_submodule(name) for name in (relu, pool)]
    if isinstance(held[0], nn.ReLU) and isinstance(held[1], nn.MaxPool2d):
        for name, module in zip((pool, relu), held, strict=True):
            path, _, own = name.rpartition(".")
            setattr(parent.get_submodule(path), own, module)


Grouped = dict[nn.Module, list[tuple[str, object]]]  # modules of a product, and all its weights at one of them


def _share_inputs(model: nn.Module, session: Session, placement: Placement) -> Grouped:
    """Let siblings that read the same tensor (query, key, value; gate, up) be one product; returns them.

    Joining copies, and leaves holes where the pieces were, which the allocator would keep: one after the other they
    grow to a part of the model, so they go back to the system now and then.
    """
    grouped: Grouped = {}
    left = 0
    for path, parent in model.named_modules():
        children = dict(parent.named_children())
        for names, where in table("same_input").items():
            found = [children[name] for name in names.split() if name in children]
            if len(found) == len(names.split()) and re.fullmatch(where, path) and can_share(found):
                read = placement.reader([f"{path}.{name}" for name in names.split()], found)
                name = f"{path}.{'+'.join(names.split())}"
                group = SharedInput(found, name, session, read)
                shares: list[tuple[str, object]] = [("read for each product", None)]
                if group.kept is not None:
                    shares = [(str(n), each) for n, each in enumerate(group.kept) if each is not None]
                    group.product = repeated(group.product, name, session, ("product", *group.sizes), shares)
                for index, layer in enumerate(found):
                    layer.forward = functools.partial(group.piece, index)
                grouped |= {layer: [] for layer in found} | {found[0]: shares}
                left += 0 if read else sum(layer.weight.numel() for layer in found)
                if left >= _HOLES:
                    trim_allocator()
                    left = 0
    return grouped


def _repeat_modules(model: nn.Module, session: Session, grouped: Grouped) -> None:
    """Let modules run as recorded programs where they can: where nothing but inputs and weights decides what they do.

    Those of a group keep pieces from call to call, blocks of predicted neurons which of them were opened, and what a
    user's module keeps is not known.
    """
    if session.config.sparsity is not None:
        return
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    # layers are several modules, or one, of one kind that contain others
    alike = [each for each in lists if len(set(map(type, each))) == 1]
    alike = [each for each in alike if all(len(list(layer.children())) > 1 for layer in each)]
    layers = {layer: number for each in alike for number, layer in enumerate(each)}
    for name, module in model.named_modules():
        packages = {type(each).__module__.partition(".")[0] for each in module.modules()}
        if name and module not in grouped and not isinstance(module, _CONTAINERS) and packages <= _KNOWN_PACKAGES:
            kind, weights = (type(module), repr(module)), list[tuple[str, object]](module.named_parameters())
            if module in layers:
                within = [(own, grouped.get(each, [])) for own, each in module.named_modules()]
                weights += [(f"{own}+{number}", share) for own, shares in within for number, share in shares]
                module.forward = RepeatedLayer(module.forward, name, session, kind, weights, layers[module])
            else:
                module.forward = repeated(module.forward, name, session, kind, weights)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)

_KNOWN_PACKAGES = {"torch", "transformers", "private_llm", "private_llm_hf"}  # same inputs give same results


# -- weights ------------------------------------------------------------------------------------------------
def _set_parameters(
    model: PreTrainedModel, parameters: MutableMapping[str, AnyValue], placement: Placement,
    progress: Callable[[], None],
) -> None:  # fmt: skip
    """Set every parameter; a tied one may come under any of its names."""
    groups: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for own, value in module.named_parameters(recurse=False):
            groups.setdefault(id(value), []).append((f"{path}.{own}" if path else own, module, own))
    missing = []
    for places in groups.values():
        name = next((name for name, _, _ in places if name in parameters), None)
        if name is None:
            missing.append(places[0][0])
            continue
        wanted, value = places[0][1]._parameters[places[0][2]], parameters.pop(name)
        if wanted is None or tuple(value.shape) != tuple(wanted.shape):
            raise PatchMismatch(
                f"weight '{name}': got {tuple(value.shape)}; want {tuple(getattr(wanted, 'shape', ()))}"
            )
        placement.settle(places, value)
        progress()
    surplus = sorted(parameters)
    if missing or surplus:
        raise PatchMismatch(
            f"{type(model).__name__}: weights do not match the model; missing: {_some(missing)}; "
            f"not expected: {_some(surplus)}"
        )


def _check_complete(model: PreTrainedModel, session: Session, on_disk: set[str]) -> None:
    held = [(name, p) for name, p in model.named_parameters() if name not in on_disk]
    left = [name for name, p in held if p.device.type == "meta" and session.device != "meta"]
    if session.config.weights == "secret":
        left += [name for name, p in held if not isinstance(p, SecretTensor)]
    left += [name for name, b in model.named_buffers() if b.device.type == "meta"]
    if left:
        raise PatchMismatch(
            f"{type(model).__name__}: neither shared nor public after loading: {_some(sorted(set(left)))}"
        )


def _some(names: list[str]) -> str:
    return listed(names) or "none"


# -- costs by module ------------------------------------------------------------------------------------------
def _followed(
    forward: Callable[..., Any], session: Session, name: str, progress: Callable[[], None]
) -> Callable[..., Any]:
    """While a module runs, its ranges hold and what it sends is booked under its name; report that it runs."""
    end, ledger = session.protocol, session.protocol.ledger

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a module's own signature
        progress()
        # `Session.module` without generators: modules are many
        outer, before, end.module = ledger.enter(name), end.module, name
        try:
            return forward(*args, **kwargs)
        finally:
            end.module = before
            ledger.leave(outer)

    return run
