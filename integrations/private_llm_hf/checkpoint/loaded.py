"""Whether a loaded model is what its configuration says: the parties build theirs from that."""

from __future__ import annotations

import threading

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from private_llm.errors import PatchMismatch
from private_llm_hf.checkpoint.weights import skeleton

AS_GIVEN = threading.Lock()
"""Held while a model of the caller's is in another state than the caller gave it in, and by who looks at that state."""

_OF_TRAINING = ("training", "gradient_checkpointing", "activation_checkpointing")
"""Attributes of modules that change nothing in evaluation."""


def refuse_changes(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Raise PatchMismatch for weights and numbers (eps, scaling) other than those of its configuration.

    The parties build the model from its configuration, so what was changed afterwards would be lost.
    """
    with AS_GIVEN:
        _refuse_changes(model, config)


def _refuse_changes(model: PreTrainedModel, config: PretrainedConfig) -> None:
    bare = skeleton(type(model), config)
    built, wanted_weights = dict(bare.named_modules()), bare.state_dict()
    more = [n for n, v in model.state_dict().items() if n not in wanted_weights and v.is_floating_point()]
    if more:
        raise PatchMismatch(
            f"patch: weight '{more[0]}' is not in the model's configuration, from which the parties build it; want the "
            "class as transformers loads it"
        )
    for name, module in model.named_modules():
        if name not in built or isinstance(module, nn.Dropout):
            continue
        if any(_of_user(hook) for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())):
            raise PatchMismatch(
                f"patch: '{name or type(model).__name__}' has a forward hook, which parties do not run; remove it"
            )
        for own, value in vars(module).items():
            wanted = vars(built[name]).get(own)
            plain = type(value) in (float, int, bool) and type(wanted) is type(value)
            if plain and value != wanted and "drop" not in own and own not in _OF_TRAINING:
                raise PatchMismatch(
                    f"patch: '{name}.{own}' is {_short(value)} here, and {_short(wanted)} by the model's "
                    "configuration, from which the parties build it; change the configuration instead"
                )


def _short(value: object) -> str:
    return f"{value:g}" if type(value) is float else str(value)


def _of_user(hook: object) -> bool:
    """Whether a hook is none of those that transformers and Accelerate put on modules themselves."""
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return not str(home).startswith(("transformers.", "accelerate.", "torch."))
