"""What runs in place of a module: one registry, which the patch plan and the parties' models both read.

A handler says which modules are its own, what the patch plan shows for them, and what a party runs instead; without
the last the module's own forward runs on shares. The first handler that matches decides; those of users come first.

    @register_handler(MyGate, becomes="secret gate", settings=("width",))
    class PrivateMyGate(nn.Module):
        def __init__(self, original: MyGate) -> None: ...   # weights: original's, under original's names
        def forward(self, x): ...                           # on SecretTensor
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from private_llm.errors import ConfigError
from private_llm.nn.activations import ACTIVATIONS
from private_llm.nn.modules import PrivateQuickGELU
from private_llm_hf.models import experts, routers
from private_llm_hf.models.architectures import read_facts, table
from private_llm_hf.models.norms import FoldedNorm, norm_of

Make = Callable[[Any], nn.Module]
AnyMake = TypeVar("AnyMake", bound=Make)


@dataclass(frozen=True)
class Handler:
    """One kind of module. becomes, public: the patch plan's words. make: the private module for one, or None.

    A private module has the weights of the one it stands for, as parameters of the same names. settings: of a user's
    module, its constructor arguments; None for those of this library. wide: its products need a 64-bit ring.
    """

    becomes: str
    public: str = ""
    make: Make | None = None
    settings: tuple[str, ...] | None = None
    wide: bool = False


Find = Callable[[nn.Module], Handler | None]

_of_users: dict[type[nn.Module], Handler] = {}


def register_handler(
    kind: type[nn.Module], becomes: str, public: str = "", settings: tuple[str, ...] = ()
) -> Callable[[AnyMake], AnyMake]:
    """Decorate what makes the private module for one of class `kind` (a class that takes the original, or a function).

    becomes, public: what `explain()` shows. settings: names of the constructor arguments of `kind`, which its modules
    must have as attributes: numbers, texts, flags or lists of them. With them a network of one's own (`Network`) may
    contain such modules. Holds in this process: parties elsewhere import the file that registers, see
    `PrivateConfig.plugins`. Raises ConfigError for a class that has a handler of a user already.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigError(f"register_handler: got {kind!r}; want a class of torch.nn.Module")

    def register(make: AnyMake) -> AnyMake:
        if kind in _of_users:
            raise ConfigError(f"register_handler: {kind.__name__} has a handler; unregister_handler({kind.__name__})")
        _of_users[kind] = Handler(becomes, public, make, tuple(settings))
        return make

    return register


def unregister_handler(kind: type[nn.Module]) -> None:
    """Take a handler away. Raises ConfigError if there is none for this class."""
    if _of_users.pop(kind, None) is None:
        raise ConfigError(f"unregister_handler: {kind.__name__} has no handler")


def kinds_of_users() -> dict[str, tuple[type[nn.Module], tuple[str, ...]]]:
    """Classes that users registered, by the name under which networks list them, with their settings."""
    return {f"{k.__module__}.{k.__qualname__}": (k, h.settings or ()) for k, h in _of_users.items()}


def handler_of(module: nn.Module) -> Handler | None:
    """What runs in place of a module; None if nothing is known of it."""
    return next((found for find in _FINDERS if (found := find(module)) is not None), None)


def _norm(module: nn.Module) -> Handler | None:
    norm = norm_of(module)
    if norm is None:
        return None
    kind = f"secret {'RMS' if norm.kind == 'rms' else 'layer'} norm"
    folded = ", its weight in the layers that read it" if isinstance(module, FoldedNorm) else ""
    return Handler(kind + folded, make=norm.private, wide=True)


def _gelu(module: nn.Module) -> Handler | None:
    """A GELU that is spelled by hand, or in the module around it."""
    kind = match("gelus", module)
    forwards: dict[str, Callable[..., Tensor]] = {
        "EsmIntermediate": lambda module, hidden_states: F.gelu(module.dense(hidden_states)), "EsmLMHead": _esm_head,
    }  # fmt: skip
    forward = forwards.get(type(module).__name__)
    if kind is not None:
        return Handler("secret GELU", "", lambda _: PrivateQuickGELU() if kind == "quick" else nn.GELU(kind), wide=True)
    return forward and Handler("secret GELU", make=functools.partial(_with_forward, forward), wide=True)


_EXPERTS = "all experts on all tokens, or as many of a row for each (expert_capacity)"


def _experts(module: nn.Module) -> Handler | None:
    if experts.is_experts(module):
        return Handler(_EXPERTS, "number of experts", experts.PrivateExperts)
    if experts.is_clamped_experts(module):
        return Handler(_EXPERTS, "number of experts", experts.PrivateClampedExperts)
    found = routers.router_of(module)
    if found is None:
        return None
    routing, parts = found
    return Handler(
        f"secret {routing.score}, comparisons of all pairs",
        "experts a token" if routing.groups is None else "experts a token, groups",
        lambda router: routers.PrivateRouter(router, routing, parts),
    )


def _by_name(module: nn.Module) -> Handler | None:
    """Rules of models/modules.json: operations that tensors have rules for."""
    rule = _named(read_facts("modules.json"), module)
    return None if rule is None else Handler(**rule)


def _activation(module: nn.Module) -> Handler | None:
    """PyTorch's own classes of functions, by their records."""
    found = (made for made in ACTIVATIONS if made.module is not None and made.module.__name__ == type(module).__name__)
    texts = {True: "secret {}", False: "secret comparison and selection"}
    return next((Handler(texts[made.wide].format(made.name), wide=made.wide) for made in found), None)


_FINDERS: tuple[Find, ...] = (lambda module: _of_users.get(type(module)), _norm, _gelu, _experts, _by_name, _activation)


def match(section: str, module: nn.Module) -> Any:  # noqa: ANN401 - a JSON value
    """What a section of models/replacements.json says of a class."""
    return _named(table(section), module)


def _named(rules: Mapping[str, Any], module: nn.Module) -> Any:  # noqa: ANN401 - a JSON value
    """The first of these whose pattern is the name of the module's class."""
    return next((facts for names, facts in rules.items() if re.fullmatch(names, type(module).__name__)), None)


# -- ESM spells a GELU by hand, and leaves its embeddings out for tokens that were looked up --------------------------
UNMASKED = 1 - 0.15 * 0.8  # the part of tokens that ESM's training left unmasked, which scales texts without masks


def _esm_head(module: Any, features: Tensor, **_: object) -> Tensor:  # noqa: ANN401 - transformers' module
    made: Tensor = module.decoder(module.layer_norm(F.gelu(module.dense(features)))) + module.bias
    return made


def _with_forward(forward: Callable[..., Tensor], module: nn.Module) -> nn.Module:
    vars(module)["forward"] = functools.partial(forward, module)
    return module


def is_esm(module: nn.Module) -> bool:
    """Whether a module is ESM without a head."""
    return type(module).__name__ == "EsmModel"


def embedding_first(
    model: Any, input_ids: None = None, attention_mask: Tensor | None = None,  # noqa: ANN401 - transformers' module
    position_ids: Tensor | None = None, *, inputs_embeds: Tensor, **kwargs: Any,  # noqa: ANN401 - as the module
) -> Any:  # noqa: ANN401 - as the module  # fmt: skip
    """EsmModel.forward of embeddings that were looked up: transformers leaves out what follows the lookup for these.

    Tokens are scaled as in a text without masks, which would change the factor: the client refuses them
    (`check_mask_tokens`). Rotary positions are counted by place, others after padding.
    """
    _ = input_ids  # heads pass it on
    scaled = inputs_embeds * UNMASKED if model.embeddings.token_dropout else inputs_embeds
    embedded = model.embeddings(inputs_embeds=scaled, attention_mask=attention_mask, position_ids=position_ids)
    places = None if model.position_embedding_type == "rotary" else position_ids
    return type(model).forward(
        model, inputs_embeds=embedded, attention_mask=attention_mask, position_ids=places, **kwargs
    )
